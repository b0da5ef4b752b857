"""Fault plans: seeded, written down, counted, shrunk.

And every kind of fault is felt by who stands on its injector.

What the injectors `disk`, `network` and `services` do to a plain program is in
`test_disk_injector`, `test_network_injector` and `test_server_injector`.
"""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings

from hicache_conformance.cases.random_calls import fault_plans
from hicache_conformance.injectors.driver_methods import DriverMethodInjector
from hicache_conformance.injectors.injector import ActiveFaults
from hicache_conformance.model.fault_plan import MENU, UNTIMED, Fault, FaultKind, FaultPlan

KEYS = ["a", "b", "c", "d"]
PLACES = [0, 1, 2, 3]


# Plans as data
# ------------------------------------------------------------------------------------------------------


def test_every_kind_is_on_a_menu():
    # What outlasts its plan has a case of its own.
    apart = {FaultKind.HALF_OPEN}
    assert {fault.kind for menu in MENU.values() for fault in menu} | apart == set(FaultKind)


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("injector", MENU)
def test_a_plan_has_up_to_four_faults_of_the_menu_and_states_once(injector, hangs):
    menu = {fault.kind for fault in MENU[injector]}

    @settings(max_examples=50, database=None, deadline=None)
    @given(fault_plans(injector, hangs=hangs))
    def draw(plan):
        kinds = [fault.kind for fault in plan.faults]
        assert 1 <= len(kinds) <= 4
        assert set(kinds) <= menu
        assert hangs or not plan.hangs
        # What is done at once is done once.
        once = [kind for kind in kinds if kind in UNTIMED]
        assert len(once) == len(set(once))

    draw()


def test_a_strike_counts_the_operations_of_each_fault():
    first, second = (
        Fault(kind=FaultKind.CUT, operations=("read",), first=1, count=2),
        Fault(kind=FaultKind.HANG, first=3),
    )
    active = ActiveFaults((first, second))
    assert [active.at(sort) for sort in ("read", "write", "read", "read", "read", "write")] == [
        [],
        [],
        [first],
        [first, second],
        [second],
        [second],
    ]
    assert active.injected_count == 4
    active.heal()
    assert active.at("read") == []


# Each kind around an object store
# -----------------------------------------------------------------------------------


@pytest.fixture
def stage(kit):
    """An injector, and a memory storage on it that has three of KEYS, and its pool."""
    injector, (storage, pool) = DriverMethodInjector(), kit.memory_storage()
    injector.attach(storage)
    storage.open()
    for place in PLACES:
        pool.fill(place, place)
    assert storage.batch_set_v2([pool.transfer("kv", KEYS[:3], PLACES[:3])]) == {"kv": [True] * 3}
    storage.operations.clear()
    return injector, storage, pool


def inject(injector, kind, *operations, **fields):
    injector.inject(FaultPlan("objects", (Fault(kind=kind, operations=operations, **fields),)))


def read(storage, pool, keys=KEYS):
    return storage.batch_get_v2([pool.transfer("kv", keys, PLACES[: len(keys)])])["kv"]


def write(storage, pool, keys):
    return storage.batch_set_v2([pool.transfer("kv", keys, PLACES[: len(keys)])])["kv"]


def damaged(storage):
    return storage.get_stats().pools["kv"].pages_damaged


def test_a_failing_call_is_a_counted_miss(stage):
    injector, storage, pool = stage
    inject(injector, FaultKind.ERROR, error="EIO")
    assert read(storage, pool) == [False] * 4
    assert write(storage, pool, ["new"]) == [False]
    assert storage.batch_exists_v2(KEYS).kv_hit_pages == 0
    # A set asks before it writes.
    assert storage.fault_count() == 4
    injector.heal()
    assert read(storage, pool, KEYS[:3]) == [True] * 3


def test_a_write_takes_effect_and_fails(stage):
    injector, storage, pool = stage
    inject(injector, FaultKind.APPLIED, "write")
    assert write(storage, pool, ["new"]) == [False]
    assert storage.fault_count() == 1
    injector.heal()
    assert read(storage, pool, ["new"]) == [True]


def test_deletes_are_struck_too(stage):
    injector, storage, pool = stage
    inject(injector, FaultKind.ERROR, "remove", error="EIO")
    assert storage.delete(KEYS[:1]) == [False]
    inject(injector, FaultKind.APPLIED, "remove")
    assert storage.delete(KEYS[1:2]) == [False]
    injector.heal()
    assert read(storage, pool, KEYS[:3]) == [True, False, True]


def test_a_delay_takes_time(stage):
    injector, storage, pool = stage
    inject(injector, FaultKind.DELAY, "read", seconds=0.05, count=1)
    began = time.monotonic()
    assert read(storage, pool, KEYS[:3]) == [True] * 3
    assert time.monotonic() - began >= 0.05


@pytest.mark.parametrize("place", [0.1, 0.4, 0.9])
def test_one_page_of_a_batch_is_left_out(stage, place):
    injector, storage, pool = stage
    inject(injector, FaultKind.PARTIAL, place=place)
    found = read(storage, pool, KEYS[:3])
    assert found.count(False) == 1
    assert found.index(False) == int(place * 3)
    written = write(storage, pool, ["e", "f", "g"])
    assert written == found
    injector.heal()
    assert read(storage, pool, ["e", "f", "g"]) == written


@pytest.mark.parametrize("sort", ["read", "write"])
def test_an_operation_is_done_twice(stage, sort):
    injector, storage, pool = stage
    inject(injector, FaultKind.DUPLICATE, sort)
    if sort == "read":
        assert read(storage, pool) == [True, True, True, False]
    else:
        assert write(storage, pool, ["e"]) == [True]
    assert storage.operations.count(sort) == 2


@pytest.mark.parametrize("kind", [FaultKind.BIT_FLIP, FaultKind.TORN_WRITE])
def test_wrong_bytes_are_stored(stage, kind):
    injector, storage, pool = stage
    inject(injector, kind, "write")
    assert write(storage, pool, ["new"]) == [True]
    injector.heal()
    assert read(storage, pool, ["new"]) == [False]
    assert damaged(storage) == 1


def test_plans_are_recorded_once(stage):
    injector, *_ = stage
    inject(injector, FaultKind.HANG)
    inject(injector, FaultKind.HANG)
    inject(injector, FaultKind.CUT)
    injector.inject(FaultPlan("objects", ()))
    assert [[fault.kind for fault in plan.faults] for plan in injector.plans] == [
        [FaultKind.HANG],
        [FaultKind.CUT],
    ]
