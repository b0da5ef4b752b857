"""Stores by their addresses: `memory:` and `sqlite:///FILE`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.storage.address import redacted
from hicache_metadata_server.storage.sqlite import SqliteStore, check_database
from hicache_metadata_server.storage.store import MemoryStore

if TYPE_CHECKING:
    from hicache_metadata_server.storage.store import MetadataStore

MEMORY: Final = "memory:"
SQLITE: Final = "sqlite:///"


def sqlite_file(url: str) -> str:
    """Return the file of a SQLite store.

    Raises:
        ValueError: it is the address of something else.
    """
    file = url.removeprefix(SQLITE)
    if not file or file == url:
        raise ValueError(f"{redacted(url)!r} is no {SQLITE}FILE, which this command takes")
    return file


def open_store(url: str, durability: StoreDurability = StoreDurability.PROCESS) -> MetadataStore:
    """Open the store at `memory:` or `sqlite:///FILE`; an absolute FILE makes four slashes.

    Raises:
        ValueError: the address is not that of a store of one server.
        StoreError: the store cannot be opened, or another server has it open.
    """
    if url == MEMORY:
        return MemoryStore()
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        if durability is StoreDurability.NONE:
            raise ValueError("a store of durability 'none' is memory:")
        return SqliteStore(url.removeprefix(SQLITE), durability)
    if url.startswith(("redis", "valkey", "unix:")):
        raise ValueError(
            f"{url!r} is a store that servers share; this command opens stores of one server"
        )
    raise ValueError(_no_address(url))


def check_store(url: str) -> None:
    """Check that a server could open a store, without writing anything.

    Raises:
        ValueError: the address is not that of a store of one server.
        StoreError: the store could not be opened.
    """
    if url.startswith(SQLITE) and len(url) > len(SQLITE):
        check_database(url.removeprefix(SQLITE))
    elif url != MEMORY:
        raise ValueError(_no_address(url))


def _no_address(url: str) -> str:
    return (
        f"{url!r} is not the address of a store; {MEMORY}, {SQLITE}FILE and redis://HOST:PORT/DB "
        f"are"
    )
