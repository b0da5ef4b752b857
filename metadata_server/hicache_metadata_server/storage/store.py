"""The interface of a store, and the store without durability."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hicache_metadata_server.core.changes import Changes
from hicache_metadata_server.core.codec import SlotColumns
from hicache_metadata_server.protocol import StoreDurability

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Executor

    from hicache_metadata_server.core.changes import ScopeRecord
    from hicache_metadata_server.core.scope import Scope
    from hicache_metadata_server.storage.compaction import CompactionBatch


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
        """Read everything but slots, once at the start, without ended pins and answers.

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

        Args:
            scope_of: returns a scope by its number.
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
