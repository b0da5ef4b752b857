"""What every store can do, and which one an address names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from hicache_metadata_server.protocol import Durability

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_metadata_server.service.changes import Changes, Recovered
    from hicache_metadata_server.state.restoring import SlotRow

MEMORY: Final = "memory:"
SQLITE: Final = "sqlite:///"


class StoreError(Exception):
    """The store cannot be opened, read or written."""


class Store(Protocol):
    """Keeps changes. All methods block; no two of them are called at the same time."""

    @property
    def durability(self) -> Durability:
        """What written changes survive."""
        ...

    def recover(self, now: float) -> Recovered:
        """Everything but slots, once at the start; pins and answers that have ended by `now` are dropped."""
        ...

    def rows(self, scope: int) -> Iterable[SlotRow]:
        """The slots of a scope, in ascending order."""
        ...

    def write(self, changes: Changes, now: float) -> None:
        """Keep a group of changes: all of it, or none.

        Raises:
            StoreError: none of it is kept.
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

    def rows(self, scope: int) -> Iterable[SlotRow]:
        return ()

    def write(self, changes: Changes, now: float) -> None:
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
