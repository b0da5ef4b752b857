"""Slots that anybody may be given."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.state.slots import SlotTable


class FreeSlots:
    """Those that came back, and behind them all that nobody has used yet."""

    __slots__ = ("_table", "returned", "slots")

    def __init__(self, table: SlotTable, slots: int) -> None:
        self._table, self.slots = table, slots
        self.returned = deque[int]()

    def __len__(self) -> int:
        return len(self.returned) + self.slots - len(self._table)

    def add(self, slots: Iterable[int]) -> None:
        """Take slots back."""
        self.returned.extend(slots)

    def take(self, count: int) -> list[int]:
        """Hand out so many, in ascending order: neighbours are read and written with one request.

        Raises:
            IndexError: there are not so many.
        """
        returned = self.returned
        back = min(count, len(returned))
        taken = [returned.popleft() for _ in range(back)]
        if back > 1:
            taken.sort()
        if count > back:
            first = len(self._table)
            if first + count - back > self.slots:
                raise IndexError(f"{count - back} new slots of {self.slots - first}")
            self._table.grow(count - back)
            taken.extend(range(first, first + count - back))
        return taken
