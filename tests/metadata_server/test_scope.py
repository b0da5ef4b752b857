"""The state machine of a scope: rules that random histories do not show."""

from __future__ import annotations

import random

import pytest

from hicache_metadata_server.core import slot_table
from hicache_metadata_server.core.scope import STEP, Scope
from hicache_metadata_server.core.slot_table import FREE, LIVE, QUARANTINED, LeaseLog, SlotTable
from hicache_metadata_server.protocol import Reserved, ScopeGeometry
from tests.metadata_server.test_histories import problems_of


def scope_of(slots, quarantine=0.0):
    return Scope(ScopeGeometry(scope="0:kv", slots=slots), quarantine)


def store(scope, keys, prefixes=(), now=0.0, lease=1):
    states, slots, leases = scope.reserve(keys, prefixes, "", lease, now, now + 10)
    assert set(states) <= {Reserved.LEASED}
    assert all(scope.commit(leases, [1] * len(leases), [1] * len(leases), now))
    return list(slots)


def test_a_scope_of_the_largest_size_takes_no_memory():
    scope = scope_of(2**40)
    assert store(scope, ["a", "b"]) == [0, 1]
    assert len(scope.table) == 2
    assert len(scope.free) == 2**40 - 2


def stored_by_a_driver(scope, until, *, now=0.0, pause=0.0, batch=16):
    """Store batches one after the other, and wait for slots, as the driver does.

    Returns the number of stored pages, and the time.
    """
    number = stored = 0
    lease = int(1000 * now) + 1
    while now < until:
        number += 1
        keys, patience = [f"{lease}-{i}" for i in range(batch)], now + 1.0
        while keys and now < patience:
            states, _, leases = scope.reserve(keys, (), "", lease, now, now + 10.0)
            held = [one for one in leases if one]
            assert all(scope.commit(held, [1] * len(held), [1] * len(held), now))
            stored += len(held)
            lease += batch
            keys = [key for key, state in zip(keys, states, strict=True) if state is Reserved.FULL]
            now += 0.1 if keys else 0.002
        now += pause
    return stored, now


def test_a_large_scope_keeps_some_slots_spare():
    """Slots that are evicted only when they are needed stay in quarantine too long."""
    scope = scope_of(4096, quarantine=5.0)
    stored, now = stored_by_a_driver(scope, 800.0, pause=1.0)
    assert now == pytest.approx(1.002 * stored / 16), "no batch has waited"
    assert len(scope.lru) > 0.9 * 4096


@pytest.mark.parametrize("slots", [50, 1023, 4096])
def test_a_full_scope_stores_as_fast_as_half_of_its_slots_leave_quarantine(slots):
    scope = scope_of(slots, quarantine=5.0)
    _, now = stored_by_a_driver(scope, 30.0)
    stored, now = stored_by_a_driver(scope, now + 30.0, now=now)
    assert stored > 0.8 * 30 * slots / 2 / 5
    assert len(scope.lru) >= slots / 2 - 16
    # Pages are kept longer again when sets are rare.
    _, now = stored_by_a_driver(scope, now + 20 * slots, now=now, pause=30.0)
    assert len(scope.lru) >= slots - max(32, slots / 10)
    assert problems_of(scope) == []


def test_a_burst_into_a_full_scope_evicts_no_more_than_its_pages():
    scope = scope_of(1023, quarantine=5.0)
    _, now = stored_by_a_driver(scope, 500.0, pause=5.0)
    before = scope.evicted
    stored_by_a_driver(scope, now + 20.1, now=now + 20.0, batch=200)
    assert scope.evicted - before <= 200


@pytest.mark.parametrize("quarantine", [0.0, 3.0])
def test_clearing_a_million_is_done_bit_by_bit(quarantine):
    pages = 20 * STEP
    scope = scope_of(pages, quarantine)
    store(scope, [f"k{i}" for i in range(pages)], [""] + [f"k{i}" for i in range(pages - 1)])
    assert scope.clear(100.0) == pages
    assert len(scope.lru) == scope.table.count(LIVE) == 0
    assert scope.table.count(QUARANTINED) + scope.table.count(FREE) == pages
    assert problems_of(scope) == []
    looked_at = [scope.settle(100.0) for _ in range(100)]
    assert max(looked_at) <= STEP
    assert problems_of(scope) == []
    while scope.next_time() is not None and scope.next_time() <= 103.0:
        scope.settle(103.0)
    assert len(scope.free) == pages


def test_the_log_of_leases_stays_short(monkeypatch):
    """However scattered the slots are that are leased together."""
    monkeypatch.setattr(slot_table, "CHUNK", 4)
    chance, table = random.Random(1), SlotTable()
    table.grow(24)
    log = LeaseLog(table)
    for first in range(1, 3600, 6):
        given = chance.sample(range(24), 6)
        for lease, slot in enumerate(given, first):
            table.leases[slot] = lease
        log.add(first, given)
        assert len(log) < 75


FAULTS = {
    "free and live": lambda scope, a, b: scope.free.returned.append(a),
    "twice free": lambda scope, a, b: scope.free.returned.append(scope.free.returned[0]),
    "outside": lambda scope, a, b: scope.free.returned.append(10**6),
    "lost": lambda scope, a, b: scope.free.returned.popleft(),
    "two keys": lambda scope, a, b: scope.table.by_key.update(b=a),
    "unknown key": lambda scope, a, b: scope.table.by_key.update(ghost=a),
    "lease of nobody": lambda scope, a, b: scope.table.by_key.update(ghost=scope.slot_of("held")),
    "never evicted": lambda scope, a, b: scope.table.older.__setitem__(a, -2),
    "never evicted tail": lambda scope, a, b: setattr(scope.lru, "_oldest", a),
    "state": lambda scope, a, b: scope.table.states.__setitem__(a, QUARANTINED),
    "no state": lambda scope, a, b: scope.table.states.__setitem__(a, 9),
    "lease": lambda scope, a, b: scope.table.leases.__setitem__(scope.slot_of("held"), 99),
    "count of leases": lambda scope, a, b: setattr(scope.leases, "held", 0),
    "generation": lambda scope, a, b: scope.table.generations.__setitem__(a, 0),
    "length": lambda scope, a, b: scope.table.lengths.__setitem__(a, 10**9),
    "log": lambda scope, a, b: scope.table.leases.__setitem__(a, 77),
    "quarantined": lambda scope, a, b: setattr(scope, "in_quarantine", scope.in_quarantine + 1),
    "children": lambda scope, a, b: scope.table.children.__setitem__(a, 5),
    "prefix": lambda scope, a, b: scope.prefix_refs.pending.update(nobody=1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fsck_finds(fault):
    scope = Scope(ScopeGeometry(scope="0:kv", slots=16, slot_bytes=100), 0.0)
    store(scope, ["a", "b", "c", "d"], ["", "a", "b", ""])
    scope.delete(["d"], (), 1.0)
    scope.reserve(["held"], (), "me", 50, 1.0, 20.0)
    scope.delete(["c"], (), 1.0)
    assert problems_of(scope) == []
    FAULTS[fault](scope, *scope.lru.slots(["a", "b"]))
    assert problems_of(scope) != []
