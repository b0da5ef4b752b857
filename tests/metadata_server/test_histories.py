"""Random histories of several clients on one scope, by both parts of the protocol, and what must be
true after each step.

No slot belongs to two keys, and none is lost (MD-SLOT-1, MD-SLOT-2); both parts see one state (MD-API-4).
A key is leased once, exists, is busy, or finds the scope full (MD-LEASE-1, MD-RES-4, MD-RES-5). A lease is
committed while it lasts, also again, and no later (MD-LEASE-2, MD-LEASE-3, MD-LEASE-4, MD-RES-3, MD-RES-6);
its key is free once it was aborted (MD-LEASE-5). A confirm of a slot that is not reserved for its key, or
not any more, changes nothing (MD-CONF-2), nor does a release of a live slot or a second one (MD-CONF-4). A
slot rests for a quarantine, or until the lease that a clear has ended (MD-QUAR-1, MD-QUAR-2), and comes back
of a later generation (MD-GEN-1). A full scope evicts what was used least recently, of a chain its tail, and
no leased slot (MD-EV-1, MD-EV-2, MD-EV-3, MD-EV-4); a lookup without touch is no use (MD-EV-5). A page of another generation is not deleted (MD-DEL-3); what is deleted or cleared is gone
(MD-DEL-1, MD-DEL-2), and listed once, with its reason and the owner in the request (MD-REM-1).
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core import slot_table
from hicache_metadata_server.core.codec import (
    SlotChanges,
    SlotColumns,
    changed_blocks,
    changes_of,
    columns_of,
)
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.core.invariants import audit
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.restore import ScopeRestorer
from hicache_metadata_server.core.scope import Scope
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE, QUARANTINED
from hicache_metadata_server.protocol import RemovedBecause, Reserved, ScopeGeometry

NAME = "0:kv"
LEASE, QUARANTINE, MAX_LEASE = 3.0, 2.0, 8.0
LIMITS = msgspec.structs.replace(DEFAULTS, lease_seconds=LEASE, quarantine_seconds=QUARANTINE)
RESTING = (QUARANTINED, FREE)
STEPS = ["reserve", "commit"] * 3 + ["wait", "confirm"] * 2
STEPS += ["abort", "delete", "look", "renew", "repeat", "clear", "crash"]
REASONS = {"reserve": RemovedBecause.EVICTED, "clear": RemovedBecause.CLEARED}


class Page(NamedTuple):
    """A page as it was committed."""

    slot: int
    prefix: str
    lease: int
    length: int = 0
    checksum: int = 0


def problems_of(scope: Scope) -> list[str]:
    """Problems that an fsck would report."""
    return [problem for chunk in audit(scope) for problem in chunk]


@dataclass
class History:
    """A scope, what its clients were told, and a store that is written after each step."""

    chance: random.Random
    slots: int
    keys: int
    now: float = 1000.0
    held: dict[int, tuple[str, int, float]] = field(default_factory=dict)
    """Leases that clients believe to hold: key, slot, end."""
    ended: set[int] = field(default_factory=set)
    """Leases of which their clients do not know that a clear or a release has ended them."""
    blocks: dict[int, bytes] = field(default_factory=dict)
    log: list[SlotChanges] = field(default_factory=list)
    rested: dict[int, float] = field(default_factory=dict)
    """Slots that were let go, and when at the latest they may still be written or read."""
    written: dict[int, float] = field(default_factory=dict)
    """Slots whose lease a clear has ended, and until when their writers, whom nobody has asked,
    take it for theirs."""
    generations: dict[int, int] = field(default_factory=dict)
    pages: dict[str, Page] = field(default_factory=dict)
    """Live pages, the least recently used first."""
    committed: list[tuple[str, Page]] = field(default_factory=list)
    """All pages that were ever live."""
    reasons: dict[str, RemovedBecause] = field(default_factory=REASONS.copy)
    """Reasons of the pages that steps remove; other steps remove none."""

    def __post_init__(self) -> None:
        self.service = MetadataService(LIMITS)
        self.service.add_scope(self.geometry)

    @property
    def geometry(self) -> ScopeGeometry:
        return ScopeGeometry(scope=NAME, slots=self.slots)

    @property
    def scope(self) -> Scope:
        return self.service.scopes[NAME]

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
        valid = [self.holds(lease) for lease in leases]
        lengths = [chance.randint(1, 9) for _ in leases]
        checksums = [chance.getrandbits(64) for _ in leases]
        assert self.scope.commit(leases, lengths, checksums, self.now) == valid
        columns = zip(leases, lengths, checksums, valid, strict=True)
        self.add([tuple(row) for *row, was_valid in columns if was_valid])
        for lease in leases:
            self.held.pop(lease, None)

    def holds(self, lease: int) -> bool:
        """Whether a lease that a client believes to hold can be committed."""
        return lease not in self.ended and self.held[lease][2] > self.now

    def add(self, stored: list[tuple[int, ...]]) -> None:
        """Note pages that have become live together: lease, length and checksum of each."""
        for lease, *columns in reversed(stored):
            key, slot, _ = self.held.pop(lease)
            self.pages[key] = Page(slot, self.scope.table.prefixes[slot], lease, *columns)
            self.committed.append((key, self.pages[key]))

    def repeat(self) -> None:
        """Commit a page again, however long ago it was committed."""
        if self.committed:
            key, page = self.chance.choice([*self.pages.items(), *self.committed[-self.slots :]])
            for checksum in (page.checksum ^ 1, page.checksum):
                done = self.scope.commit([page.lease], [page.length], [checksum], self.now)
                assert done == [self.pages.get(key) is page and checksum == page.checksum]

    def confirm(self) -> None:
        """Confirm slots by SGLang's part, wrong ones too, and give slots back, one of them twice."""
        chance, new = self.chance, dict[int, None]()
        known = [(key, slot) for key, slot, _ in self.held.values()]
        known += [(key, page.slot) for key, page in self.pages.items()]
        known.append((self.key(), chance.randrange(self.slots)))
        pairs = chance.choices(known, k=chance.randint(0, 3))
        released = chance.choices(range(self.slots), k=chance.randint(0, 2))
        reserved = {self.held[lease][:2]: lease for lease in self.held if self.holds(lease)}
        refused = False
        for key, slot in pairs:
            if (key, slot) in reserved:
                new[reserved[key, slot]] = None
            else:
                refused |= key not in self.pages or self.pages[key].slot != slot
        request = p.SglangConfirm(
            written_keys_to_confirm=pairs, pages_to_release=released + released[:1]
        )
        live = {self.held[lease][1] for lease in new} | {page.slot for page in self.pages.values()}
        refused |= not live.isdisjoint(released)
        with pytest.raises(RequestError, match="not reserved") if refused else nullcontext():
            SglangService(self.service).confirm_write(0, request, self.now)
        self.add([(lease,) for lease in new])
        self.ended |= {lease for lease, (_, slot, _) in self.held.items() if slot in released}

    def abort(self) -> None:
        if self.held:
            lease = self.chance.choice(list(self.held))
            held = self.holds(lease)
            assert self.scope.abort([lease, lease], self.now) == [held, False]
            del self.held[lease]

    def look(self) -> None:
        """Look for pages: all ways but one mark them as used."""
        keys, now = self.some_keys(6), self.now
        pages = [self.pages.get(key, Page(-1, "", 0)) for key in keys]
        there, scopes = [page.slot >= 0 for page in pages], [p.LookupScope(scope=NAME, keys=keys)]
        match how := self.chance.choice(("touch", "lookup", "peek", "exists", "get_page_indices")):
            case "touch":
                [flags] = self.service.touch(p.Touch(scopes=scopes), now).scopes
                assert flags.done == there
            case "lookup" | "peek":
                request = p.Lookup(scopes=scopes, touch=how == "lookup")
                [found] = self.service.lookup(request, now).scopes
                assert found.slots == [page.slot for page in pages]
                assert found.lengths == [page.length for page in pages]
                assert found.checksums == [page.checksum for page in pages]
            case _:
                answer = getattr(SglangService(self.service), how)(0, p.SglangKeys(keys=keys), now)
                slots = [page.slot if page.slot >= 0 else None for page in pages]
                assert answer == ({"exists": there} if how == "exists" else {"indices": slots})
        if how != "peek":
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
            is_held = self.holds(lease)
            assert self.scope.renew([lease], self.now, end) == [is_held]
            if is_held:
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
            self.service.clear(p.Clear(scopes=[NAME], owner="clear"), self.now)
            self.ended |= self.held.keys()

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
        busy = {key for lease, (key, _, _) in self.held.items() if self.holds(lease)}
        states, slots, leases = self.reserved(keys, prefixes)
        if Reserved.FULL in states:
            assert self.scope.quarantined or not self.oldest_tail(), "no page was evicted"
        columns = zip(keys, states, slots, leases, strict=True)
        for i, (key, state, slot, lease) in enumerate(columns):
            assert (slot >= 0) == (state in (Reserved.LEASED, Reserved.EXISTS))
            assert (lease > 0) == (state is Reserved.LEASED)
            if state is Reserved.EXISTS:
                assert slot == self.pages[key].slot
            if state in (Reserved.BUSY, Reserved.FULL):
                assert (state is Reserved.BUSY) == (key in busy)
            if state is Reserved.LEASED:
                assert key not in busy
                assert key not in keys[:i], "the first of several gets the lease"
                busy.add(key)
                self.check_given(slot)
                self.generations[slot] = self.scope.table.generations[slot]
                self.held[lease] = key, slot, self.now + LEASE
        given = {lease: slot for lease, slot in zip(leases, slots, strict=True) if lease}
        if given:
            assert list(given.values()) == sorted(given.values()), "in the order of the file"
            together = self.scope.leases.log.slots(range(min(given), max(given) + 1))
            assert list(together or ()) == list(given.values()), "found with one search"

    def reserved(self, keys: list[str], prefixes: list[str]) -> tuple[list[Reserved], ...]:
        """States, slots and leases of keys."""
        part = p.ReserveScope(scope=NAME, keys=keys, prefixes=prefixes)
        [leased] = self.service.reserve(p.Reserve(scopes=[part], owner="reserve"), self.now).scopes
        return leased.states, leased.slots, leased.leases

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
        self.reasons["delete"] = RemovedBecause.DAMAGED if generations else RemovedBecause.DELETED
        part = p.DeleteScope(scope=NAME, keys=keys * 2, generations=generations * 2)
        [flags] = self.service.delete(p.Delete(scopes=[part], owner="delete"), self.now).scopes
        assert flags.done == meant + [False] * len(keys), "each is deleted once"
        left = [slot >= 0 and not goes for slot, goes in zip(slots, meant, strict=True)]
        assert [self.scope.lru.slot(key) >= 0 for key in keys] == left

    def oldest_tail(self) -> str:
        """The least recently used page that no other page names; "" if there is none."""
        tails = (
            key
            for key in self.pages
            if all(page.prefix != key for other, page in self.pages.items() if other != key)
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
        scope = self.service.scopes[NAME] = Scope(self.geometry, QUARANTINE)
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
        for slot in scope.free.returned:
            # The store may come from a server whose clock was ahead.
            scope.table.generations[slot] += 2**40 * self.chance.randrange(2)
            self.generations[slot] = scope.table.generations[slot]
        scope.changed += [[slot] for slot in scope.free.returned]

    def check_removals(self, gone: Counter[str], cursor: str, step: str) -> None:
        """Every page that is live no more is listed, once, and no other."""
        found = self.scope.removals.read(cursor, 10**6)
        if step == "crash":
            assert (found.keys, found.lost) in (([], False), ([], True))
            self.pages = {key: self.pages[key] for key in self.scope.lru}
            return
        assert (Counter(found.keys), found.lost) == (gone, False)
        # Each step names itself as the owner.
        assert set(zip(found.reasons, found.by, strict=True)) <= {(self.reasons.get(step), step)}
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
        states, slots, _ = self.reserved([f"n{i}" for i in range(self.slots)], [])
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
