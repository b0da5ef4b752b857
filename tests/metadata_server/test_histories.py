"""Random histories of several clients on one scope, and what must be true after each step.

A lease is committed while it lasts, and no later (MD-LEASE-3, MD-LEASE-4); its key is free once it was
aborted (MD-LEASE-5). A slot rests for a quarantine, or until the lease that a clear has ended (MD-QUAR-1,
MD-QUAR-2), and comes back of a later generation (MD-GEN-1). Of a chain its tail is evicted first, and no
leased slot is (MD-EV-3, MD-EV-4). A page of another generation is not deleted (MD-DEL-3).
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_metadata_server.core import slot_table
from hicache_metadata_server.core.codec import (
    SlotChanges,
    SlotColumns,
    changed_blocks,
    changes_of,
    columns_of,
)
from hicache_metadata_server.core.invariants import audit
from hicache_metadata_server.core.restore import ScopeRestorer
from hicache_metadata_server.core.scope import Scope
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED
from hicache_metadata_server.protocol import RemovedBecause, Reserved, ScopeGeometry

QUARANTINE = 2.0
MAX_LEASE = 8
RESTING = (QUARANTINED, FREE)
STEPS = ["reserve", "commit"] * 3 + ["wait"] * 2
STEPS += ["abort", "release", "delete", "touch", "renew", "clear", "crash"]
REASONS = {
    "reserve": {RemovedBecause.EVICTED},
    "delete": {RemovedBecause.DELETED, RemovedBecause.DAMAGED},
    "clear": {RemovedBecause.CLEARED},
}
"""Reasons of the pages that a step removes; no other step removes any."""


def problems_of(scope: Scope) -> list[str]:
    """Problems that an fsck would report."""
    return [problem for chunk in audit(scope) for problem in chunk]


@dataclass
class History:
    """A scope, what its clients were told, and a store that is written after each step."""

    chance: random.Random
    slots: int
    keys: int
    scope: Scope = field(init=False)
    now: float = 1000.0
    next_lease: int = 1
    held: dict[int, tuple[str, int, float]] = field(default_factory=dict)
    """Leases that clients believe to hold: key, slot, end."""
    blocks: dict[int, bytes] = field(default_factory=dict)
    log: list[SlotChanges] = field(default_factory=list)
    rested: dict[int, float] = field(default_factory=dict)
    """Slots that were let go, and when at the latest they may still be written or read."""
    written: dict[int, float] = field(default_factory=dict)
    """Slots whose lease a clear has ended, and until when their writers, whom nobody has asked,
    take it for theirs."""
    generations: dict[int, int] = field(default_factory=dict)
    pages: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Live pages, the least recently used first: slot, and the key named as prefix."""

    def __post_init__(self) -> None:
        self.scope = Scope(self.geometry, QUARANTINE)

    @property
    def geometry(self) -> ScopeGeometry:
        return ScopeGeometry(scope="0:kv", slots=self.slots)

    def step(self) -> None:
        # A lease that ends by itself ends at its time, whenever that is seen.
        before = {
            slot: self.scope.table.until[slot] if state == LEASED else float("inf")
            for slot, state in enumerate(self.scope.table.states)
            if state in (LEASED, LIVE)
        }
        pages, cursor = Counter(self.scope.lru), self.scope.removals.read(None, 0).cursor
        step = self.chance.choice(STEPS)
        getattr(self, step)()
        self.check_removals(pages - Counter(self.scope.lru), cursor, step)
        self.write()
        for slot, end in before.items():
            if slot < len(self.scope.table) and self.scope.table.states[slot] in RESTING:
                self.rested.setdefault(slot, min(self.now, end))
        self.see()

    def commit(self) -> None:
        chance = self.chance
        leases = chance.sample(
            list(self.held), chance.randint(min(1, len(self.held)), len(self.held))
        )
        valid = [self.scope.leases.slot(lease) == self.held[lease][1] for lease in leases]
        lengths = [chance.randint(1, 9) for _ in leases]
        checksums = [chance.getrandbits(64) for _ in leases]
        stored = list[tuple[str, int, float]]()
        done = self.scope.commit(leases, lengths, checksums, self.now)
        for lease, was_valid, did in zip(leases, valid, done, strict=True):
            _, _, end = held = self.held.pop(lease)
            assert did == (was_valid and end > self.now)
            if did:
                stored.append(held)
        for key, slot, _ in reversed(stored):
            self.pages[key] = slot, self.scope.table.prefixes[slot]

    def abort(self) -> None:
        if self.held:
            lease = self.chance.choice(list(self.held))
            self.scope.abort([lease, lease], self.now)
            del self.held[lease]

    def release(self) -> None:
        self.scope.release([self.chance.randrange(self.slots) for _ in range(2)], self.now)

    def touch(self) -> None:
        keys = self.some_keys(6)
        slots = [self.pages[key][0] if key in self.pages else -1 for key in keys]
        assert list(self.scope.lru.used(keys)) == slots
        self.use(keys)

    def use(self, keys: list[str]) -> None:
        """Move the pages that are live to the end, the first key last."""
        for key in reversed(keys):
            if key in self.pages:
                self.pages[key] = self.pages.pop(key)

    def renew(self) -> None:
        if self.held:
            lease = self.chance.choice(list(self.held))
            end = self.now + self.chance.choice((3, MAX_LEASE))
            if self.scope.renew([lease], self.now, end) == [True]:
                self.held[lease] = (*self.held[lease][:2], end)

    def wait(self) -> None:
        self.now += self.chance.choice((0.5, 1, 3, 10))
        if self.chance.random() < 0.5:
            # Else the next that somebody asks for has to see to what is due.
            self.scope.settle(self.now)
            self.check_nothing_overdue()

    def clear(self) -> None:
        if self.chance.random() < 0.3:
            self.scope.settle(self.now, 10**6)
            self.written |= {slot: self.scope.table.until[slot] for slot in self.leased_slots()}
            self.scope.clear(self.now)

    def leased_slots(self, scope: Scope | None = None) -> list[int]:
        states = (scope or self.scope).table.states
        return [slot for slot, state in enumerate(states) if state == LEASED]

    def key(self) -> str:
        return f"k{self.chance.randrange(self.keys)}"

    def some_keys(self, most: int) -> list[str]:
        """Keys that follow each other, as those of a chain, or any."""
        count, first = self.chance.randint(1, most), self.chance.randrange(self.keys)
        if self.chance.random() < 0.5:
            return [f"k{(first + i) % self.keys}" for i in range(count)]
        return [self.key() for _ in range(count)]

    def reserve(self) -> None:
        keys = self.some_keys(4)
        prefixes = [self.chance.choice(("", self.key())) for _ in keys]
        for lease in [lease for lease, (_, _, end) in self.held.items() if end <= self.now]:
            if self.chance.random() < 0.5:
                del self.held[lease]
        self.use(keys)
        states, slots, leases = self.scope.reserve(
            keys, prefixes, "me", self.next_lease, self.now, self.now + 3
        )
        if Reserved.FULL in states:
            assert self.scope.quarantined or not self.oldest_tail(), "no page was evicted"
        self.next_lease += len(keys)
        columns = zip(keys, states, slots, leases, strict=True)
        for i, (key, state, slot, lease) in enumerate(columns):
            assert (slot >= 0) == (state in (Reserved.LEASED, Reserved.EXISTS))
            assert (lease > 0) == (state is Reserved.LEASED)
            if state is Reserved.LEASED:
                assert key not in keys[:i], "the first of several gets the lease"
                self.check_given(slot)
                self.generations[slot] = self.scope.table.generations[slot]
                self.held[lease] = key, slot, self.now + 3
        given = {lease: slot for lease, slot in zip(leases, slots, strict=True) if lease}
        if given:
            together = self.scope.leases.log.slots(range(min(given), max(given) + 1))
            assert list(together or ()) == list(given.values()), "found with one search"

    def check_given(self, slot: int) -> None:
        """A slot may be given out now."""
        assert self.scope.table.generations[slot] > self.generations.get(slot, 0)
        rested = self.rested.pop(slot, 0.0) + QUARANTINE <= self.now
        assert rested, "a slot is given out that rests"
        written = self.written.pop(slot, 0.0)
        assert written <= self.now, "a slot is given out that its writer may write into"

    def delete(self) -> None:
        keys, table = list({self.key(): None for _ in range(2)}), self.scope.table
        slots = self.scope.lru.slots(keys)
        generations, meant = [], [slot >= 0 for slot in slots]
        if self.chance.random() < 0.5:
            right = [self.chance.random() < 0.5 for _ in keys]
            own = [table.generations[slot] if slot >= 0 else 1 for slot in slots]
            generations = [one + (not ok) for one, ok in zip(own, right, strict=True)]
            meant = [there and ok for there, ok in zip(meant, right, strict=True)]
        assert self.scope.delete(keys, generations, self.now) == meant
        left = [slot >= 0 and not goes for slot, goes in zip(slots, meant, strict=True)]
        assert [self.scope.lru.slot(key) >= 0 for key in keys] == left

    def oldest_tail(self) -> str:
        """The least recently used page that no other page names; "" if there is none."""
        tails = (
            key
            for key in self.pages
            if all(prefix != key for other, (_, prefix) in self.pages.items() if other != key)
        )
        return next(tails, "")

    def write(self) -> None:
        """Write changes into a log, and perhaps some of its blocks, as a store does."""
        changed, leased = self.scope.changed, self.scope.leased
        self.scope.changed, self.scope.leased = [], []
        if changed:
            self.log.append(changes_of(self.scope, changed, leased))
        dirty = {block for group in self.log for block in changed_blocks(group)}
        kept = {block for block in dirty if self.chance.random() < 0.5}
        for block in dirty - kept:
            self.blocks[block] = SlotColumns.of(self.scope, block).encode()
        if not kept:
            self.log.clear()

    def crash(self) -> None:
        """Go on with what was written."""
        if self.chance.random() < 0.5:
            return
        old = self.scope
        old.settle(self.now, 10**6)
        scope = self.scope = Scope(self.geometry, QUARANTINE)
        scope.epoch, scope.cleared_until = old.epoch, old.cleared_until
        blocks = ((number, SlotColumns.decode(blob)) for number, blob in self.blocks.items())
        assert (
            ScopeRestorer(scope, columns_of(self.slots, blocks, self.log), self.now, 100.0).run()
            == []
        )
        assert sorted(scope.lru) == sorted(old.lru)
        for key in scope.lru:
            slot = scope.lru.slot(key)
            assert scope.status(slot, self.now) == old.status(slot, self.now)
        assert scope.table.by_key == old.table.by_key
        assert len(scope.leases) == len(old.leases)
        held = [old.table.leases[slot] for slot in self.leased_slots(old)]
        assert list(scope.leases.slots(held)) == list(old.leases.slots(held))
        for slot, until in enumerate(scope.table.until):
            if scope.table.states[slot] == QUARANTINED:
                assert until <= max(self.now + QUARANTINE, self.written.get(slot, 0.0))

    def check_removals(self, gone: Counter[str], cursor: str, step: str) -> None:
        """Every page that is live no more is listed, once, and no other."""
        found = self.scope.removals.read(cursor, 10**6)
        if step == "crash":
            assert (found.keys, found.lost) in (([], False), ([], True))
            self.pages = {key: self.pages[key] for key in self.scope.lru}
            return
        assert (Counter(found.keys), found.lost) == (gone, False)
        assert set(found.reasons) <= REASONS.get(step, set())
        assert set(found.times) <= {self.now}
        for key in found.keys:
            assert step != "reserve" or key == self.oldest_tail()
            del self.pages[key]

    def see(self) -> None:
        assert problems_of(self.scope) == []
        assert list(self.scope.lru) == list(self.pages)
        owned = [self.scope.lru.slot(key) for key in self.scope.lru]
        owned += [slot for lease in self.held if (slot := self.scope.leases.slot(lease)) >= 0]
        assert len(set(owned)) == len(owned), "a slot belongs to two keys"

    def check_nothing_overdue(self) -> None:
        """Leases and quarantines have ended that were to end by now."""
        table = self.scope.table
        for slot, state in enumerate(table.states):
            if state in (LEASED, QUARANTINED):
                assert table.until[slot] > self.now

    def check_nothing_lost(self) -> None:
        """Once nothing holds them, all slots can be leased."""
        self.scope.clear(self.now)
        self.now += max(QUARANTINE, MAX_LEASE) + 1
        self.scope.settle(self.now, 10**6)
        states, slots, _ = self.scope.reserve(
            [f"n{i}" for i in range(self.slots)], (), "", self.next_lease, self.now, self.now + 1
        )
        assert set(states) == {Reserved.LEASED}
        assert sorted(slots) == list(range(self.slots))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chance=st.randoms(use_true_random=False), slots=st.integers(1, 12), keys=st.integers(1, 20))
def test_random_histories(chance, slots, keys):
    history = History(chance, slots, keys)
    for _ in range(60):
        history.step()
    history.check_nothing_lost()


@pytest.mark.parametrize("chunk", [4, slot_table.CHUNK])
@pytest.mark.parametrize(("slots", "keys"), [(8, 14), (24, 40)])
@pytest.mark.parametrize("seed", range(3))
def test_long_histories(monkeypatch, seed, slots, keys, chunk):
    """With chunks of the lease log so small, they are cleaned and merged all the time."""
    monkeypatch.setattr(slot_table, "CHUNK", chunk)
    history = History(random.Random(seed), slots, keys)
    for _ in range(2500):
        history.step()
    history.check_nothing_lost()
