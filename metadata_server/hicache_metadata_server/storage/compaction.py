"""Compaction: blocks that the log has changed and the snapshot has not.

A crash loses the list of blocks, and nothing else: the next start makes it again from the log.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.core.changes import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WINDOW_BYTES: Final = 4 << 20
"""Bytes of the log in one window, about 300 batches of 128 pages. A window's groups count as
compacted together, with its last block."""
BATCH_BLOCKS: Final = 16
"""Blocks in one transaction, which takes less than a millisecond."""


class CompactionBatch(NamedTuple):
    """Blocks for one transaction, encoded when they were collected."""

    blocks: list[tuple[int, bytes]]
    """Place and content of each block, by ascending place."""
    last_group: int
    """Last group that is compacted with this batch; 0 if its window has more blocks."""
    log_bytes: int
    """Bytes of these groups in the log."""
    rest: Changes
    """Everything but slots of these groups."""
    scope: int = 0
    """Number of the scope, in a store with a log for each scope."""


@dataclass(slots=True)
class _Window:
    places: list[int] = field(default_factory=list[int])
    """Places of blocks; in descending order once the first of them was taken."""
    last_group: int = 0
    log_bytes: int = 0
    rest: Changes = field(default_factory=Changes)
    begun: bool = False


class DirtyBlocks:
    """Blocks that differ from the snapshot, in windows of the log, the oldest first.

    A block is encoded at its turn, so a block that changes again before is written once.
    """

    def __init__(self) -> None:
        self._windows = deque[_Window]()
        self._queued = set[int]()
        """Places in any window."""

    def __bool__(self) -> bool:
        return bool(self._windows)

    def mark(self, places: Iterable[int], group: int, log_bytes: int, changes: Changes) -> None:
        """Add the blocks that a group has changed, after it was appended to the log."""
        # A begun window takes no more groups: blocks taken from it would lack their changes.
        if (
            not self._windows
            or self._windows[-1].begun
            or self._windows[-1].log_bytes >= WINDOW_BYTES
        ):
            self._windows.append(_Window())
        window = self._windows[-1]
        window.last_group = group
        window.log_bytes += log_bytes
        window.rest.add_all_but_slots(changes)
        for place in places:
            if place not in self._queued:
                self._queued.add(place)
                window.places.append(place)

    def take(self, most: int, read: Callable[[int], bytes]) -> CompactionBatch:
        """Take up to `most` blocks, encoded by `read` from their places."""
        window = self._windows[0]
        if not window.begun:
            # Ascending places are neighbours in the file.
            window.places.sort(reverse=True)
            window.begun = True
        kept = max(len(window.places) - most, 0)
        taken = window.places[kept:]
        taken.reverse()
        blocks = [(place, read(place)) for place in taken]
        del window.places[kept:]
        self._queued.difference_update(taken)
        if kept:
            return CompactionBatch(blocks, 0, 0, Changes())
        self._windows.popleft()
        return CompactionBatch(blocks, window.last_group, window.log_bytes, window.rest)

    def put_back(self, batch: CompactionBatch) -> None:
        """Return a batch that was not written; its blocks are the first again."""
        if batch.last_group:
            self._windows.appendleft(
                _Window([], batch.last_group, batch.log_bytes, batch.rest, begun=True)
            )
        places = [place for place, _ in reversed(batch.blocks)]
        # Also blocks that a later window has again meanwhile: the groups of this window count as
        # compacted before that window's turn.
        self._windows[0].places += places
        self._queued.update(places)
