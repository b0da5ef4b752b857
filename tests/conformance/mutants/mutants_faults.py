"""Samples of what goes wrong below a driver: disks, networks and servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivers_faults import (
    BUFFERED,
    HangsForGood,
    OpensForAsLongAsItTakes,
    StartsItsCollectorLast,
)
from drivers_networked import ACROSS, WaitsForEver
from sample_driver import PATH, SampleDriver

if TYPE_CHECKING:
    from hicache_storage.spec import Capabilities

SERVER = (
    sys.executable,
    "-P",
    str(Path(__file__).with_name("drivers_server.py")),
    "{port:pages}",
    "{tmp}/pages.log",
)


_BELOW = ("Fault", "Deadline", "Plan", "BitRot")
_UNCLEAR = ("Applied", "FailedClear", "Stall")
_TAKING_NOTHING: dict[str, Any] = {
    "case_classes": ("Fault",),
    "cases": ("test_a_store_that_takes_nothing",),
    "injectors": ("disk",),
}


def _files(
    name: str, *breaks: str, capabilities: Capabilities = BUFFERED, **fields: Any
) -> tuple[str, SampleDriver]:
    return name, SampleDriver(
        breaks=breaks,
        target=f"drivers_faults:{name}",
        config="drivers_files:SharedFilesConfig",
        trial_config=PATH,
        capabilities=capabilities,
        **fields,
    )


def _networked(
    name: str, *breaks: str, capabilities: Capabilities = ACROSS, **fields: Any
) -> tuple[str, SampleDriver]:
    return name, SampleDriver(
        breaks=breaks,
        target=f"drivers_networked:{name}",
        config="drivers_networked:NetworkedConfig",
        trial_config={"port": "{port:pages}"},
        trial_services=(SERVER,),
        capabilities=capabilities,
        **fields,
    )


SAMPLES = dict(
    [
        _files(
            "SteadyFiles",
            case_classes=(*_BELOW, *_UNCLEAR, "Directory", "Process"),
            injectors=("disk",),
        ),
        _networked(
            "Networked",
            case_classes=(*_BELOW, *_UNCLEAR, "Sharing", "Budget"),
            injectors=("network", "services"),
        ),
        _files(
            "RaisesWhatTheDiskRaises",
            "FT-1",
            expect_message="batch_get_v2 raised OSError",
            case_classes=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
        ),
        _files(
            "HangsForGood",
            "FT-3",
            expect_message="has not ended",
            case_classes=("Deadline",),
            cases=("test_a_hung_store",),
            capabilities=HangsForGood.promises,
        ),
        _files(
            "CountsNoFaults",
            "FT-1",
            expect_message="get_stats() counts no fault",
            case_classes=("Fault",),
            cases=("test_an_outage_is_told_once",),
        ),
        _files(
            "RestsWhenFull",
            "FT-7",
            expect_message="0 of 12 stored pages are found after 3 sets were refused",
            **_TAKING_NOTHING,
        ),
        _files(
            "TriesItsDirectory",
            "FT-7",
            expect_message="open raised StorageUnavailableError",
            **_TAKING_NOTHING,
        ),
        _files(
            "HidesThatItIsFull",
            "FT-7",
            expect_message="sets were refused (disk: ENOSPC at create or write or name), and Health",
            **_TAKING_NOTHING,
        ),
        _files(
            "StartsItsCollectorLast",
            "FT-6",
            expect_message="store/log)",
            case_classes=("Fault",),
            cases=("test_the_process_is_at_its_limit[threads]",),
            capabilities=StartsItsCollectorLast.promises,
        ),
        _files(
            "NotesPagesTooSoon",
            "SET-1",
            expect_message="below the driver: a KeyboardInterrupt after step",
            case_classes=("Applied",),
            cases=("test_sets_are_interrupted",),
        ),
        _files(
            "LogsEachPage",
            "FT-1",
            expect_message="was logged in",
            case_classes=("Fault",),
            cases=("test_an_outage_is_told_once",),
        ),
        _files(
            "PoisonedByTornFiles",
            "EX-9",
            expect_message="it goes on existing",
            case_classes=("BitRot",),
            known_bug="D10",
        ),
        _files(
            "PublishesLate",
            "SET-8",
            expect_message="what its writer put into the host page",
            case_classes=("Deadline",),
            cases=("test_nothing_is_published_late",),
        ),
        _files(
            "ReadsLate",
            "GET-9",
            expect_message="was written after the get",
            case_classes=("Deadline",),
            cases=("test_nothing_arrives_late",),
        ),
        _files(
            "ShortReadsAreHits",
            "GET-1",
            expect_message="holds zeros",
            case_classes=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
            known_bug="D12",
        ),
        _files(
            "ShortWritesAreDone",
            "SET-1",
            expect_message="was stored (True), and a get answers False",
            case_classes=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
        ),
        _files(
            "LeavesDrafts",
            "FT-6",
            expect_message="files behind",
            case_classes=("Fault",),
            cases=("test_failing_sets_leave_nothing",),
            known_bug="D11",
        ),
        _files(
            "GivesUpForGood",
            "FT-4",
            expect_message="after the fault was gone",
            case_classes=("Fault",),
            cases=("test_the_process_is_at_its_limit",),
        ),
        _files(
            "KeepsDeadDescriptors",
            "SET-3",
            expect_message="was stored (True), and a get answers False",
            case_classes=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
        ),
        _files(
            "OnePageFailsAll",
            "SET-6",
            expect_message="one page of 12 could not be written",
            case_classes=("Fault",),
            cases=("test_one_page_fails",),
        ),
        _files(
            "OpensForAsLongAsItTakes",
            "FT-3",
            expect_message="open has not come back",
            case_classes=("Fault",),
            cases=("test_a_store_that_is_away",),
            capabilities=OpensForAsLongAsItTakes.promises,
        ),
        _files(
            "LeavesAThreadBehind",
            "LC-2",
            expect_message="thread 'watches-a-read'",
            case_classes=("Deadline",),
            cases=("test_closing_a_hung_store",),
        ),
        _files(
            "TrustsTheDisk",
            "GET-1",
            expect_message="bytes differ",
            case_classes=("BitRot",),
            cases=("test_stored_bytes_rot",),
        ),
        _files(
            "LosesTheQueue",
            "SET-1",
            expect_message="was stored (True), and a get answers False",
            case_classes=("Fault",),
            cases=("test_a_trouble_is_a_miss",),
        ),
        _networked(
            "NeverReconnects",
            "FT-4",
            expect_message="after the fault was gone",
            case_classes=("Fault",),
            cases=("test_the_same_storage_recovers",),
            known_bug="D16",
        ),
        _networked(
            "WaitsForEver",
            "FT-3",
            expect_message="has not ended",
            case_classes=("Deadline",),
            cases=("test_a_hung_store",),
            known_bug="D16",
            capabilities=WaitsForEver.promises,
        ),
        _networked(
            "LeavesItToTheDeadline",
            "FT-4",
            expect_message="its connection has no timeout",
            case_classes=("Deadline",),
            cases=("test_half_open_connections",),
            injectors=("network",),
        ),
        _networked(
            "AsksAgainAndAgain",
            "FT-3",
            expect_message="has not come back",
            case_classes=("Fault",),
            cases=("test_an_outage_is_told_once",),
            capabilities=WaitsForEver.promises,
        ),
        _networked(
            "TakesAnythingForAnAnswer",
            "FT-1",
            expect_message="get_stats() counts no fault",
            case_classes=("Fault",),
            cases=("test_an_outage_is_told_once",),
        ),
    ]
)
