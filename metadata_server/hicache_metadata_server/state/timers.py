"""When to look again at which slots."""

from __future__ import annotations

import heapq
import itertools


class Timers:
    """A heap of times with slots. Nothing is ever taken out before its time: who looks at a slot sees whether it is still meant."""

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap = list[tuple[float, int, list[int]]]()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, slots: list[int]) -> None:
        """Remember slots, which are this object's from now on."""
        heapq.heappush(self._heap, (when, next(self._numbers), slots))

    def next_time(self) -> float | None:
        """When the first of them are due."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float, most: int) -> list[int]:
        """Slots whose time has come, at most so many; the others stay due."""
        found, heap = list[int](), self._heap
        while heap and heap[0][0] <= now and len(found) < most:
            when, _, slots = heapq.heappop(heap)
            room = most - len(found)
            found.extend(slots[:room])
            if len(slots) > room:
                self.add(when, slots[room:])
        return found
