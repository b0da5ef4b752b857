"""Controls of what goes wrong below a driver: disks, networks and servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from control import PATH, Control
from control_faults import BUFFERED, HangsForGood, OpensForAsLongAsItTakes
from control_networked import ACROSS, WaitsForEver

if TYPE_CHECKING:
    from hicache_storage.spec import Capabilities

SERVER = (sys.executable, "-P", str(Path(__file__).with_name("control_server.py")), "{port:pages}", "{tmp}/pages.log")


def _files(
    name: str, *breaks: str, told: str = "", where: tuple[str, ...] = (), fault: str = "", capabilities: Capabilities = BUFFERED
) -> tuple[str, Control]:
    return name, Control(
        breaks=breaks,
        told=told,
        where=where,
        field_fault=fault,
        target=f"control_faults:{name}",
        config="control_files:SharedFilesConfig",
        trial_config=PATH,
        capabilities=capabilities,
    )


def _networked(
    name: str, *breaks: str, told: str = "", where: tuple[str, ...] = (), fault: str = "", capabilities: Capabilities = ACROSS
) -> tuple[str, Control]:
    return name, Control(
        breaks=breaks,
        told=told,
        where=where,
        field_fault=fault,
        target=f"control_networked:{name}",
        config="control_networked:NetworkedConfig",
        trial_config={"port": "{port:pages}"},
        trial_services=(SERVER,),
        capabilities=capabilities,
    )


CONTROLS = dict(
    [
        _files("SteadyFiles"),
        _networked("Networked"),
        _files("RaisesWhatTheDiskRaises", "FT-1", told="batch_get_v2 raised OSError", where=("Fault",)),
        _files("HangsForGood", "FT-3", told="has not ended", where=("Deadline",), capabilities=HangsForGood.promises),
        _files("CountsNoFaults", "FT-1", told="get_stats() counts no fault", where=("Fault",)),
        _files("LogsEachPage", "FT-1", told="was logged in", where=("Fault",)),
        _files("PoisonedByTornFiles", "SET-3", "EX-9", told="it goes on existing", where=("Rot",), fault="D10"),
        _files("PublishesLate", "SET-8", told="what its writer put into the host page", where=("Deadline",)),
        _files("ReadsLate", "GET-9", told="was written after the get", where=("Deadline",)),
        _files("ShortReadsAreHits", "GET-1", told="holds zeros", where=("Fault",), fault="D12"),
        _files("ShortWritesAreDone", "SET-1", told="was stored (True), and a get answers False", where=("Fault",)),
        _files("LeavesDrafts", "FT-6", told="files behind", where=("Fault",), fault="D11"),
        _files("GivesUpForGood", "FT-4", told="after the fault was gone", where=("Fault",)),
        _files("KeepsDeadDescriptors", "SET-1", told="was stored (True), and a get answers False", where=("Fault",)),
        _files("OnePageFailsAll", "SET-6", told="one page of 12 could not be written", where=("Fault",)),
        _files(
            "OpensForAsLongAsItTakes",
            "FT-3",
            told="open has not",
            where=("Fault",),
            capabilities=OpensForAsLongAsItTakes.promises,
        ),
        _files("LeavesAThreadBehind", "LC-2", told="thread 'watches-a-read'", where=("Deadline",)),
        _files("TrustsTheDisk", "GET-1", told="bytes differ", where=("Rot", "Fault")),
        _files("LosesTheQueue", "SET-1", told="was stored (True), and a get answers False", where=("Fault",)),
        _networked("NeverReconnects", "FT-4", told="after the fault was gone", where=("Fault",), fault="D16"),
        _networked(
            "WaitsForEver", "FT-3", told="has not ended", where=("Deadline",), fault="D16", capabilities=WaitsForEver.promises
        ),
        _networked("AsksAgainAndAgain", "FT-3", told="has not come back", where=("Fault",), capabilities=WaitsForEver.promises),
        _networked("TakesAnythingForAnAnswer", "FT-1", told="counts no fault", where=("Fault",)),
    ]
)
