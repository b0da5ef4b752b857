"""The interface of a store, its addresses, and what every kind has: the blocks that it has to compact."""

from __future__ import annotations

import asyncio
import re
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.core.changes import Changes
from hicache_metadata_server.core.codec import SlotColumns
from hicache_metadata_server.protocol import StoreDurability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from concurrent.futures import Executor

    from hicache_metadata_server.core.changes import ScopeRecord
    from hicache_metadata_server.core.scope import Scope

MEMORY: Final = "memory:"
SQLITE: Final = "sqlite:///"
SHARED: Final = re.compile(r"(?:redis|valkey)(s?)(?:\+(cluster|sentinel))?|unix")
"""Schemes of shared stores: whether with TLS, and the kind."""
WINDOW_BYTES: Final = 4 << 20
"""Bytes of the log in one window, about 300 batches of 128 pages. A window's groups count as
compacted together, with its last block."""
BATCH_BLOCKS: Final = 16
"""Blocks in one transaction, which takes less than a millisecond."""


def is_shared(url: str) -> bool:
    """Return True for an address of Redis or Valkey."""
    return "://" in url and SHARED.fullmatch(url.partition("://")[0]) is not None


def redacted(url: str) -> str:
    """Return an address without credentials and options, as logs and messages may show it."""
    scheme, mark, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return scheme + mark + ("***@" if login or at else "") + place.partition("?")[0]


def sqlite_file(url: str) -> str:
    """Return the file of a SQLite store; an absolute one makes four slashes.

    Raises:
        ValueError: it is the address of something else.
    """
    file = url.removeprefix(SQLITE)
    if file and file != url:
        return file
    raise ValueError(
        f"{redacted(url)!r} is not the address of a store of one server; {SQLITE}FILE is, and for a "
        f"server {MEMORY} and redis://HOST:PORT/DB"
    )


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

    A block is encoded at its turn, so a block that changes again before is written once. A crash
    loses the list, and nothing else: the next start makes it again from the log.
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


class MetadataStore:
    """A store of changes. This one keeps nothing: a restart forgets all pages.

    All methods but the coroutines block. No two of them run at the same time, except for `sizes`.
    """

    durability: StoreDurability = StoreDurability.NONE
    """Events that written changes survive."""
    is_quick: bool = True
    """True if `write` and `compact` wait neither for a disk nor for the network: they are called in
    the event loop then, and `append` and `replace_blocks` otherwise."""
    _thread: Executor | None = None
    """Runs `write` and `compact` of a store that is not quick."""

    def recover(self, now: float) -> Changes:
        """Read everything but slots, once at the start, without ended answers.

        Raises:
            StoreError: the store cannot be read.
        """
        return Changes()

    def rows(self, record: ScopeRecord) -> SlotColumns:
        """Read the slots of a scope, once after `recover`.

        Raises:
            StoreError: the store cannot be read.
        """
        return SlotColumns(0)

    def write(self, changes: Changes) -> None:
        """Make a group of changes durable: all of it, or none.

        Raises:
            StoreError: none of it is durable.
        """

    def wants_compaction(self, *, idle: bool) -> bool:
        """True if the log is too long, or, in an idle server, not empty."""
        return False

    def collect(self, scope_of: Callable[[int], Scope]) -> CompactionBatch:
        """Collect the next blocks to compact; takes less than a millisecond, as `compact` does.

        Call it only if `wants_compaction`, and only after `take_changes`: the blocks are encoded as
        they are in memory, and must not have changes that will be in no written group.
        """
        raise NotImplementedError("there is nothing to compact")

    def compact(self, batch: CompactionBatch, now: float) -> None:
        """Write collected blocks to the database, after the group that was taken before them.

        Raises:
            StoreError: nothing was written; the blocks will be collected again.
        """

    def put_back(self, batch: CompactionBatch) -> None:
        """Return collected blocks that must not be compacted: their group is not written."""

    async def append(self, changes: Changes) -> None:
        """Do what `write` does."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.write, changes)

    async def replace_blocks(self, batch: CompactionBatch, now: float) -> None:
        """Do what `compact` does."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self.compact, batch, now)

    def sizes(self) -> dict[str, int]:
        """Bytes of files by part. May run beside other methods."""
        return {}

    def close(self) -> None:
        """Close the store and release its lock."""


class MemoryStore(MetadataStore):
    """The store at `memory:`."""
