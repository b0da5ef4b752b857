"""Samples of several processes: sharing, and the death of a writer."""

from __future__ import annotations

from typing import Any

from drivers_files import BETWEEN_PROCESSES
from drivers_sharing import ONE_PROCESS
from sample_driver import PATH, SampleDriver

SHARED: dict[str, Any] = {
    "config": "drivers_files:SharedFilesConfig",
    "trial_config": PATH,
    "capabilities": BETWEEN_PROCESSES,
}


def _mutant(
    name: str, rule: str, case_classes: str, expect_message: str, **more: Any
) -> SampleDriver:
    target = f"drivers_sharing:{name}"
    return SampleDriver(
        breaks=(rule,),
        case_classes=(case_classes,),
        expect_message=expect_message,
        target=target,
        **{**SHARED, **more},
    )


SAMPLES = {
    # Whether a reader meets half of the page, or nothing where a page was, is up to the moment.
    "WritesInPlace": _mutant("WritesInPlace", "SET-2", "Process", "SET-2: "),
    "RenamesTooSoon": _mutant("RenamesTooSoon", "SET-2", "Process", "holds zeros in bytes"),
    "OneDraftForAll": _mutant("OneDraftForAll", "SET-4", "Process", "SET-4: "),
    "MixesWriters": _mutant("MixesWriters", "SET-4", "Process", "is value"),
    "LosersLeaveDrafts": _mutant(
        "LosersLeaveDrafts", "SET-4", "Process", "made the store grow by", known_bug="D5"
    ),
    "LearnsNothingOfOthers": _mutant(
        "LearnsNothingOfOthers", "ID-2", "Sharing", "a get of process early answers False"
    ),
    "TrustsItsList": _mutant(
        "TrustsItsList",
        "SET-1",
        "Sharing",
        "is said to exist, and it had been removed",
        known_bug="D11",
    ),
    "ToldOfRemovals": _mutant(
        "ToldOfRemovals",
        "FT-5",
        "Durability",
        "was killed after step",
        cases=("test_a_delete_is_killed_at_a_step", "test_a_clear_is_killed_at_a_step"),
        every_case=True,
    ),
    "SetsOnItsOwn": _mutant(
        "SetsOnItsOwn", "SET-3", "Sharing", "whose set began when the page was there already"
    ),
    "ClearsItsOwnView": _mutant(
        "ClearsItsOwnView", "LC-4", "Sharing", "which had been removed before the get began"
    ),
    "SaltsItsKeys": _mutant("SaltsItsKeys", "ID-2", "Sharing", "answers False"),
    "NeverForgetsDamage": _mutant(
        "NeverForgetsDamage", "SET-3", "Sharing", "a get of process one answers False"
    ),
    "DiscardsByName": _mutant("DiscardsByName", "SET-1", "CorruptObject", "a get answers False"),
    "DiscardsBlindly": _mutant("DiscardsBlindly", "SET-1", "CorruptObject", "a get answers False"),
    # Whether a reader meets another's bytes or a page half written is up to the moment.
    "LooksUpAndReads": _mutant("LooksUpAndReads", "CC-2", "Process", "CC-2: ", known_bug="D2"),
    "KeepsItsIndexOpen": _mutant(
        "KeepsItsIndexOpen",
        "GET-1",
        "Directory",
        "holds bytes of key",
        cases=("test_a_store_that_is_deleted_and_opened_anew",),
    ),
    "SavesItsIndexLate": _mutant(
        "SavesItsIndexLate",
        "FT-5",
        "Durability",
        "was stored (True) and removed by nobody",
        known_bug="D3",
        capabilities=ONE_PROCESS,
    ),
    "WritesBehind": _mutant(
        "WritesBehind",
        "FT-5",
        "Durability",
        "was stored (True) and removed by nobody",
        capabilities=ONE_PROCESS,
    ),
    "CollectsNoDrafts": _mutant(
        "CollectsNoDrafts",
        "FT-5",
        "Durability",
        "killed writers made the store grow by",
        cases=("test_killed_writers_leave_no_litter",),
    ),
    "LeavesItsLock": _mutant("LeavesItsLock", "FT-5", "Durability", "was refused to process"),
}
