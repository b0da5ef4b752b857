"""The log of removals in memory: against a list of all that was ever added, and its bounds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_metadata_server.core import removals
from hicache_metadata_server.core.removals import RemovalRoom, ScopeRemovals
from hicache_metadata_server.protocol import RemovedBecause

KEPT, KEPT_TOTAL = 8, 20
LOGS = st.integers(0, 2)
STEPS = st.lists(
    st.tuples(st.just("add"), LOGS, st.integers(0, 12), st.sampled_from(["alone", "", "", "gap"]))
    | st.tuples(st.just("read"), LOGS, st.integers(0, 4), st.just("")),
    max_size=80,
)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(removals, "MAX_KEPT", KEPT)
    monkeypatch.setattr(removals, "MAX_KEPT_TOTAL", KEPT_TOTAL)


class Listened:
    """A log, all that was added to it, and a reader that asks now and then."""

    def __init__(self, room):
        self.log, self.all, self.seen = ScopeRemovals(room), [], 0
        self.cursor = self.log.read(None, 1).cursor

    def add(self, count, first, unnamed=0):
        keys = [f"k{first + i}" for i in range(count)]
        self.log.add(keys, RemovedBecause.DELETED, 1.0, "me", unnamed)
        self.all += [*["not named"] * unnamed, *keys]

    def read(self, most):
        """Removals one after the other, with a gap only where it says so."""
        found = self.log.read(self.cursor, most)
        if found.lost:
            begin = len(self.all) - len(self.log.read("", 10**6).keys)
            assert begin > self.seen, "nothing is missing"
            self.seen = begin
        assert found.keys == self.all[self.seen : self.seen + most]
        self.seen += len(found.keys)
        assert found.more == (self.seen < len(self.all))
        self.cursor = found.cursor


@given(STEPS)
def test_readers_miss_nothing_unless_they_are_told(steps):
    room = RemovalRoom()
    logs = [Listened(room) for _ in range(3)]
    for number, (step, index, count, how) in enumerate(steps):
        one = logs[index]
        if step == "read":
            one.read(count)
            continue
        for i in range(count if how == "alone" else 1):
            one.add(1 if how == "alone" else count, 100 * number + i, 3 * (how == "gap"))
        kept = [len(one.log.read("", 10**6).keys) for one in logs]
        assert sum(kept) == room.kept <= KEPT_TOTAL
        assert len(room.order) <= KEPT_TOTAL
        assert max(kept) < KEPT + 12
    for one in logs:
        while one.seen < len(one.all):
            one.read(3)


def test_a_log_alone_keeps_as_much_as_it_may():
    log = ScopeRemovals()
    for number in range(100):
        cursor = log.read(None, 0).cursor
        for i in range(KEPT):
            log.add([f"{number}-{i}"], RemovedBecause.DELETED, 1.0)
        found = log.read(cursor, 100)
        assert (found.lost, len(found.keys)) == (False, KEPT)


def test_a_busy_log_leaves_an_idle_one_alone():
    room = RemovalRoom()
    idle, busy = Listened(room), Listened(room)
    idle.add(4, 0)
    # Each batch of the busy one takes a place in the order, as well.
    for number in range(KEPT_TOTAL - 1):
        busy.add(1, number)
    idle.read(10)
    assert idle.seen == 4
