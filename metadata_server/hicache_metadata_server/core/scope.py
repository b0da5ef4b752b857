"""One scope and the states of its slots: free -> leased -> live -> quarantined -> free.

docs/metadata-protocol.md describes the transitions.
"""

from __future__ import annotations

from array import array
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.core.lru import LruOrder, PrefixRefs
from hicache_metadata_server.core.removals import MAX_KEPT, RemovalRoom, ScopeRemovals
from hicache_metadata_server.core.slot_table import (
    FREE,
    LEASED,
    LIVE,
    NAMES,
    QUARANTINED,
    FreeSlots,
    HeldLeases,
    SlotTable,
    Timers,
    as_run,
)
from hicache_metadata_server.protocol import (
    MAX_SPARE_SHARE,
    NO_SLOT,
    RemovedBecause,
    Reserved,
    SlotStatus,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server.protocol import ScopeGeometry

STEP: Final = 1024
"""Due slots that one call processes beside its own work. Later calls and `settle` do the rest."""
MIN_SPARE_SHARE: Final = 32
"""A full scope keeps at least one of this many slots free or in quarantine. A page that is evicted
only when its slot is needed frees the slot one quarantine too late. Scopes of fewer than `STEP`
slots keep none until slots are missing."""
FEW_SLOTS: Final = 32
"""A smaller scope evicts pages only when their slots are needed."""


class Totals(NamedTuple):
    """Current slots by state, and counts since the start, of all scopes together."""

    live: int = 0
    leased: int = 0
    quarantined: int = 0
    free: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0


class Scope:
    """The slots of one scope.

    The time is an argument and must not decrease. Each operation first processes up to `STEP` due
    slots. `changed` and `leased` collect the slots that a store has to write; the service takes
    them.
    """

    def __init__(
        self,
        geometry: ScopeGeometry,
        quarantine_seconds: float,
        removal_room: RemovalRoom | None = None,
    ) -> None:
        self.geometry = geometry
        self.number = 0
        """Number in the store."""
        self.tenant = ""
        """Tenant of the token that made it; empty for none."""
        self.model = ""
        """Name given by `describe`; empty for none."""
        self.quarantine_seconds = quarantine_seconds
        self.table = SlotTable()
        self.free = FreeSlots(self.table, geometry.slots)
        self.lru = LruOrder(self.table)
        self.prefix_refs = PrefixRefs(self.table, self.lru)
        self.leases = HeldLeases(self.table)
        self.timers = Timers()
        self.removals = ScopeRemovals(removal_room)
        self._min_spare = geometry.slots // MIN_SPARE_SHARE if geometry.slots >= STEP else 0
        # A scope of a few slots would evict what one request has just stored.
        self._max_spare = geometry.slots // MAX_SPARE_SHARE if geometry.slots >= FEW_SLOTS else 0
        self._spare = self._min_spare
        """Slots to keep free or in quarantine. Grows while leases find none free, and shrinks while
        most of them are free."""
        self._missing = set[str]()
        """Keys that found no free slot, since `_missing_since`."""
        self._missing_since = 0.0
        self.in_quarantine = 0
        """Slots in the state QUARANTINED."""
        self.changed: list[Sequence[int]] = []
        self.leased: list[Sequence[int]] = []
        """Those of the changed slots that were leased anew."""
        self.epoch = 0
        """Number of clears. A slot that was written in an earlier epoch is quarantined."""
        self.cleared_until = 0.0
        """End of the last clear's quarantine; before the first clear, the time from which slots are
        given."""
        self.closed_until = 0.0
        """Time before which no slot is given, because writers may hold leases of an earlier server;
        0 afterwards."""
        self.evicted = 0
        """Pages evicted since the start."""
        self.hits = 0
        """Requested keys since the start that were live."""
        self.misses = 0
        """Requested keys since the start that were not live."""
        self.expired = 0
        """Leases since the start that were neither committed nor given back in time."""
        self._cleared: list[tuple[float, bytes, dict[str, int]]] = []
        """Unfinished clears: end of the quarantine, states before (if a slot was leased), and the
        old index by key."""

    # Time.

    def settle(self, now: float, most: int = STEP) -> int:
        """End due leases and quarantines, up to `most` slots; returns the number of slots seen."""
        if 0 < self.closed_until <= now:
            self.closed_until = 0.0
        done = self._finish_clears(most) if self._cleared else 0
        next_time = self.timers.next_time()
        # Slots of an unfinished clear have no end of their quarantine yet, so none may be freed.
        if next_time is None or next_time > now or self._cleared:
            return done
        table, free = self.table, list[int]()
        states, until, expired = table.states, table.until, list[int]()
        for due in self.timers.due(now, most - done):
            done += len(due)
            if isinstance(due, range) and states.count(LIVE, due.start, due.stop) == len(due):
                # The usual case: the timer of a lease whose slot was committed long ago.
                continue
            for slot in due:
                if until[slot] > now:
                    continue
                if states[slot] == LEASED:
                    expired.append(slot)
                elif states[slot] == QUARANTINED:
                    states[slot] = FREE
                    free.append(slot)
        self.in_quarantine -= len(free)
        self.free.add(free)
        if expired:
            # A renewed lease has several timers.
            slots = list(dict.fromkeys(expired))
            self.expired += len(slots)
            self._quarantine(slots, now, remember=False)
        return done

    def next_time(self) -> float | None:
        """Time of the next work of `settle`; None if there is none."""
        if self._cleared:
            return 0.0
        due = self.timers.next_time()
        return (
            self.closed_until
            if self.closed_until and (due is None or self.closed_until < due)
            else due
        )

    def close_until(self, until: float) -> None:
        """Give no slot of a new scope before `until`, the end of leases of an earlier server."""
        self.closed_until = until
        # Of a new scope only `cleared_until` is durable; a restart derives `closed_until` from it.
        self.cleared_until = until

    @property
    def available(self) -> int:
        """Number of slots that can be leased now."""
        return 0 if self.closed_until else len(self.free)

    @property
    def quarantined(self) -> int:
        """Number of slots reported as quarantined: also the free slots of a closed scope."""
        return self.in_quarantine + len(self.free) - self.available

    # Operations of clients.

    def reserve(
        self,
        keys: Sequence[str],
        prefixes: Sequence[str],
        owner: str,
        first_lease: int,
        now: float,
        until: float,
    ) -> tuple[list[Reserved], Sequence[int], list[int]]:
        """Lease slots for keys that are neither live nor leased, one lease each.

        Leases are numbered from `first_lease`, and last until `until`. `prefixes` is empty or as
        long as `keys`; `owner` is a name for operators, and may be empty. Returns the result, slot
        and lease of each key.
        """
        self.settle(now)
        places = self._places_of_new(keys)
        if places and not self.closed_until:
            self._make_room(len(places), now, owner)
        if len(keys) == len(places) <= self.available:
            # The usual case: all keys are new, and there is room.
            given = self._lease(keys, prefixes, owner, first_lease, until)
            if self._spare > self._min_spare and self.available > self._spare // 2:
                self._spare = max(self._min_spare, self._spare - len(given))
            return (
                [Reserved.LEASED] * len(given),
                given,
                list(range(first_lease, first_lease + len(given))),
            )
        # Looked up after the evictions, which may have taken a page of this batch.
        slots, leases, by_key = self.lru.slots(keys), [0] * len(keys), self.table.by_key
        if len(places) > self.available and self.in_quarantine and not self.closed_until:
            self._grow_spare([keys[i] for i in places[self.available :]], now)
        places = places[: self.available]
        before = [prefixes[i] for i in places] if prefixes else []
        given = self._lease([keys[i] for i in places], before, owner, first_lease, until)
        states = [
            Reserved.EXISTS if slot >= 0 else Reserved.BUSY if key in by_key else Reserved.FULL
            for key, slot in zip(keys, slots, strict=True)
        ]
        for lease, (i, slot) in enumerate(zip(places, given, strict=True), first_lease):
            states[i], slots[i], leases[i] = Reserved.LEASED, slot, lease
        return states, slots, leases

    def commit(
        self, leases: Sequence[int], lengths: Sequence[int], checksums: Sequence[int], now: float
    ) -> list[bool]:
        """Make leased slots live, with their lengths and checksums. False for leases not held.

        A repeated commit of a live page is done if length and checksum are the same.
        """
        self.settle(now)
        slots = self.leases.slots(leases)
        if isinstance(slots, range) or (NO_SLOT not in slots and len(set(slots)) == len(slots)):
            # All leases are held and different.
            self.make_live(slots, lengths, checksums)
            return [True] * len(slots)
        done, first = list[bool](), dict[int, int]()
        for i, (slot, lease) in enumerate(zip(slots, leases, strict=True)):
            if slot >= 0:
                first.setdefault(lease, i)
        held = list(first.values())
        self.make_live(
            [slots[i] for i in held], [lengths[i] for i in held], [checksums[i] for i in held]
        )
        for i, (lease, length, checksum) in enumerate(zip(leases, lengths, checksums, strict=True)):
            done.append(first.get(lease) == i or self._is_committed(lease, length, checksum))
        return done

    def make_live(
        self, slots: Sequence[int], lengths: Sequence[int], checksums: Sequence[int]
    ) -> None:
        """Make leased slots live, each once. The list of slots must not change afterwards."""
        if not slots:
            return
        table, slots = self.table, as_run(slots)
        if isinstance(slots, range):
            first, end = slots.start, slots.stop
            table.states[first:end] = bytes([LIVE]) * len(slots)
            table.lengths[first:end] = array("Q", lengths)
            table.checksums[first:end] = array("Q", checksums)
        else:
            for slot, length, checksum in zip(slots, lengths, checksums, strict=True):
                table.states[slot] = LIVE
                table.lengths[slot] = length
                table.checksums[slot] = checksum
        self.leases.end(slots)
        # In this order: a prefix in the same batch is looked up in the LRU order.
        self.lru.add(slots)
        self.prefix_refs.add(slots)
        self.changed.append(slots)

    def abort(self, leases: Sequence[int], now: float) -> list[bool]:
        """End leases. False for leases not held."""
        self.settle(now)
        done = list[bool]()
        going = [slot for slot in map(self.leases.slot, dict.fromkeys(leases)) if slot >= 0]
        # A lease that occurs twice is ended once.
        mine = {self.table.leases[slot] for slot in going}
        for lease in leases:
            done.append(lease in mine)
            mine.discard(lease)
        self._quarantine(going, now)
        return done

    def release(self, slots: Sequence[int], now: float) -> list[bool]:
        """End the leases of slots, regardless of the holder. False for live slots, which stay."""
        self.settle(now)
        states = self.table.states
        used = [slot if slot < len(self.table) else NO_SLOT for slot in slots]
        done = [slot < 0 or states[slot] != LIVE for slot in used]
        self._quarantine(
            list(dict.fromkeys(slot for slot in used if slot >= 0 and states[slot] == LEASED)), now
        )
        return done

    def renew(self, leases: Sequence[int], now: float, until: float) -> list[bool]:
        """Renew leases until `until`. False for leases not held."""
        self.settle(now)
        slots = self.leases.slots(leases)
        held = as_run([slot for slot in slots if slot >= 0])
        for slot in held:
            self.table.until[slot] = until
        if held:
            self.timers.add(until, held)
            self.changed.append(held)
        return [slot >= 0 for slot in slots]

    def delete(
        self, keys: Sequence[str], generations: Sequence[int], now: float, owner: str = ""
    ) -> list[bool]:
        """Delete live pages; with generations only pages of that generation. False for others."""
        self.settle(now)
        slots, seen = self.lru.slots(keys), set[int]()
        done = list[bool]()
        for i, slot in enumerate(slots):
            meant = (
                slot >= 0
                and slot not in seen
                and (not generations or self.table.generations[slot] == generations[i])
            )
            if meant:
                seen.add(slot)
            done.append(meant)
        going = [slot for slot, goes in zip(slots, done, strict=True) if goes]
        reason = RemovedBecause.DAMAGED if generations else RemovedBecause.DELETED
        self.removals.add([self.table.keys[slot] for slot in going], reason, now, owner)
        self._quarantine(going, now)
        return done

    def clear(self, now: float, owner: str = "") -> int:
        """Quarantine all live and leased slots; returns the number of live pages.

        Takes constant time: later calls finish the clear, `STEP` slots at a time. A writer does not
        learn of the clear and may write until its lease would have ended, so a leased slot stays in
        quarantine until then.
        """
        self.settle(now)
        if self.closed_until and not len(self.table):
            # A new epoch would let a restart open it early.
            return 0
        pages = len(self.lru)
        self.in_quarantine += pages + len(self.leases)
        self.epoch += 1
        self.cleared_until = now + self.quarantine_seconds
        # A few milliseconds at most, however many pages there are.
        states, latest = self.table.states, islice(reversed(self.table.by_key.items()), MAX_KEPT)
        gone = [key for key, slot in latest if states[slot] == LIVE]
        self.removals.add(gone, RemovedBecause.CLEARED, now, owner, pages - len(gone))
        # The states before tell which slots were leased.
        before = bytes(self.table.states) if self.leases.held else b""
        self._cleared.append((self.cleared_until, before, self.table.quarantine_all()))
        self.leases.clear()
        self.lru.clear()
        self.prefix_refs.pending = {}
        self._finish_clears(STEP)
        self.settle(now)
        return pages

    # Inspection.

    def status(self, slot: int, now: float) -> SlotStatus:
        """State of a slot, for operators."""
        table = self.table
        state = table.states[slot] if slot < len(table) else FREE
        if state == FREE and (self.closed_until or slot >= len(table)):
            state, left = (QUARANTINED, self.closed_until - now) if self.closed_until else (FREE, 0)
            return SlotStatus(
                slot=slot, state=NAMES[state], generation=0, seconds_left=max(0.0, left)
            )
        owned, live, timed = state in (LEASED, LIVE), state == LIVE, state in (LEASED, QUARANTINED)
        return SlotStatus(
            slot=slot,
            state=NAMES[state],
            generation=table.generations[slot],
            key=table.keys[slot] if owned else "",
            prefix=table.prefixes[slot] if owned else "",
            length=table.lengths[slot] if live else 0,
            checksum=table.checksums[slot] if live else 0,
            owner=self.leases.owners.get(slot, ""),
            seconds_left=max(0.0, table.until[slot] - now) if timed else 0.0,
        )

    def lookup(self, keys: Sequence[str], *, touch: bool = True) -> Sequence[int]:
        """Slots of pages, -1 for those that are not live; counts them, and marks them as used.

        A range for pages in neighbouring slots.
        """
        slots = self.lru.used(keys) if touch else self.lru.slots(keys)
        # No range has a -1, which is found in it without a look at each slot.
        missing = slots.count(NO_SLOT) if NO_SLOT in slots else 0
        self.misses += missing
        self.hits += len(slots) - missing
        return slots

    def slot_of(self, key: str) -> int:
        """Live or leased slot of a key, or -1."""
        return self.table.by_key.get(key, NO_SLOT)

    # Transitions of slots.

    def _places_of_new(self, keys: Sequence[str]) -> Sequence[int]:
        """Indices of the keys that are neither live nor leased, the first of equal ones.

        Live keys are marked as used.
        """
        by_key = self.table.by_key
        if by_key.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            return range(len(keys))
        self.lru.used(keys)
        new = {key: i for i, key in reversed(list(enumerate(keys))) if key not in by_key}
        return sorted(new.values())

    def _lease(
        self,
        keys: Sequence[str],
        prefixes: Sequence[str],
        owner: str,
        first_lease: int,
        until: float,
    ) -> Sequence[int]:
        """Lease a slot for each key. At least as many must be free."""
        if not keys:
            return []
        table = self.table
        slots = self.free.take(len(keys))
        leases = range(first_lease, first_lease + len(keys))
        if isinstance(slots, range):
            first, end, numbers = slots.start, slots.stop, array("Q", leases)
            table.keys[first:end] = keys
            table.states[first:end] = bytes([LEASED]) * len(slots)
            table.leases[first:end] = numbers
            table.until[first:end] = array("d", [until]) * len(slots)
            if max(table.generations[first:end]) < first_lease:
                table.generations[first:end] = numbers
            else:
                self._count_generations(slots, leases)
        else:
            for slot, key, lease in zip(slots, keys, leases, strict=True):
                table.keys[slot] = key
                table.leases[slot] = lease
                table.until[slot] = until
                table.states[slot] = LEASED
            self._count_generations(slots, leases)
        table.by_key.update(zip(keys, slots, strict=True))
        if any(prefixes):
            if prefixes[1:] == keys[:-1]:
                # The usual case: a chain, whose pages follow each other.
                prefixes = [self._interned(prefixes[0]), *keys[:-1]]
            else:
                prefixes = [self._interned(prefix) for prefix in prefixes]
            for slot, prefix in zip(slots, prefixes, strict=True):
                table.prefixes[slot] = prefix
        if owner:
            self.leases.owners.update(dict.fromkeys(slots, owner))
        self.leases.held += len(slots)
        self.leases.log.add(first_lease, slots)
        self.timers.add(until, slots)
        self.changed.append(slots)
        self.leased.append(slots)
        return slots

    def _count_generations(self, slots: Sequence[int], leases: Sequence[int]) -> None:
        """Set the generation of each slot to the number of its lease, or higher."""
        # A lease number is never reused, by no server, so a page that an earlier server left in the
        # slot has another generation. Restored slots may be ahead of the number.
        generations = self.table.generations
        for slot, lease in zip(slots, leases, strict=True):
            generations[slot] = max(generations[slot] + 1, lease)

    def _is_committed(self, lease: int, length: int, checksum: int) -> bool:
        slot, table = self.leases.log.slot(lease), self.table
        return (
            slot >= 0
            and table.states[slot] == LIVE
            and (table.lengths[slot], table.checksums[slot]) == (length, checksum)
        )

    def _quarantine(self, slots: list[int], now: float, *, remember: bool = True) -> None:
        """Quarantine live or leased slots.

        `remember` is False for leases that have ended by themselves: their end is in the store, and
        a restart quarantines them again.
        """
        if not slots:
            return
        table, until = self.table, now + self.quarantine_seconds
        state = QUARANTINED if self.quarantine_seconds > 0 else FREE
        for slot in slots:
            del table.by_key[table.keys[slot]]
            if table.states[slot] == LEASED:
                self.leases.end((slot,))
            else:
                self.lru.remove(slot)
                self.prefix_refs.remove(slot)
            table.keys[slot] = ""
            table.prefixes[slot] = ""
            table.states[slot] = state
            table.until[slot] = until
        if state == FREE:
            self.free.add(slots)
        else:
            self.timers.add(until, slots)
            self.in_quarantine += len(slots)
        if remember:
            self.changed.append(slots)

    def _make_room(self, new: int, now: float, owner: str) -> None:
        """Evict pages for `new` leases, so that enough slots are free or in quarantine."""
        # Slots in quarantine count: evicting further pages would free no slot sooner.
        at_hand = len(self.free) + self.in_quarantine
        wanted = min(new, new + self._spare - at_hand)
        if wanted <= 0:
            return
        gone = list[str]()
        # One page at a time: after its eviction, its prefix may be the next victim.
        for slot in islice(self.lru.victims(), wanted):
            gone.append(self.table.keys[slot])
            self._quarantine([slot], now)
        self.evicted += len(gone)
        self.removals.add(gone, RemovedBecause.EVICTED, now, owner)
        self.settle(now)

    def _grow_spare(self, keys: Sequence[str], now: float) -> None:
        """Keep more slots spare: leases come faster than quarantines end."""
        if now - self._missing_since > self.quarantine_seconds:
            self._missing.clear()
            self._missing_since = now
        if self._spare < self._max_spare:
            # Not keys that a client asks for again while it waits: slots for them are on their way.
            # So are slots for the first keys of a quarantine's time, which may be all there are.
            before = len(self._missing)
            self._missing.update(keys)
            more = len(self._missing) - before if before else 0
            self._spare = min(self._max_spare, self._spare + more)

    def _interned(self, prefix: str) -> str:
        """Return the string object of the prefix's own slot, if there is one.

        The prefixes of a million pages then take no memory of their own.
        """
        if not prefix:
            return ""
        slot = self.table.by_key.get(prefix, NO_SLOT)
        return self.table.keys[slot] if slot >= 0 else prefix

    def _finish_clears(self, most: int) -> int:
        """Set the ends of cleared slots and free the old index, up to `most` slots.

        Returns the number of slots.
        """
        done, table = 0, self.table
        while self._cleared and done < most:
            until, before, index = self._cleared[0]
            slots = [index.popitem()[1] for _ in range(min(len(index), most - done))]
            later = list[int]()
            for slot in slots:
                table.keys[slot] = ""
                table.prefixes[slot] = ""
                table.children[slot] = 0
                # The writer of a leased slot may write until its lease would have ended.
                if before and before[slot] == LEASED and table.until[slot] > until:
                    later.append(slot)
                else:
                    table.until[slot] = until
            if slots:
                self.timers.add(until, slots)
            for slot in later:
                self.timers.add(table.until[slot], [slot])
            done += len(slots)
            if not index:
                self._cleared.pop(0)
        return done
