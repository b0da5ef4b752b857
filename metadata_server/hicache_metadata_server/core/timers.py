"""When to look again at which slots."""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class Timers:
    """A heap of times with slots. Nothing is ever taken out before its time: who looks at a slot
    sees whether it is still meant."""

    __slots__ = ("_heap", "_numbers")

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence[int]]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, slots: Sequence[int]) -> None:
        """Remember slots, which are this object's from now on."""
        heapq.heappush(self._heap, (when, next(self._numbers), slots))

    def next_time(self) -> float | None:
        """When the first of them are due."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: float, most: int) -> list[Sequence[int]]:
        """Slots whose time has come, at most so many of them; the others stay due."""
        found: list[Sequence[int]] = []
        heap, room = self._heap, most
        while heap and heap[0][0] <= now and room > 0:
            when, _, slots = heapq.heappop(heap)
            found.append(slots[:room])
            if len(slots) > room:
                self.add(when, slots[room:])
            room -= len(found[-1])
        return found
