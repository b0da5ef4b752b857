"""Samples of a limited capacity: what is evicted, and what happens when nothing fits any more."""

from __future__ import annotations

from functools import partial
from typing import Any

from drivers_eviction import BoundedFiles
from drivers_slots import Slots
from sample_driver import IN_PROCESS, PATH, SampleDriver

_FILES = partial(
    SampleDriver,
    config="drivers_eviction:BoundedFilesConfig",
    trial_config=PATH,
    capabilities=BoundedFiles.promises,
    capacity_option="capacity",
    case_classes=("Eviction", "Space"),
)
_SLOTS = partial(
    SampleDriver,
    config="drivers_slots:SlotsConfig",
    trial_config=PATH,
    capabilities=Slots.promises,
    capacity_option="capacity",
    case_classes=("Eviction", "Space"),
)
_BOUNDED = partial(
    SampleDriver,
    config="drivers_slots:SlotsConfig",
    trial_config=PATH,
    capabilities=IN_PROCESS,
    capacity_option="capacity",
    case_classes=("Space",),
)


def _files(name: str, *breaks: str, case_classes: str = "Eviction", **fields: Any) -> SampleDriver:
    target = f"drivers_eviction:{name}"
    return _FILES(target=target, breaks=breaks, case_classes=(case_classes,), **fields)


def _slots(name: str, *breaks: str, case_classes: str = "Eviction", **fields: Any) -> SampleDriver:
    target = f"drivers_slots:{name}"
    return _SLOTS(target=target, breaks=breaks, case_classes=(case_classes,), **fields)


def _bounded(name: str, *breaks: str, expect_message: str = "") -> SampleDriver:
    return _BOUNDED(target=f"drivers_slots:{name}", breaks=breaks, expect_message=expect_message)


SAMPLES = {
    "BoundedFiles": _FILES(
        target="drivers_eviction:BoundedFiles",
        case_classes=("EvictionProcess", "Eviction", "Space", "Durability"),
    ),
    "Slots": _SLOTS(target="drivers_slots:Slots"),
    "Bounded": _BOUNDED(target="drivers_slots:Bounded"),
    "IgnoresItsCapacity": _files("IgnoresItsCapacity", "EV-1", expect_message="the capacity is"),
    "CountsItsOwnWritesOnly": _files(
        "CountsItsOwnWritesOnly", "EV-1", expect_message="the capacity is"
    ),
    "EvictsTheIndexOnly": _files(
        "EvictsTheIndexOnly", "EV-1", expect_message="lie on the disk after more writing"
    ),
    "LeavesDraftsUncounted": _files(
        "LeavesDraftsUncounted",
        "EV-1",
        expect_message="bytes before, and takes",
        known_bug="D11",
        case_classes="EvictionProcess",
    ),
    "CountsDraftsForGood": _files(
        "CountsDraftsForGood",
        "EV-1",
        expect_message="pages before, and holds",
        case_classes="EvictionProcess",
    ),
    "ToldOfEvictions": _files(
        "ToldOfEvictions",
        "FT-5",
        expect_message="was killed after step",
        case_classes="Durability",
        cases=("test_an_evictor_is_killed_at_a_step",),
    ),
    "EvictsByName": _files(
        "EvictsByName",
        "EV-1",
        expect_message="was taken for a page of 'b' by its name",
        known_bug="D11",
    ),
    "CountsNoEvictions": _files("CountsNoEvictions", "OB-1", expect_message="pages_evicted is 0"),
    "HeadsFirst": _files("HeadsFirst", "EV-3", expect_message="can be used", known_bug="D20"),
    "ForgetsPrefixes": _files("ForgetsPrefixes", "EV-3", expect_message="written in several-calls"),
    "EvictsAnyPage": _files("EvictsAnyPage", "EV-3", "EV-4", expect_message="can be used"),
    "RefreshesOnWrites": _files(
        "RefreshesOnWrites", "EV-4", expect_message="was used after every batch"
    ),
    "LookupsAreNoUse": _files(
        "LookupsAreNoUse", "EV-4", expect_message="was used after every batch (exists)"
    ),
    "ReadsAreNoUse": _files(
        "ReadsAreNoUse", "EV-4", expect_message="was used after every batch (get)"
    ),
    "EvictsEverything": _files(
        "EvictsEverything", "EV-4", expect_message="was used after every batch"
    ),
    "ReusesSlots": _slots(
        "ReusesSlots", "EV-2", expect_message="holds bytes of key", known_bug="D2"
    ),
    "RemembersSlots": _slots("RemembersSlots", "EV-2", expect_message="holds bytes of key"),
    "BricksWhenFull": _slots(
        "BricksWhenFull",
        "SET-5",
        expect_message="and none was stored",
        known_bug="D4",
        case_classes="Space",
    ),
    "LeaksReservations": _slots(
        "LeaksReservations",
        "SET-5",
        expect_message="takes no page",
        known_bug="D5",
        case_classes="Space",
    ),
    "DeletesForGood": _slots(
        "DeletesForGood", "SET-5", expect_message="everything was deleted", case_classes="Space"
    ),
    "RaisesWhenFull": _bounded("RaisesWhenFull", "SET-5", expect_message="raised OSError"),
    "TakesAllOrNothing": _bounded(
        "TakesAllOrNothing", "SET-5", expect_message="and none was stored"
    ),
    "DropsWhatDoesNotFit": _bounded(
        "DropsWhatDoesNotFit", "SET-5", expect_message="and a get misses it"
    ),
    "NeverFrees": _bounded("NeverFrees", "SET-5", expect_message="everything was"),
}
