"""The slots of a scope: columns, 81 bytes a used slot, index by key, free slots, timers, leases."""

from __future__ import annotations

import heapq
import itertools
from array import array
from bisect import bisect_right
from collections import deque
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, cast

from hicache_metadata_server.protocol import SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FREE: Final = 0
LEASED: Final = 1
LIVE: Final = 2
QUARANTINED: Final = 3
NAMES: Final = (SlotState.FREE, SlotState.LEASED, SlotState.LIVE, SlotState.QUARANTINED)

CHUNK: Final = 512
"""Runs in one chunk of the lease log."""
RESTORED: Final = 4096
"""Slots that a start adds to the log in one step."""
_AFTER_CLEAR: Final = bytes((FREE, QUARANTINED, QUARANTINED, QUARANTINED)) + bytes(252)
"""State after a clear, by the state before it."""


class SlotTable:
    """One entry a used slot in each column; the length is the number of slots ever used.

    Unused slots take no memory, so a scope may declare far more slots than it will ever use.
    """

    def __init__(self) -> None:
        self.states = bytearray()
        self.generations = array("Q")
        self.leases = array("Q")
        """Number of the last lease; 0 for a slot that was never leased."""
        self.until = array("d")
        """End of the lease or of the quarantine."""
        self.lengths = array("Q")
        self.checksums = array("Q")
        self.children = array("Q")
        """Live pages that name this live page as their prefix; 0 for slots that are not live."""
        self.older = array("q")
        """Live page before this one in the LRU order, see `LruOrder`; stale for other slots."""
        self.newer = array("q")
        """Live page behind it."""
        self.keys = list[str]()
        self.prefixes = list[str]()
        self.by_key = _new_index()
        """Slot of every key that is live or leased."""

    def __len__(self) -> int:
        return len(self.states)

    def grow(self, count: int) -> None:
        """Add free slots at the end."""
        self.states.extend(bytes(count))
        zeros = bytes(8 * count)
        for column in (
            self.generations,
            self.leases,
            self.until,
            self.lengths,
            self.checksums,
            self.children,
            self.older,
            self.newer,
        ):
            column.frombytes(zeros)
        self.keys.extend([""] * count)
        self.prefixes.extend([""] * count)

    def count(self, state: int) -> int:
        """Number of slots in a state; a scan of the column, a millisecond for a million."""
        return self.states.count(state)

    def quarantine_all(self) -> dict[str, int]:
        """Quarantine every live or leased slot; returns the old index by key.

        Takes a millisecond for a million slots. The caller frees the index step by step.
        """
        # In place, because other objects hold this bytearray.
        self.states[:] = self.states.translate(_AFTER_CLEAR)
        index = self.by_key
        self.by_key = _new_index()
        return index


def as_run(slots: Sequence[int]) -> Sequence[int]:
    """Return a list of ascending neighbours as a range, and anything else unchanged.

    A range selects a slice of each column, which is several times as fast as a loop over slots.
    """
    if not isinstance(slots, list) or not slots or slots[-1] - slots[0] != len(slots) - 1:
        return slots
    run = range(slots[0], slots[-1] + 1)
    return run if slots == list(run) else slots


def _new_index() -> dict[str, int]:
    # A dict that has had a key of another type stores the hash of each key. CPython then compares
    # hashes before it reads a key, which with millions of keys is in no CPU cache. That saves a
    # quarter of a lookup's time, and takes 8 bytes a key.
    index: dict[str | None, int] = {None: 0}
    del index[None]
    return cast("dict[str, int]", index)


class FreeSlots:
    """A queue of returned slots, followed by all slots that were never used."""

    def __init__(self, table: SlotTable, slots: int) -> None:
        self._table = table
        self.slots = slots
        self.returned = deque[int]()

    def __len__(self) -> int:
        return len(self.returned) + self.slots - len(self._table)

    def add(self, slots: Iterable[int]) -> None:
        """Return slots."""
        self.returned.extend(slots)

    def take(self, count: int) -> Sequence[int]:
        """Take `count` slots in ascending order, as a range if they are neighbours.

        Raises:
            IndexError: fewer are free.
        """
        returned = self.returned
        # Sorted, because clients read and write neighbours of a slot file with one system call.
        back = sorted(returned.popleft() for _ in range(min(count, len(returned))))
        first, more = len(self._table), count - len(back)
        if more > self.slots - first:
            raise IndexError(f"{more} new slots of {self.slots - first}")
        if more:
            self._table.grow(more)
        new = range(first, first + more)
        return as_run(list(chain(back, new))) if back else new


class Timers:
    """A heap of times with slots.

    No timer is cancelled: a lease that is committed or renewed keeps its old entry. The caller
    compares the slot's own end, which is cheaper than a removal from the heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence[int]]] = []
        # Breaks ties: slots may be a range or a list, which do not compare.
        self._numbers = itertools.count()

    def add(self, when: float, slots: Sequence[int]) -> None:
        """Add a timer for slots. The sequence must not change afterwards."""
        heapq.heappush(self._heap, (when, next(self._numbers), slots))

    def next_time(self) -> float | None:
        """Time of the first timer; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float, most: int) -> list[Sequence[int]]:
        """Take up to `most` due slots; the others stay due."""
        found: list[Sequence[int]] = []
        heap, room = self._heap, most
        while heap and heap[0][0] <= now and room > 0:
            when, _, slots = heapq.heappop(heap)
            found.append(slots[:room])
            if len(slots) > room:
                self.add(when, slots[room:])
            room -= len(found[-1])
        return found


class LeaseLog:
    """Slots by lease, including the leases of live pages.

    Runs of neighbours that were leased together take 24 bytes, as single slots do. A dict would
    take that for each page. Only repeated commits ask for the lease of a live page, so a search is
    fast enough.
    """

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
