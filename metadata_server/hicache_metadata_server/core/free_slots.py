"""Slots that anybody may be given."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from hicache_metadata_server.core.slot_table import as_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_metadata_server.core.slot_table import SlotTable


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

    def take(self, count: int) -> Sequence[int]:
        """Hand out so many, in ascending order, as a range if they are neighbours: those are read
        and written with one request.

        Raises:
            IndexError: there are not so many.
        """
        returned = self.returned
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
