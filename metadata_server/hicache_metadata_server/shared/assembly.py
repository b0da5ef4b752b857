"""Assembly of a server on a shared store."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.service import MAX_SCOPES
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.handlers import SharedHandlers
from hicache_metadata_server.shared.preflight import check_redis
from hicache_metadata_server.shared.service import SharedService
from hicache_metadata_server.storage.store import MemoryStore

if TYPE_CHECKING:
    from hicache_metadata_server import protocol as p
    from hicache_metadata_server.auth.security import Security
    from hicache_metadata_server.http.asgi import ProtocolApp


def shared_service(
    url: str,
    limits: p.Limits,
    durability: p.StoreDurability,
    *,
    name: str = "hicache-storage",
    max_scopes: int = MAX_SCOPES,
    replicas: int = 0,
) -> SharedService:
    """Return the service of one of several servers.

    It connects at its first use, in the event loop of that use.

    Args:
        url: address of the store.
        limits: limits of requests, leases and pins.
        durability: guarantee that the server states; `check_store` verifies it.
        name: name of the server.
        max_scopes: limit of scopes in the store.
        replicas: number of replicas that must have a change before it is acknowledged.

    Raises:
        StoreError: the client library is not installed.
        ValueError: the address is not valid.
    """
    return SharedService(
        open_connection(url, replicas),
        limits,
        durability=durability,
        name=name,
        max_scopes=max_scopes,
    )


def shared_app(
    service: SharedService, *, security: Security | None = None, slow_seconds: float = 0.0
) -> ProtocolApp:
    """The application of one server of several."""
    # No process keeps anything for itself.
    return create_app(
        cast("Any", service),
        MemoryStore(),
        security=security,
        handlers=SharedHandlers(service),
        slow_seconds=slow_seconds,
    )


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
