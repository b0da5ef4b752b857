"""Timers of slots."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


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
