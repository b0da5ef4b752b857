"""What every store can do, and which one an address names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from hicache_metadata_server.protocol import Durability

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.service.changes import Changes, Recovered
    from hicache_metadata_server.state.restoring import SlotRows

MEMORY: Final = "memory:"
SQLITE: Final = "sqlite:///"


class StoreError(Exception):
    """The store cannot be opened, read or written."""


class Store(Protocol):
    """Keeps changes. All methods block; no two of them are called at the same time, but for `checkpoint`."""

    @property
    def durability(self) -> Durability:
        """What written changes survive."""
        ...

    def recover(self, now: float) -> Recovered:
        """Everything but slots, once at the start; pins and answers that have ended by `now` are dropped."""
        ...

    def rows(self, scope: int) -> Iterable[SlotRows]:
        """The slots of a scope, in ascending order, some at a time."""
        ...

    def write(self, changes: Changes, now: float) -> None:
        """Keep a group of changes: all of it, or none.

        Raises:
            StoreError: none of it is kept.
        """
        ...

    @property
    def is_quick(self) -> bool:
        """Whether `write` and `tidy` wait for nothing but memory."""
        ...

    def wants_tidying(self, *, idle: bool) -> bool:
        """Whether `tidy` has something to do that cannot wait, or, if nobody writes just now, anything."""
        ...

    def tidy(self) -> None:
        """Do less than a millisecond of what was put off.

        Raises:
            StoreError: it could not be done; nothing that was written is lost.
        """
        ...

    def wants_checkpoint(self, *, idle: bool) -> bool:
        """Whether it is time for `checkpoint`; `idle` is as in `wants_tidying`."""
        ...

    def checkpoint(self) -> None:
        """Move what was written to where it belongs; the only method that may be called while another one runs.

        Raises:
            StoreError: it could not be done; nothing that was written is lost.
        """
        ...

    def close(self) -> None:
        """Let go of the store."""
        ...


class MemoryStore:
    """Keeps nothing."""

    durability = Durability.NONE

    def recover(self, now: float) -> Recovered:
        from hicache_metadata_server.service.changes import Recovered

        return Recovered()

    def rows(self, scope: int) -> Iterable[SlotRows]:
        return ()

    def write(self, changes: Changes, now: float) -> None:
        pass

    @property
    def is_quick(self) -> bool:
        return True

    def wants_tidying(self, *, idle: bool) -> bool:
        return False

    def tidy(self) -> None:
        pass

    def wants_checkpoint(self, *, idle: bool) -> bool:
        return False

    def checkpoint(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_store(url: str, durability: Durability = Durability.PROCESS) -> Store:
    """The store at `memory:` or `sqlite:///FILE`; an absolute FILE makes four slashes.

    Raises:
        ValueError: the address names no store.
        StoreError: it cannot be opened, or another server has it.
    """
    if url == MEMORY:
        return MemoryStore()
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        if durability is Durability.NONE:
            raise ValueError("a store of durability 'none' is memory:")
        from hicache_metadata_server.stores.sqlite import SqliteStore

        return SqliteStore(url.removeprefix(SQLITE), durability)
    raise ValueError(f"{url!r} names no store; {MEMORY} and {SQLITE}FILE do")
