"""Controls of a limited capacity: what is evicted, and what happens when nothing fits any more."""

from __future__ import annotations

from functools import partial

from control import IN_PROCESS, PATH, Control
from control_eviction import BoundedFiles
from control_slots import Slots

_FILES = partial(
    Control,
    config="control_eviction:BoundedFilesConfig",
    trial_config=PATH,
    capabilities=BoundedFiles.promises,
    capacity_option="capacity",
    where=("Eviction", "Space"),
)
_SLOTS = partial(
    Control,
    config="control_slots:SlotsConfig",
    trial_config=PATH,
    capabilities=Slots.promises,
    capacity_option="capacity",
    where=("Eviction", "Space"),
)
_BOUNDED = partial(
    Control,
    config="control_slots:SlotsConfig",
    trial_config=PATH,
    capabilities=IN_PROCESS,
    capacity_option="capacity",
    where=("Space",),
)


def _files(name: str, *breaks: str, told: str = "", field_fault: str = "", where: str = "Eviction") -> Control:
    return _FILES(target=f"control_eviction:{name}", breaks=breaks, told=told, field_fault=field_fault, where=(where,))


def _slots(name: str, *breaks: str, told: str = "", field_fault: str = "", where: str = "Eviction") -> Control:
    return _SLOTS(target=f"control_slots:{name}", breaks=breaks, told=told, field_fault=field_fault, where=(where,))


def _bounded(name: str, *breaks: str, told: str = "") -> Control:
    return _BOUNDED(target=f"control_slots:{name}", breaks=breaks, told=told)


CONTROLS = {
    "BoundedFiles": _FILES(target="control_eviction:BoundedFiles", where=("Crowd", "Eviction", "Space")),
    "Slots": _SLOTS(target="control_slots:Slots"),
    "Bounded": _BOUNDED(target="control_slots:Bounded"),
    "IgnoresItsCapacity": _files("IgnoresItsCapacity", "EV-1", told="the capacity is"),
    "CountsItsOwnWritesOnly": _files("CountsItsOwnWritesOnly", "EV-1", told="the capacity is"),
    "EvictsTheIndexOnly": _files("EvictsTheIndexOnly", "EV-1", told="lie on the disk after more writing"),
    "LeavesDraftsUncounted": _files(
        "LeavesDraftsUncounted", "EV-1", told="bytes before, and takes", field_fault="D11", where="Crowd"
    ),
    "CountsDraftsForGood": _files("CountsDraftsForGood", "EV-1", told="pages before, and holds", where="Crowd"),
    "EvictsByName": _files("EvictsByName", "EV-1", told="was taken for a page of 'b' by its name", field_fault="D11"),
    "CountsNoEvictions": _files("CountsNoEvictions", "OB-1", told="pages_evicted is 0"),
    "HeadsFirst": _files("HeadsFirst", "EV-3", told="can be used", field_fault="D20"),
    "ForgetsPrefixes": _files("ForgetsPrefixes", "EV-3", told="written in several-calls"),
    "EvictsAnyPage": _files("EvictsAnyPage", "EV-3", "EV-4", told="can be used"),
    "RefreshesOnWrites": _files("RefreshesOnWrites", "EV-4", told="was used after every batch"),
    "LookupsAreNoUse": _files("LookupsAreNoUse", "EV-4", told="was used after every batch (exists)"),
    "ReadsAreNoUse": _files("ReadsAreNoUse", "EV-4", told="was used after every batch (get)"),
    "EvictsEverything": _files("EvictsEverything", "EV-4", told="was used after every batch"),
    "ReusesSlots": _slots("ReusesSlots", "EV-2", told="holds bytes of key", field_fault="D2"),
    "RemembersSlots": _slots("RemembersSlots", "EV-2", told="holds bytes of key"),
    "BricksWhenFull": _slots("BricksWhenFull", "SET-5", told="and none was stored", field_fault="D4", where="Space"),
    "LeaksReservations": _slots("LeaksReservations", "SET-5", told="takes no page", field_fault="D5", where="Space"),
    "DeletesForGood": _slots("DeletesForGood", "SET-5", told="everything was deleted", where="Space"),
    "RaisesWhenFull": _bounded("RaisesWhenFull", "SET-5", told="raised OSError"),
    "TakesAllOrNothing": _bounded("TakesAllOrNothing", "SET-5", told="and none was stored"),
    "DropsWhatDoesNotFit": _bounded("DropsWhatDoesNotFit", "SET-5", told="and a get misses it"),
    "NeverFrees": _bounded("NeverFrees", "SET-5", told="everything was"),
}
