"""The free slots of a scope."""

from __future__ import annotations

from collections import deque
from itertools import chain
from typing import TYPE_CHECKING

from hicache_metadata_server.core.slot_table import as_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_metadata_server.core.slot_table import SlotTable


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
