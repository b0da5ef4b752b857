"""Samples of unclear answers.

Requests that failed after they took effect, late writers, deadlines that are none.
"""

from __future__ import annotations

from typing import Any

from drivers_eviction import BoundedFiles
from drivers_faults import BUFFERED
from drivers_unclear import FileSlots
from sample_driver import PATH, SampleDriver

_DIRECTORY: dict[str, Any] = {
    "config": "drivers_files:SharedFilesConfig",
    "trial_config": PATH,
    "capabilities": BUFFERED,
    "injectors": ("disk",),
}
_SLOTS: dict[str, Any] = {
    "config": "drivers_slots:SlotsConfig",
    "trial_config": PATH,
    "capabilities": FileSlots.promises,
    "capacity_option": "capacity",
    "injectors": ("disk",),
    "case_classes": ("Stall",),
}


def _files(name: str, rule: str, expect_message: str, case_classes: str, case: str) -> SampleDriver:
    return SampleDriver(
        breaks=(rule,),
        expect_message=expect_message,
        case_classes=(case_classes,),
        cases=(case,),
        target=f"drivers_unclear:{name}",
        **_DIRECTORY,
    )


def _slots(name: str, expect_message: str, case: str) -> SampleDriver:
    return SampleDriver(
        breaks=("SET-1",),
        expect_message=expect_message,
        cases=(case,),
        target=f"drivers_unclear:{name}",
        **_SLOTS,
    )


SAMPLES = {
    "FileSlots": SampleDriver(target="drivers_unclear:FileSlots", **_SLOTS),
    "ReusesNumbers": _files(
        "ReusesNumbers",
        "SET-1",
        "after it took effect",
        "Applied",
        "test_requests_that_took_effect_and_failed",
    ),
    "SwallowsFailedClears": _files(
        "SwallowsFailedClears",
        "LC-7",
        "by a clear() that returned",
        "FailedClear",
        "test_a_clear_that_is_refused",
    ),
    "RaisesWhatStopsAClear": _files(
        "RaisesWhatStopsAClear",
        "LC-7",
        "which is no StorageUnavailableError",
        "FailedClear",
        "test_a_clear_that_is_refused",
    ),
    "OneFaultForAll": _files(
        "OneFaultForAll",
        "FT-4",
        "exists finds 0 of 4 pages",
        "Fault",
        "test_one_fault_beside_calls_that_succeed",
    ),
    "WaitsAsItIsTold": _files(
        "WaitsAsItIsTold",
        "FT-1",
        "batch_exists_v2 with deadline_seconds",
        "Deadline",
        "test_unusual_deadlines_of_a_working_store",
    ),
    "KeepsItsLockOverForks": _files(
        "KeepsItsLockOverForks",
        "LC-5",
        "hung for",
        "Lifecycle",
        "test_children_forked_during_calls",
    ),
    "ComparesAbsence": _files(
        "ComparesAbsence",
        "FT-4",
        "there is no file in its directory",
        "Directory",
        "test_a_store_that_is_deleted_and_made_again",
    ),
    "BelievesFileNames": _files(
        "BelievesFileNames",
        "SET-1",
        "and a get answers False",
        "Directory",
        "test_strangers_with_names_like_the_store_s_own",
    ),
    "ClearsUnderWriters": _slots(
        "ClearsUnderWriters", "was stored (True) while", "test_a_clear_in_the_middle_of_a_set"
    ),
    "LeasesRunOut": _slots(
        "LeasesRunOut", "was stored (True) while", "test_a_writer_that_is_held_up"
    ),
    "BelievesItsClock": SampleDriver(
        breaks=("EV-4",),
        expect_message="a year",
        case_classes=("EvictionProcess",),
        cases=("test_clocks_a_year_apart",),
        target="drivers_eviction:BelievesItsClock",
        config="drivers_eviction:BoundedFilesConfig",
        trial_config=PATH,
        capabilities=BoundedFiles.promises,
        capacity_option="capacity",
    ),
}
