"""Connections to a Redis that was checked."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.preflight import check_redis

if TYPE_CHECKING:
    from hicache_metadata_server import protocol as p


def check_store(url: str, durability: p.StoreDurability, replicas: int = 0) -> None:
    """Check that the store is reached and keeps changes as durably as stated.

    Raises:
        StoreError: it is not reached, or does not keep them.
        ValueError: the address is not valid.
    """

    async def check() -> None:
        connection = open_connection(url, replicas)
        try:
            await check_redis(connection, durability)
        finally:
            await connection.close()

    # A loop of its own: connections belong to the event loop that opened them, and the server's
    # does not run yet.
    asyncio.run(check())


def open_connection(url: str, replicas: int = 0) -> RedisConnection:
    """Return a connection to the store at an address; nothing is sent yet.

    Raises:
        StoreError: the client library is not installed.
        ValueError: the address is not valid.
    """
    try:
        return RedisConnection(url, replicas=replicas)
    except ImportError as error:
        raise StoreError(
            f"a shared store needs one more package: pip install 'hicache-storage[redis]' ({error})"
        ) from error
