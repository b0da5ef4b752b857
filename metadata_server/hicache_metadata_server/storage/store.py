"""What every store can do, and which one an address names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_metadata_server.protocol import StoreDurability

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hicache_metadata_server.core.changes import Changes, Recovered
    from hicache_metadata_server.core.restore import SlotRows
    from hicache_metadata_server.core.scope import Scope
    from hicache_metadata_server.storage.compaction import CompactionBatch


class StoreError(Exception):
    """The store cannot be opened, read or written."""


class MetadataStore(Protocol):
    """Keeps changes. All methods block; no two of them are called at the same time, but for
    `checkpoint`."""

    @property
    def durability(self) -> StoreDurability:
        """What written changes survive."""
        ...

    def recover(self, now: float) -> Recovered:
        """Everything but slots, once at the start; pins and answers that have ended by `now` are
        dropped."""
        ...

    def rows(self, scope: int) -> Iterable[SlotRows]:
        """The slots of a scope, in ascending order, some at a time."""
        ...

    def write(self, changes: Changes) -> None:
        """Keep a group of changes: all of it, or none.

        Raises:
            StoreError: none of it is kept.
        """
        ...

    @property
    def is_quick(self) -> bool:
        """Whether `write` and `fold` wait for nothing but memory."""
        ...

    def wants_compaction(self, *, idle: bool) -> bool:
        """Whether there is something to fold that cannot wait, or, if nobody writes just now,
        anything."""
        ...

    def collect(self, scope_of: Callable[[int], Scope]) -> CompactionBatch:
        """What is to be folded next, of scopes by their numbers: less than a millisecond of work,
        here and in `fold`.

        To be called where `wants_compaction`, and where everything that has changed was taken to be
        written.
        """
        ...

    def compact(self, batch: CompactionBatch, now: float) -> None:
        """Write what was gathered, after all that had been taken to be written by then.

        Raises:
            StoreError: it could not be done; nothing that was written is lost, and it will be
            gathered again.
        """
        ...

    def put_back(self, batch: CompactionBatch) -> None:
        """What was gathered cannot be folded."""
        ...

    def wants_checkpoint(self, *, idle: bool) -> bool:
        """Whether it is time for `checkpoint`; `idle` is as in `wants_tidying`."""
        ...

    def checkpoint(self) -> None:
        """Move what was written to where it belongs; the only method that may be called while
        another one runs.

        Raises:
            StoreError: it could not be done; nothing that was written is lost.
        """
        ...

    def sizes(self) -> dict[str, int]:
        """Bytes of its files, by part; may be called while another method runs."""
        ...

    def close(self) -> None:
        """Let go of the store."""
        ...


class MemoryStore:
    """Keeps nothing."""

    durability = StoreDurability.NONE

    def recover(self, now: float) -> Recovered:
        from hicache_metadata_server.core.changes import Recovered

        return Recovered()

    def rows(self, scope: int) -> Iterable[SlotRows]:
        return ()

    def write(self, changes: Changes) -> None:
        pass

    @property
    def is_quick(self) -> bool:
        return True

    def wants_compaction(self, *, idle: bool) -> bool:
        return False

    def collect(self, scope_of: Callable[[int], Scope]) -> CompactionBatch:
        raise NotImplementedError("there is nothing to fold")

    def compact(self, batch: CompactionBatch, now: float) -> None:
        pass

    def put_back(self, batch: CompactionBatch) -> None:
        pass

    def wants_checkpoint(self, *, idle: bool) -> bool:
        return False

    def checkpoint(self) -> None:
        pass

    def sizes(self) -> dict[str, int]:
        return {}

    def close(self) -> None:
        pass
