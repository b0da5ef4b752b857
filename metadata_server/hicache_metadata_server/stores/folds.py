"""Groups from a store's journal on their way into its blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_metadata_server.stores.blocks import Block, shares
from hicache_metadata_server.stores.schema import SCOPE_BITS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_metadata_server.state.written import SlotChanges
    from hicache_metadata_server.stores.blocks import Leases, States

WINDOW_BYTES: Final = 4 << 20
"""Of the journal, folded together: what a slot goes through within some 300 batches of 128 pages reaches its block once."""
PIECE: Final = 16
"""Blocks that are folded in one transaction: less than a millisecond."""


class Folds:
    """Some groups, the oldest of the journal: first they are gathered, then the blocks that they change are written."""

    def __init__(self) -> None:
        self._shares: dict[int, list[tuple[States | Leases, int, int]]] = {}
        """What goes into each block that is not written yet, the oldest first."""
        self._places = list[int]()
        """Of these blocks, in descending order, once all is gathered."""
        self._piece = 0
        self.last = 0
        """The journal's number of the last of the groups."""
        self.journal_bytes = 0
        """What they take there."""

    @property
    def is_gathering(self) -> bool:
        """Whether groups may be added."""
        return not self._places

    def add(self, group: dict[int, SlotChanges], last: int, journal_bytes: int) -> int:
        """Take the next group; returns over how many blocks it is scattered."""
        count = 0
        for scope, changes in group.items():
            first = scope << SCOPE_BITS
            for block, written, start, end in shares(changes):
                self._shares.setdefault(first + block, []).append((written, start, end))
                count += 1
        self.last = last
        self.journal_bytes += journal_bytes
        return count

    def seal(self) -> None:
        """Take no more groups."""
        # Neighbours lie together in the file.
        self._places = sorted(self._shares, reverse=True)

    def piece(self, most: int, read: Callable[[int], Block | None]) -> tuple[list[tuple[int, bytes]], bool]:
        """Some blocks to write now, and whether they are the last. The same again until `done` is called."""
        self._piece = min(most, len(self._places))
        places = self._places[len(self._places) - self._piece :]
        return [(place, self._merged(place, read)) for place in reversed(places)], self._piece == len(self._places)

    def done(self) -> None:
        """The last piece is written."""
        for place in self._places[len(self._places) - self._piece :]:
            del self._shares[place]
        del self._places[len(self._places) - self._piece :]
        if not self._places:
            self.journal_bytes = 0

    def _merged(self, place: int, read: Callable[[int], Block | None]) -> bytes:
        block = read(place) or Block()
        for written, start, end in self._shares[place]:
            written.merge(block, start, end)
        return block.encode()
