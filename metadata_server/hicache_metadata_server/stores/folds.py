"""What stands in a store's journal and not yet in its table of slots."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.stores.schema import SCOPE_BITS

if TYPE_CHECKING:
    from hicache_metadata_server.state.restoring import SlotColumns

PIECE: Final = 1024
"""Slots that are folded in one transaction: some milliseconds."""
_SIGN: Final = 1 << 63


class Folds:
    """Groups of slots in the order in which they were written; what a later one says of a slot counts."""

    def __init__(self) -> None:
        self._groups: list[dict[int, SlotColumns]] = []
        self._rows: list[tuple[object, ...]] = []
        """Being folded, the last first."""
        self._folding = False
        self._piece = 0
        self._number = 0
        self.last = 0
        """The journal's number of the last group that is being folded."""
        self.waiting = 0
        """Slots, those that occur several times counted as often."""

    def next_number(self) -> int:
        """For the group that is about to be written."""
        return self._number + 1

    def add(self, slots: dict[int, SlotColumns]) -> None:
        """A group was written, under the next number."""
        self.restore(self._number + 1, slots)

    def restore(self, number: int, slots: dict[int, SlotColumns]) -> None:
        """A group stands in the journal."""
        self._number = number
        self._groups.append(slots)
        self.waiting += sum(len(columns.slots) for columns in slots.values())

    def piece(self) -> tuple[list[tuple[object, ...]], bool]:
        """Rows to fold now, and whether they are the last of their groups. The same again until `done` is called."""
        if not self._folding:
            if not self._groups:
                return [], False
            self._begin()
        self._piece = min(PIECE, len(self._rows))
        return self._rows[len(self._rows) - self._piece :], self._piece == len(self._rows)

    def done(self) -> None:
        """The last piece is in the table."""
        del self._rows[len(self._rows) - self._piece :]
        if not self._rows:
            self._folding = False
            self.waiting = sum(len(columns.slots) for group in self._groups for columns in group.values())

    def _begin(self) -> None:
        latest: dict[int, tuple[object, ...]] = {}
        for group in self._groups:
            for scope, columns in group.items():
                latest.update(_rows(scope, columns))
        # Neighbours lie together in the file.
        self._rows = [latest[place] for place in sorted(latest, reverse=True)]
        self._groups, self._folding, self.last = [], True, self._number


def _rows(scope: int, columns: SlotColumns) -> zip[tuple[int, tuple[object, ...]]]:
    first = scope << SCOPE_BITS
    epoch, slots, *others, checksums = columns
    places = [first + slot for slot in slots]
    signed = [checksum if checksum < _SIGN else checksum - 2 * _SIGN for checksum in checksums]
    return zip(places, zip(places, repeat(epoch), *others, signed, strict=False), strict=True)
