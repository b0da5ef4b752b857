"""The slots of a scope: columns, 73 bytes a used slot, index by key, free slots, and timers."""

from __future__ import annotations

import heapq
import itertools
from array import array
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Final, cast

from hicache_metadata_server.protocol import SlotState

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

FREE: Final = 0
LEASED: Final = 1
LIVE: Final = 2
QUARANTINED: Final = 3
NAMES: Final = (SlotState.FREE, SlotState.LEASED, SlotState.LIVE, SlotState.QUARANTINED)

_AFTER_CLEAR: Final = bytes((FREE, QUARANTINED, QUARANTINED, QUARANTINED)) + bytes(252)
"""State after a clear, by the state before it."""


class SlotTable:
    """One entry a used slot in each column; the length is the number of slots ever used.

    Unused slots take no memory, so a scope may declare far more slots than it will ever use.
    """

    __slots__ = (
        "by_key",
        "checksums",
        "children",
        "generations",
        "keys",
        "leases",
        "lengths",
        "prefixes",
        "stamps",
        "states",
        "until",
    )

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
        self.stamps = array("Q")
        """Position of a live page in the LRU order; else 0, or stale until a clear is finished."""
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
            self.stamps,
        ):
            column.frombytes(zeros)
        self.keys.extend([""] * count)
        self.prefixes.extend([""] * count)

    def count(self, state: int) -> int:
        """Number of slots in a state; a scan of the column, a millisecond for a million."""
        return self.states.count(state)

    def have_length(self, slots: Sequence[int], length: int) -> list[bool]:
        """Return for each slot whether its live page has a length, in bytes; False for -1."""
        lengths = self.lengths
        # Mostly all have, and two arrays are compared without a Python object for each item.
        if isinstance(slots, range):
            count = len(slots)
            if lengths[slots.start : slots.stop] == array("Q", [length]) * count:
                return [True] * count
        return [slot >= 0 and lengths[slot] == length for slot in slots]

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

    __slots__ = ("_table", "returned", "slots")

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
        new = self._grow(count - len(back))
        return as_run(list(chain(back, new))) if back else new

    def _grow(self, count: int) -> range:
        first = len(self._table)
        if count > self.slots - first:
            raise IndexError(f"{count} new slots of {self.slots - first}")
        if count:
            self._table.grow(count)
        return range(first, first + count)


class Timers:
    """A heap of times with slots.

    No timer is cancelled: a lease that is committed or renewed keeps its old entry. The caller
    compares the slot's own end, which is cheaper than a removal from the heap.
    """

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence[int]]] = []
        # Breaks ties: slots may be a range or a list, which do not compare.
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

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
