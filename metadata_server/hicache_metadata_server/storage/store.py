"""The interface of a store, and the store without durability."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_metadata_server.core.changes import Recovered
from hicache_metadata_server.protocol import StoreDurability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicache_metadata_server.core.blocks import SlotBlock
    from hicache_metadata_server.core.changes import Changes
    from hicache_metadata_server.core.scope import Scope
    from hicache_metadata_server.storage.compaction import CompactionBatch


class StoreWriter(Protocol):
    """Writes to a store from the event loop. No two of its coroutines run at the same time."""

    async def append(self, changes: Changes) -> None:
        """Do what `MetadataStore.write` does."""
        ...

    async def replace_blocks(self, batch: CompactionBatch, now: float) -> None:
        """Do what `MetadataStore.compact` does."""
        ...


class MetadataStore(Protocol):
    """A durable store of changes.

    All methods block. No two of them run at the same time, except for `sizes`.
    """

    @property
    def durability(self) -> StoreDurability:
        """Events that written changes survive."""
        ...

    def recover(self, now: float) -> Recovered:
        """Read everything but slots, once at the start, without ended pins and answers.

        Raises:
            StoreError: the store cannot be read, or the log cannot be replayed.
        """
        ...

    def rows(self, scope: int) -> Iterable[tuple[int, SlotBlock]]:
        """Read the blocks of a scope and their numbers, in ascending order, some at a time."""
        ...

    def write(self, changes: Changes) -> None:
        """Make a group of changes durable: all of it, or none.

        Raises:
            StoreError: none of it is durable.
        """
        ...

    @property
    def is_quick(self) -> bool:
        """True if `write` and `compact` do not wait for a disk."""
        ...

    @property
    def writer(self) -> StoreWriter | None:
        """Writer in the event loop, for a store that waits for the network; it is used in the place
        of `write` and `compact`."""
        ...

    def wants_compaction(self, *, idle: bool) -> bool:
        """True if the log is too long, or, in an idle server, not empty."""
        ...

    def collect(self, scope_of: Callable[[int], Scope]) -> CompactionBatch:
        """Collect the next blocks to compact; takes less than a millisecond, as `compact` does.

        Call it only if `wants_compaction`, and only after `take_changes`: the blocks are encoded as
        they are in memory, and must not have changes that will be in no written group.

        Args:
            scope_of: returns a scope by its number.
        """
        ...

    def compact(self, batch: CompactionBatch, now: float) -> None:
        """Write collected blocks to the database, after the group that was taken before them.

        Raises:
            StoreError: nothing was written; the blocks will be collected again.
        """
        ...

    def put_back(self, batch: CompactionBatch) -> None:
        """Return collected blocks that must not be compacted: their group is not written."""
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of files by part. May run beside other methods."""
        ...

    def close(self) -> None:
        """Close the store and release its lock."""
        ...


class MemoryStore:
    """A store without durability: a restart forgets all pages."""

    durability = StoreDurability.NONE

    @property
    def writer(self) -> StoreWriter | None:
        """None: written from a thread."""
        return None

    def recover(self, now: float) -> Recovered:
        return Recovered()

    def rows(self, scope: int) -> Iterable[tuple[int, SlotBlock]]:
        return ()

    def write(self, changes: Changes) -> None:
        pass

    @property
    def is_quick(self) -> bool:
        return True

    def wants_compaction(self, *, idle: bool) -> bool:
        return False

    def collect(self, scope_of: Callable[[int], Scope]) -> CompactionBatch:
        raise NotImplementedError("there is nothing to compact")

    def compact(self, batch: CompactionBatch, now: float) -> None:
        pass

    def put_back(self, batch: CompactionBatch) -> None:
        pass

    def sizes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass
