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


_BELOW = ("Fault", "Deadline", "Plan", "Rot")
_UNCLEAR = ("Applied", "FailedClear", "Stall")


def _files(
    name: str,
    *breaks: str,
    told: str = "",
    where: tuple[str, ...] = (),
    cases: tuple[str, ...] = (),
    grounds: tuple[str, ...] = (),
    fault: str = "",
    capabilities: Capabilities = BUFFERED,
) -> tuple[str, Control]:
    return name, Control(
        breaks=breaks,
        told=told,
        where=where,
        cases=cases,
        grounds=grounds,
        field_fault=fault,
        target=f"control_faults:{name}",
        config="control_files:SharedFilesConfig",
        trial_config=PATH,
        capabilities=capabilities,
    )


def _networked(
    name: str,
    *breaks: str,
    told: str = "",
    where: tuple[str, ...] = (),
    cases: tuple[str, ...] = (),
    grounds: tuple[str, ...] = (),
    fault: str = "",
    capabilities: Capabilities = ACROSS,
) -> tuple[str, Control]:
    return name, Control(
        breaks=breaks,
        told=told,
        where=where,
        cases=cases,
        grounds=grounds,
        field_fault=fault,
        target=f"control_networked:{name}",
        config="control_networked:NetworkedConfig",
        trial_config={"port": "{port:pages}"},
        trial_services=(SERVER,),
        capabilities=capabilities,
    )


CONTROLS = dict(
    [
        _files("SteadyFiles", where=(*_BELOW, *_UNCLEAR, "Directory", "Process"), grounds=("disk",)),
        _networked("Networked", where=(*_BELOW, *_UNCLEAR, "Sharing", "Budget"), grounds=("network", "services")),
        _files(
            "RaisesWhatTheDiskRaises",
            "FT-1",
            told="batch_get_v2 raised OSError",
            where=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
        ),
        _files(
            "HangsForGood",
            "FT-3",
            told="has not ended",
            where=("Deadline",),
            cases=("test_a_hung_store",),
            capabilities=HangsForGood.promises,
        ),
        _files(
            "CountsNoFaults", "FT-1", told="get_stats() counts no fault", where=("Fault",), cases=("test_an_outage_is_told_once",)
        ),
        _files("LogsEachPage", "FT-1", told="was logged in", where=("Fault",), cases=("test_an_outage_is_told_once",)),
        _files("PoisonedByTornFiles", "EX-9", told="it goes on existing", where=("Rot",), fault="D10"),
        _files(
            "PublishesLate",
            "SET-8",
            told="what its writer put into the host page",
            where=("Deadline",),
            cases=("test_nothing_is_published_late",),
        ),
        _files("ReadsLate", "GET-9", told="was written after the get", where=("Deadline",), cases=("test_nothing_arrives_late",)),
        _files(
            "ShortReadsAreHits", "GET-1", told="holds zeros", where=("Fault",), cases=("test_a_trouble_is_a_miss",), fault="D12"
        ),
        _files(
            "ShortWritesAreDone",
            "SET-1",
            told="was stored (True), and a get answers False",
            where=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
        ),
        _files(
            "LeavesDrafts", "FT-6", told="files behind", where=("Fault",), cases=("test_failing_sets_leave_nothing",), fault="D11"
        ),
        _files(
            "GivesUpForGood", "FT-4", told="after the fault was gone", where=("Fault",), cases=("test_no_descriptor_is_left",)
        ),
        _files(
            "KeepsDeadDescriptors",
            "SET-3",
            told="was stored (True), and a get answers False",
            where=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
        ),
        _files(
            "OnePageFailsAll",
            "SET-6",
            told="one page of 12 could not be written",
            where=("Fault",),
            cases=("test_one_page_fails",),
        ),
        _files(
            "OpensForAsLongAsItTakes",
            "FT-3",
            told="open has not come back",
            where=("Fault",),
            cases=("test_a_store_that_is_away",),
            capabilities=OpensForAsLongAsItTakes.promises,
        ),
        _files(
            "LeavesAThreadBehind",
            "LC-2",
            told="thread 'watches-a-read'",
            where=("Deadline",),
            cases=("test_closing_a_hung_store",),
        ),
        _files("TrustsTheDisk", "GET-1", told="bytes differ", where=("Rot",), cases=("test_stored_bytes_rot",)),
        _files(
            "LosesTheQueue",
            "SET-1",
            told="was stored (True), and a get answers False",
            where=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
        ),
        _networked(
            "NeverReconnects",
            "FT-4",
            told="after the fault was gone",
            where=("Fault",),
            cases=("test_the_same_storage_recovers",),
            fault="D16",
        ),
        _networked(
            "WaitsForEver",
            "FT-3",
            told="has not ended",
            where=("Deadline",),
            cases=("test_a_hung_store",),
            fault="D16",
            capabilities=WaitsForEver.promises,
        ),
        _networked(
            "AsksAgainAndAgain",
            "FT-3",
            told="has not come back",
            where=("Fault",),
            cases=("test_an_outage_is_told_once",),
            capabilities=WaitsForEver.promises,
        ),
        _networked(
            "TakesAnythingForAnAnswer",
            "FT-1",
            told="nothing was logged",
            where=("Fault",),
            cases=("test_an_outage_is_told_once",),
        ),
    ]
)
