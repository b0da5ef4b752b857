"""One scope: the life of its slots, `free -> leased -> live -> quarantined -> free`, as
docs/metadata-protocol.md tells it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.core.free_slots import FreeSlots
from hicache_metadata_server.core.leases import HeldLeases
from hicache_metadata_server.core.lru import LruOrder
from hicache_metadata_server.core.pins import SlotPins
from hicache_metadata_server.core.prefix_refs import PrefixRefs
from hicache_metadata_server.core.slot_table import (
    FREE,
    LEASED,
    LIVE,
    NAMES,
    QUARANTINED,
    SlotTable,
    as_run,
)
from hicache_metadata_server.core.timers import Timers
from hicache_metadata_server.protocol import NO_SLOT, Reserved, SlotStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server.protocol import ScopeGeometry

STEP: Final = 1024
"""Slots that one call sees to beside its own work: what more is due, later calls and `settle`
do."""
SPARE_SHARE: Final = 32
"""One of so many slots is kept free or resting, once a scope is full: what is evicted only when it
is asked for comes a quarantine too late. Scopes of fewer than `STEP` slots keep none."""


class Totals(NamedTuple):
    """Slots by state as they are, and what was counted since the start."""

    live: int = 0
    leased: int = 0
    quarantined: int = 0
    free: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0


class Scope:
    """The slots of one scope.

    The time is passed in and never goes back. What a client asks for is done after what is due by
    then, up to `STEP` slots of it. `changed` collects the slots whose state a restart must know;
    whoever keeps it takes them.
    """

    def __init__(self, geometry: ScopeGeometry, quarantine_seconds: float) -> None:
        self.geometry = geometry
        self.model = ""
        """The name that `describe` has given; empty for none."""
        self.quarantine_seconds = quarantine_seconds
        self.table = SlotTable()
        self.free = FreeSlots(self.table, geometry.slots)
        self.lru = LruOrder(self.table)
        self.prefix_refs = PrefixRefs(self.table, self.lru)
        self.leases = HeldLeases(self.table)
        self.pins = SlotPins()
        self.timers = Timers()
        self.in_quarantine = 0
        """Quarantined slots."""
        self.changed: list[Sequence[int]] = []
        self.leased: list[Sequence[int]] = []
        """Of these, the ones that were leased anew."""
        self.epoch = 0
        """Times that it was cleared. What was written down in an earlier epoch is live or leased no
        more."""
        self.cleared_until = 0.0
        """When the quarantine of the last clear ends; of a scope that was never cleared, when it
        gives its first slot."""
        self.closed_until = 0.0
        """No slot is given before: writers may hold leases of an earlier server. 0 once that is
        over."""
        self.evicted = 0
        """Pages evicted since the start."""
        self.hits = self.misses = 0
        """Keys that were asked for since the start, by whether they were live."""
        self.expired = 0
        """Leases that ended by themselves since the start."""
        self._cleared: list[tuple[float, bytes, dict[str, int]]] = []
        """What clears have left to be taken apart, when its quarantine ends, and the states before:
        a leased slot rests longer."""

    # What time does.

    def settle(self, now: float, most: int = STEP) -> int:
        """End the leases and quarantines whose time has come, at most so many; returns how many
        slots were looked at."""
        if 0 < self.closed_until <= now:
            self.closed_until = 0.0
        done = self._finish_clears(most) if self._cleared else 0
        next_time = self.timers.next_time()
        # What a clear has left does not know the end of its quarantine before it was taken apart.
        if next_time is None or next_time > now or self._cleared:
            return done
        table, free = self.table, list[int]()
        states, until, expired = table.states, table.until, list[int]()
        for due in self.timers.due(now, most - done):
            done += len(due)
            if isinstance(due, range) and states.count(LIVE, due.start, due.stop) == len(due):
                # Nearly always: leases that were committed.
                continue
            for slot in due:
                if until[slot] > now:
                    continue
                if states[slot] == LEASED:
                    expired.append(slot)
                elif states[slot] == QUARANTINED and not self.is_pinned(slot, now):
                    states[slot] = FREE
                    free.append(slot)
        self.in_quarantine -= len(free)
        self.free.add(free)
        if expired:
            # A lease that was renewed is due several times.
            slots = list(dict.fromkeys(expired))
            self.expired += len(slots)
            self._quarantine(slots, now, remember=False)
        return done

    def next_time(self) -> float | None:
        """When `settle` has something to do, if it has."""
        if self._cleared:
            return 0.0
        due = self.timers.next_time()
        return (
            self.closed_until
            if self.closed_until and (due is None or self.closed_until < due)
            else due
        )

    def close_until(self, until: float) -> None:
        """Give no slot of a new scope before then: its file has been written under leases of a
        server that is gone."""
        self.closed_until = self.cleared_until = until

    @property
    def available(self) -> int:
        """Slots that can be leased now."""
        return 0 if self.closed_until else len(self.free)

    @property
    def quarantined(self) -> int:
        """Slots that nobody may be given yet."""
        return self.in_quarantine + len(self.free) - self.available

    def is_pinned(self, slot: int, now: float) -> bool:
        """Whether any pin on it lasts."""
        return bool(self.pins.by_slot) and self.pins.count(slot, now) > 0

    # What clients ask for.

    def reserve(
        self,
        keys: Sequence[str],
        prefixes: Sequence[str],
        owner: str,
        first_lease: int,
        now: float,
        until: float,
    ) -> tuple[list[Reserved], list[int], list[int]]:
        """Lease slots for keys that are neither live nor leased; what reserve says, the slot and
        the lease of each key.

        Leases are numbered from `first_lease`; at most one a key. `prefixes` is empty or as long as
        `keys`.
        """
        self.settle(now)
        places = self._places_of_new(keys)
        if places and not self.closed_until:
            self._make_room(len(places), now)
        if len(keys) == len(places) <= self.available:
            # Nearly always: nothing in the batch is known, and there is room.
            given = self._lease(keys, prefixes, owner, first_lease, until)
            return (
                [Reserved.LEASED] * len(given),
                list(given),
                list(range(first_lease, first_lease + len(given))),
            )
        # Looked up only now: a page of this batch may have gone to make room for another.
        slots, leases, by_key = self.lru.slots(keys), [0] * len(keys), self.table.by_key
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
        """Make leased slots live, with the length and checksum of each. False where the lease is
        not held.

        A lease whose page is live already counts as done if length and checksum are the same.
        """
        self.settle(now)
        slots = self.leases.slots(leases)
        if isinstance(slots, range) or (NO_SLOT not in slots and len(set(slots)) == len(slots)):
            # Nearly always.
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
        """Commit slots that are leased, each once; the list is this object's from now on."""
        if not slots:
            return
        table, slots = self.table, as_run(slots)
        if isinstance(slots, range):
            first, end = slots.start, slots.stop
            table.states[first:end] = bytes([LIVE]) * len(slots)
            table.lengths[first:end], table.checksums[first:end] = (
                array("Q", lengths),
                array("Q", checksums),
            )
        else:
            for slot, length, checksum in zip(slots, lengths, checksums, strict=True):
                table.states[slot], table.lengths[slot], table.checksums[slot] = (
                    LIVE,
                    length,
                    checksum,
                )
        self.leases.end(slots)
        self.lru.add(slots)
        self.prefix_refs.add(slots)
        self.changed.append(slots)

    def abort(self, leases: Sequence[int], now: float) -> list[bool]:
        """End leases; False where there is none."""
        self.settle(now)
        done = list[bool]()
        going = [slot for slot in map(self.leases.slot, dict.fromkeys(leases)) if slot >= 0]
        mine = {self.table.leases[slot] for slot in going}
        for lease in leases:
            done.append(lease in mine)
            mine.discard(lease)
        self._quarantine(going, now)
        return done

    def release(self, slots: Sequence[int], now: float) -> list[bool]:
        """End the leases of those slots, whoever holds them; False for live ones, which stay."""
        self.settle(now)
        states = self.table.states
        used = [slot if slot < len(self.table) else NO_SLOT for slot in slots]
        done = [slot < 0 or states[slot] != LIVE for slot in used]
        self._quarantine(
            list(dict.fromkeys(slot for slot in used if slot >= 0 and states[slot] == LEASED)), now
        )
        return done

    def renew(self, leases: Sequence[int], now: float, until: float) -> list[bool]:
        """Let leases last until then; False where there is none."""
        self.settle(now)
        slots = self.leases.slots(leases)
        held = as_run([slot for slot in slots if slot >= 0])
        for slot in held:
            self.table.until[slot] = until
        if held:
            self.timers.add(until, held)
            self.changed.append(held)
        return [slot >= 0 for slot in slots]

    def delete(self, keys: Sequence[str], generations: Sequence[int], now: float) -> list[bool]:
        """Make live pages go, where generations are given only those of that generation; says which
        went."""
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
        self._quarantine([slot for slot, goes in zip(slots, done, strict=True) if goes], now)
        return done

    def clear(self, now: float) -> int:
        """Make all that is live or leased go; returns the number of pages. Takes no longer for more
        of them.

        A writer is not asked: it may write into its slot until its lease would have ended.
        """
        self.settle(now)
        if self.closed_until:
            # There is nothing in it yet, and a restart is to know that it is closed.
            return 0
        pages = len(self.lru)
        self.in_quarantine += pages + len(self.leases)
        self.epoch += 1
        self.cleared_until = now + self.quarantine_seconds
        before = bytes(self.table.states) if self.leases.held else b""
        self._cleared.append((self.cleared_until, before, self.table.quarantine_all()))
        self.leases.clear()
        self.lru.clear()
        self.prefix_refs.pending = {}
        self._finish_clears(STEP)
        self.settle(now)
        return pages

    def pin(self, pin: int, slots: list[int], until: float) -> None:
        """Give those slots to nobody until then."""
        self.pins.add(pin, slots, until)

    def unpin(self, pin: int, slots: list[int], now: float) -> None:
        """Let a pin on some slots go: those whose quarantine is over are free."""
        self.pins.remove(pin, slots)
        table = self.table
        resting = [slot for slot in slots if table.states[slot] == QUARANTINED]
        if resting:
            # A clear may still have to give them their time.
            self.timers.add(now, resting)
            self.settle(now)

    # Looking.

    def status(self, slot: int, now: float) -> SlotStatus:
        """All about a slot."""
        table = self.table
        state = table.states[slot] if slot < len(table) else FREE
        if self.closed_until and state == FREE:
            return SlotStatus(
                slot=slot,
                state=NAMES[QUARANTINED],
                generation=0,
                seconds_left=max(0.0, self.closed_until - now),
            )
        if slot >= len(table):
            return SlotStatus(slot=slot, state=NAMES[FREE], generation=0)
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
            pins=self.pins.count(slot, now),
        )

    def count(self, asked: int, live: int) -> None:
        """So many keys were asked for, and so many of them were live."""
        self.hits += live
        self.misses += asked - live

    def slot_of(self, key: str) -> int:
        """The live or leased slot of a key, or -1."""
        return self.table.by_key.get(key, NO_SLOT)

    # How slots change their state.

    def _places_of_new(self, keys: Sequence[str]) -> Sequence[int]:
        """Where in a batch the keys are that are neither live nor leased, the first of several; the
        live ones count as used."""
        by_key = self.table.by_key
        if by_key.keys().isdisjoint(keys) and len(set(keys)) == len(keys):
            return range(len(keys))
        self.lru.touch(keys)
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
        """Lease a slot for each key, of which there are enough."""
        if not keys:
            return []
        table, slots, leases = (
            self.table,
            self.free.take(len(keys)),
            range(first_lease, first_lease + len(keys)),
        )
        if isinstance(slots, range):
            first, end, numbers = slots.start, slots.stop, array("Q", leases)
            table.keys[first:end], table.states[first:end] = keys, bytes([LEASED]) * len(slots)
            table.leases[first:end], table.until[first:end] = (
                numbers,
                array("d", [until]) * len(slots),
            )
            if max(table.generations[first:end]) < first_lease:
                table.generations[first:end] = numbers
            else:
                self._count_generations(slots, leases)
        else:
            for slot, key, lease in zip(slots, keys, leases, strict=True):
                table.keys[slot], table.leases[slot], table.until[slot], table.states[slot] = (
                    key,
                    lease,
                    until,
                    LEASED,
                )
            self._count_generations(slots, leases)
        table.by_key.update(zip(keys, slots, strict=True))
        if any(prefixes):
            for slot, prefix in zip(slots, prefixes, strict=True):
                table.prefixes[slot] = self._interned(prefix)
        if owner:
            self.leases.owners.update(dict.fromkeys(slots, owner))
        self.leases.held += len(slots)
        self.leases.log.add(first_lease, slots)
        self.timers.add(until, slots)
        self.changed.append(slots)
        self.leased.append(slots)
        return slots

    def _count_generations(self, slots: Sequence[int], leases: Sequence[int]) -> None:
        """The generation is the lease's number, which no other server has given or will give; but
        for slots that are ahead of it."""
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
        """Live or leased slots go into quarantine. What goes by its time need not be remembered:
        the time tells."""
        if not slots:
            return
        table, until, free = self.table, now + self.quarantine_seconds, list[int]()
        for slot in slots:
            del table.by_key[table.keys[slot]]
            if table.states[slot] == LEASED:
                self.leases.end((slot,))
            else:
                self.lru.remove(slot)
                self.prefix_refs.remove(slot)
            table.keys[slot] = table.prefixes[slot] = ""
            if self.quarantine_seconds <= 0 and not self.is_pinned(slot, now):
                table.states[slot] = FREE
                free.append(slot)
            else:
                table.states[slot], table.until[slot] = QUARANTINED, until
        if free:
            self.free.add(free)
        else:
            self.timers.add(until, slots)
        self.in_quarantine += len(slots) - len(free)
        if remember:
            self.changed.append(slots)

    def _make_room(self, new: int, now: float) -> int:
        """Evict pages, so that so many slots more are free or at least resting; returns how
        many."""
        at_hand = len(self.free) + self.in_quarantine
        wanted = new - at_hand
        if self.geometry.slots >= STEP:
            wanted = max(wanted, min(new, self.geometry.slots // SPARE_SHARE + new - at_hand))
        if wanted <= 0:
            return 0
        # Each goes at once: its prefix may be the next.
        gone = self.lru.victims(
            wanted,
            lambda slot: self.is_pinned(slot, now),
            lambda slot: self._quarantine([slot], now),
        )
        self.evicted += gone
        self.settle(now)
        return gone

    def _interned(self, prefix: str) -> str:
        """The prefix as the object that its own slot holds, if it has one: a million of them take
        no memory then."""
        if not prefix:
            return ""
        slot = self.table.by_key.get(prefix, NO_SLOT)
        return self.table.keys[slot] if slot >= 0 else prefix

    def _finish_clears(self, most: int) -> int:
        """Slots of clears get the end of their quarantine, and what held them is freed bit by
        bit."""
        done, table = 0, self.table
        while self._cleared and done < most:
            until, before, index = self._cleared[0]
            slots = [index.popitem()[1] for _ in range(min(len(index), most - done))]
            later = list[int]()
            for slot in slots:
                table.keys[slot] = table.prefixes[slot] = ""
                table.children[slot] = table.stamps[slot] = 0
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
