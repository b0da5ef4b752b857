"""Stores by their addresses: `memory:` and `sqlite:///FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.storage.sqlite import SqliteStore, check_database
from hicache_metadata_server.storage.store import MemoryStore

if TYPE_CHECKING:
    from hicache_metadata_server.storage.store import MetadataStore

MEMORY: Final = "memory:"
SQLITE: Final = "sqlite:///"


def open_store(url: str, durability: StoreDurability = StoreDurability.PROCESS) -> MetadataStore:
    """The store at `memory:` or `sqlite:///FILE`; an absolute FILE makes four slashes.

    Raises:
        ValueError: the address is not the address of a store.
        StoreError: it cannot be opened, or another server has it.
    """
    if url == MEMORY:
        return MemoryStore()
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        if durability is StoreDurability.NONE:
            raise ValueError("a store of durability 'none' is memory:")
        return SqliteStore(url.removeprefix(SQLITE), durability)
    if url.startswith(("redis", "valkey", "unix:")):
        raise ValueError(
            f"{url!r} is a store that servers share: no server has it as its own, and it is not "
            f"opened as one"
        )
    raise ValueError(_no_address(url))


def check_store(url: str) -> None:
    """See that a server could open the store at `memory:` or `sqlite:///FILE`; nothing is written.

    Raises:
        ValueError: it is not the address of a store.
        StoreError: it could not be opened.
    """
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        check_database(url.removeprefix(SQLITE))
    elif url != MEMORY:
        raise ValueError(_no_address(url))


def _no_address(url: str) -> str:
    return f"{url!r} is not the address of a store; {MEMORY}, {SQLITE}FILE and redis://HOST:PORT/DB are"
