"""Which blocks a store's log has changed, and in which order they are folded."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.core.changes import Changes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

WINDOW_BYTES: Final = 4 << 20
"""Of the log, deleted together once all that they have changed is folded: some 300 batches of 128
pages."""
BATCH_BLOCKS: Final = 16
"""Blocks that are folded in one transaction: less than a millisecond."""


class CompactionBatch(NamedTuple):
    """Some blocks as they were when they were gathered, to be written now."""

    blocks: list[tuple[int, bytes]]
    """By their places, in ascending order."""
    last_group: int
    """What the log has up to this group is folded then; 0 if it needs more."""
    log_bytes: int
    """What these groups take there."""
    rest: Changes
    """What these groups have beside slots."""


@dataclass(slots=True)
class _Window:
    places: list[int] = field(default_factory=list[int])
    """In descending order, once the first of them was taken."""
    last_group: int = 0
    log_bytes: int = 0
    rest: Changes = field(default_factory=Changes)
    begun: bool = False


class DirtyBlocks:
    """Blocks that differ from the file, the oldest first.

    A block is folded as it is by then, so that one that is changed again before its turn is written
    once.
    """

    def __init__(self) -> None:
        self._windows = deque[_Window]()
        self._waiting = set[int]()
        """The places of all windows."""

    def mark(self, places: Iterable[int], group: int, log_bytes: int, changes: Changes) -> None:
        """A group was written to the log, which changes those blocks."""
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
            if place not in self._waiting:
                self._waiting.add(place)
                window.places.append(place)

    def take(self, most: int, read: Callable[[int], bytes]) -> CompactionBatch:
        """The next blocks, as `read` gives them by their places."""
        window = self._windows[0]
        if not window.begun:
            # Neighbours lie together in the file.
            window.places.sort(reverse=True)
            window.begun = True
        kept = max(len(window.places) - most, 0)
        taken = window.places[kept:]
        taken.reverse()
        blocks = [(place, read(place)) for place in taken]
        del window.places[kept:]
        self._waiting.difference_update(taken)
        if kept:
            return CompactionBatch(blocks, 0, 0, Changes())
        self._windows.popleft()
        return CompactionBatch(blocks, window.last_group, window.log_bytes, window.rest)

    def put_back(self, batch: CompactionBatch) -> None:
        """A batch was not written: its blocks are the first again."""
        if batch.last_group:
            self._windows.appendleft(
                _Window([], batch.last_group, batch.log_bytes, batch.rest, begun=True)
            )
        places = [place for place, _ in reversed(batch.blocks)]
        # Also those that have changed again meanwhile, and are in a later window: this one's groups
        # need them before.
        self._windows[0].places += places
        self._waiting.update(places)
