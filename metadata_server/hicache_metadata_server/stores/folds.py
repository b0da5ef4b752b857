"""Groups from a store's journal on their way into its table of slots."""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.stores.schema import SCOPE_BITS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.state.restoring import SlotColumns

PIECE: Final = 512
"""Slots that are folded in one transaction: about half a millisecond."""
_SIGN: Final = 1 << 63


class Folds:
    """Some groups, the oldest of the journal, in which what a later one says of a slot counts."""

    def __init__(self) -> None:
        self._rows = list[tuple[object, ...]]()
        """What is left of them, the last first."""
        self._piece = 0
        self.last = 0
        """The journal's number of the last of them."""
        self.journal_bytes = 0
        """What they take there."""

    def __bool__(self) -> bool:
        return bool(self._rows)

    def begin(self, groups: Iterable[dict[int, SlotColumns]], last: int, journal_bytes: int) -> None:
        """Take the next groups; the ones before are done."""
        latest: dict[int, tuple[object, ...]] = {}
        for group in groups:
            for scope, columns in group.items():
                latest.update(_rows(scope, columns))
        # Neighbours lie together in the file.
        self._rows = [latest[place] for place in sorted(latest, reverse=True)]
        self.last, self.journal_bytes = last, journal_bytes

    def piece(self) -> tuple[list[tuple[object, ...]], bool]:
        """Rows to fold now, and whether they are the last of their groups. The same again until `done` is called."""
        self._piece = min(PIECE, len(self._rows))
        return self._rows[len(self._rows) - self._piece :], self._piece == len(self._rows)

    def done(self) -> None:
        """The last piece is in the table."""
        del self._rows[len(self._rows) - self._piece :]


def _rows(scope: int, columns: SlotColumns) -> zip[tuple[int, tuple[object, ...]]]:
    first = scope << SCOPE_BITS
    epoch, slots, *others, checksums = columns
    places = [first + slot for slot in slots]
    signed = [checksum if checksum < _SIGN else checksum - 2 * _SIGN for checksum in checksums]
    return zip(places, zip(places, repeat(epoch), *others, signed, strict=False), strict=True)
