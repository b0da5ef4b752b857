"""What holds slots, leases and pins: those that are held, a log that finds the slot of a lease, their
numbers and their clock."""

from __future__ import annotations

import heapq
import time
from array import array
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.slot_table import LEASED, as_run

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from hicache_metadata_server.core.slot_table import SlotTable

CHUNK: Final = 512
"""Runs in one chunk of the lease log."""
RESTORED: Final = 4096
"""Slots that a start adds to the log in one step."""
AHEAD: Final = 1 << 20
"""Ids between the last one and the durable ceiling."""


class LeaseLog:
    """Slots by lease, including the leases of live pages.

    Runs of neighbours that were leased together take 24 bytes, as single slots do. A dict would
    take that for each page. Only repeated commits ask for the lease of a live page, so a search is
    fast enough.
    """

    __slots__ = ("_begins", "_chunks", "_cursor", "_entries", "_table")

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._chunks: list[_Runs] = []
        self._begins: list[int] = []
        """First lease of each chunk."""
        self._cursor = 0
        """Index of the chunk that is cleaned next."""
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    def add(self, first: int, slots: Sequence[int]) -> None:
        """Add slots leased under consecutive numbers, greater than all before."""
        if isinstance(slots, range):
            self._add((first,), (slots.start,), (len(slots),))
            return
        begins = [0, *(i for i, (one, other) in enumerate(pairwise(slots), 1) if other != one + 1)]
        counts = [end - begin for begin, end in zip(begins, [*begins[1:], len(slots)], strict=True)]
        self._add([first + begin for begin in begins], [slots[begin] for begin in begins], counts)

    def restore(self, leases: Sequence[int], slots: Sequence[int]) -> None:
        """Fill an empty log, in ascending order of leases."""
        for start in range(0, len(slots), RESTORED):
            part, numbers = slots[start : start + RESTORED], leases[start : start + RESTORED]
            pairs = zip(pairwise(part), pairwise(numbers), strict=True)
            begins = [
                0,
                *(i for i, ((a, b), (c, d)) in enumerate(pairs, 1) if b != a + 1 or d != c + 1),
            ]
            counts = [
                end - begin for begin, end in zip(begins, [*begins[1:], len(part)], strict=True)
            ]
            self._add(
                [numbers[begin] for begin in begins], [part[begin] for begin in begins], counts
            )

    def slot(self, lease: int) -> int:
        """Slot of a lease, or -1 if the slot has had another lease since."""
        chunk, place = self._find(lease)
        if place < 0 or lease >= chunk.leases[place] + chunk.counts[place]:
            return -1
        slot = chunk.slots[place] + lease - chunk.leases[place]
        return slot if self._table.leases[slot] == lease else -1

    def slots(self, leases: range) -> Sequence[int] | None:
        """Slots of consecutive leases, if all were added together and are still current; else
        None."""
        chunk, place = self._find(leases.start)
        current, slots = self._table.leases, list[int]()
        if place < 0:
            return None
        first, slot = chunk.leases[place], chunk.slots[place] + leases.start - chunk.leases[place]
        if leases.stop <= first + chunk.counts[place]:
            run = range(slot, slot + len(leases))
            # One comparison of slices for a batch, which is the usual commit.
            return run if current[run.start : run.stop] == array("Q", leases) else None
        for begin, slot, count in zip(
            chunk.leases[place:], chunk.slots[place:], chunk.counts[place:], strict=True
        ):
            if begin >= leases.stop:
                break
            slots += range(slot, slot + count)
        slots = slots[leases.start - first :][: len(leases)]
        return slots if [current[slot] for slot in slots] == list(leases) else None

    def _find(self, lease: int) -> tuple[_Runs, int]:
        """Find the last run that begins at or before a lease: its chunk and index, or -1."""
        at = bisect_right(self._begins, lease) - 1
        if at < 0:
            return _Runs(), -1
        # `_begins` is kept when cleaning removes the first runs of a chunk, so the index may be -1.
        return self._chunks[at], bisect_right(self._chunks[at].leases, lease) - 1

    def _add(self, leases: Sequence[int], slots: Sequence[int], counts: Sequence[int]) -> None:
        if not self._chunks or len(self._chunks[-1]) >= CHUNK:
            self._chunks.append(_Runs())
            self._begins.append(leases[0])
            # At most one run a slot is current. Each full chunk pays for cleaning two, so the log
            # stays bounded and no call takes long.
            if self._entries > 2 * len(self._table) + CHUNK:
                self._clean_chunk()
                self._clean_chunk()
        self._entries += len(leases)
        self._chunks[-1].extend(leases, slots, counts)

    def _clean_chunk(self) -> None:
        """Remove outdated runs of the next chunk, and merge it into the one before if both are
        small."""
        if self._cursor >= len(self._chunks) - 1:
            self._cursor = 0
        at = self._cursor
        if at >= len(self._chunks) - 1:
            return
        old, kept = self._chunks[at], self._chunks[at].current(self._table)
        self._entries -= len(old) - len(kept)
        if at and len(self._chunks[at - 1]) + len(kept) <= CHUNK:
            self._chunks[at - 1].extend(kept.leases, kept.slots, kept.counts)
            del self._chunks[at], self._begins[at]
        else:
            self._chunks[at] = kept
            self._cursor += 1


class _Runs:
    """Runs of neighbours leased together: first lease, first slot and count of each."""

    __slots__ = ("counts", "leases", "slots")

    def __init__(self) -> None:
        self.leases = array("Q")
        self.slots = array("Q")
        self.counts = array("Q")

    def __len__(self) -> int:
        return len(self.leases)

    def extend(self, leases: Iterable[int], slots: Iterable[int], counts: Iterable[int]) -> None:
        self.leases.extend(leases)
        self.slots.extend(slots)
        self.counts.extend(counts)

    def current(self, table: SlotTable) -> _Runs:
        """Runs with at least one current slot."""
        kept = _Runs()
        for lease, slot, count in zip(self.leases, self.slots, self.counts, strict=True):
            # A later lease of a slot is greater than all leases of the run.
            if min(table.leases[slot : slot + count]) < lease + count:
                kept.extend((lease,), (slot,), (count,))
        return kept


class HeldLeases:
    """Leases of slots in the state LEASED."""

    __slots__ = ("_table", "held", "log", "owners")

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self.held = 0
        """Number of held leases."""
        self.owners: dict[int, str] = {}
        """Names of owners by slot; owners without a name are left out."""
        self.log = LeaseLog(table)

    def __len__(self) -> int:
        return self.held

    def slot(self, lease: int) -> int:
        """Slot held by a lease, or -1."""
        slot = self.log.slot(lease)
        return slot if slot >= 0 and self._table.states[slot] == LEASED else -1

    def slots(self, leases: Sequence[int]) -> Sequence[int]:
        """Slots held by leases, -1 where a lease is not held."""
        numbers = as_run(leases)
        states, slots = (
            self._table.states,
            self.log.slots(numbers) if isinstance(numbers, range) else None,
        )
        if isinstance(slots, range) and states.count(LEASED, slots.start, slots.stop) == len(slots):
            return slots
        if slots is not None:
            return [slot if states[slot] == LEASED else -1 for slot in slots]
        return [self.slot(lease) for lease in leases]

    def are_held(self, slots: Sequence[int], keys: list[str]) -> bool:
        """True if each slot is leased for the key beside it, and none occurs twice."""
        table, run = self._table, as_run(slots)
        if isinstance(run, range):
            states = table.states[run.start : run.stop]
            return states.count(LEASED) == len(keys) and table.keys[run.start : run.stop] == keys
        used = len(table)
        return len(set(slots)) == len(slots) and all(
            slot < used and table.states[slot] == LEASED and table.keys[slot] == key
            for slot, key in zip(slots, keys, strict=True)
        )

    def end(self, slots: Sequence[int]) -> None:
        """Remove the leases of slots."""
        self.held -= len(slots)
        for slot in slots if self.owners else ():
            self.owners.pop(slot, None)

    def clear(self) -> None:
        """Remove all leases. The log keeps them: their slots are no longer LEASED."""
        self.held = 0
        self.owners = {}


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A pin and its slots."""

    pin: int
    until: float
    slots: dict[int, list[int]]
    """By the number of their scope."""

    def without(self, scopes: Container[int]) -> PinRecord | None:
        """The pin on other scopes than these; None if there are none."""
        slots = {number: some for number, some in self.slots.items() if number not in scopes}
        return PinRecord(self.pin, self.until, slots) if slots else None


class SlotPins:
    """Pins on the slots of one scope: the end of each pin, by slot."""

    __slots__ = ("by_slot",)

    def __init__(self) -> None:
        self.by_slot: dict[int, dict[int, float]] = {}

    def add(self, pin: int, slots: list[int], until: float) -> None:
        """Add a pin on slots."""
        for slot in slots:
            self.by_slot.setdefault(slot, {})[pin] = until

    def remove(self, pin: int, slots: list[int]) -> None:
        """Remove a pin from slots."""
        for slot in slots:
            pins = self.by_slot.get(slot)
            if pins is not None:
                pins.pop(pin, None)
                if not pins:
                    del self.by_slot[slot]

    def count(self, slot: int, now: float) -> int:
        """Number of pins on a slot that have not ended."""
        pins = self.by_slot.get(slot)
        return sum(until > now for until in pins.values()) if pins else 0


class PinTable:
    """Pins of all scopes by number, and the changes that are not durable yet."""

    def __init__(self) -> None:
        self._pins: dict[int, PinRecord] = {}
        self._ends: list[tuple[float, int]] = []
        self.added: dict[int, PinRecord] = {}
        self.removed: list[int] = []

    def __len__(self) -> int:
        return len(self._pins)

    def add(self, record: PinRecord, *, remember: bool = True) -> None:
        """Add a pin, or slots of further scopes to it; `remember` if it is not durable yet."""
        if (known := self._pins.get(record.pin)) is not None:
            record = PinRecord(record.pin, record.until, known.slots | record.slots)
        self._pins[record.pin] = record
        heapq.heappush(self._ends, (record.until, record.pin))
        if remember:
            self.added[record.pin] = record

    def release(self, scope: int) -> None:
        """Drop what is not durable yet of a scope that another server will own."""
        self.added = {
            pin: record
            for pin, one in self.added.items()
            if (record := one.without({scope})) is not None
        }

    def find(self, pins: Iterable[int]) -> list[PinRecord]:
        """Find the pins that exist."""
        return [self._pins[pin] for pin in dict.fromkeys(pins) if pin in self._pins]

    def remove(self, pins: Iterable[int]) -> list[PinRecord]:
        """Remove pins; unknown ones are no error."""
        found = [self._pins.pop(pin) for pin in dict.fromkeys(pins) if pin in self._pins]
        for record in found:
            # A pin that the store never got needs no removal there.
            if self.added.pop(record.pin, None) is None:
                self.removed.append(record.pin)
        return found

    def ended(self, now: float) -> list[PinRecord]:
        """Remove and return the pins that have ended."""
        pins = list[int]()
        while self._ends and self._ends[0][0] <= now:
            pins.append(heapq.heappop(self._ends)[1])
        return self.remove(pins) if pins else []


def first_number() -> int:
    """First id of a server that starts: the microseconds since 1970, as in the Redis scripts.

    No server allocates a million ids a second for long, so all ids of an earlier server are
    smaller, even if its store is lost. They stay below 2^53, up to which numbers of JSON and Lua
    are exact, until the year 2255.
    """
    return time.time_ns() // 1000


class IdAllocator:
    """A counter that starts at the time of the start, or at the durable ceiling if that is later.

    Only the ceiling is durable. A restart continues behind it, which skips up to a million ids and
    saves one write for each of them.
    """

    __slots__ = ("_next", "ceiling")

    def __init__(self, kept: int = 1) -> None:
        self._next = max(kept, first_number())
        self.ceiling = self._next
        """No id from here on was ever given, as far as the store can know."""

    def skip_to(self, ceiling: int) -> None:
        """Allocate no id below the ceiling of another server."""
        self._next = max(self._next, ceiling)
        self.ceiling = max(self.ceiling, ceiling)

    def take(self, count: int) -> int:
        """Allocate `count` consecutive ids and return the first."""
        first = self._next
        self._next += count
        # The service writes the ceiling with the changes that use these ids, so no response names
        # an id above the durable ceiling.
        if self._next > self.ceiling:
            self.ceiling = self._next + AHEAD
        return first


class SteadyClock:
    """Wall-clock time at the start, advanced by the monotonic clock.

    Times are seconds since 1970, so they can be compared after a restart. A step of the machine's
    clock ends no lease early.
    """

    def __init__(self) -> None:
        self._begin = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._begin + time.monotonic()
