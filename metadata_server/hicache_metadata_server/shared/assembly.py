"""A server on a shared store, put together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from hicache_metadata_server.core.service import MAX_SCOPES
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.shared.connection import Link
from hicache_metadata_server.shared.handlers import SharedHandlers
from hicache_metadata_server.shared.preflight import check_redis
from hicache_metadata_server.shared.service import SharedService
from hicache_metadata_server.storage.store import MemoryStore, StoreError

if TYPE_CHECKING:
    from hicache_metadata_server import protocol as p
    from hicache_metadata_server.auth.security import Security
    from hicache_metadata_server.http.asgi import ProtocolApp


def shared_service(
    url: str,
    limits: p.Limits,
    durability: p.Durability,
    *,
    name: str = "hicache-storage",
    max_scopes: int = MAX_SCOPES,
    replicas: int = 0,
) -> SharedService:
    """What one server of several knows of a store; its connections are made in the event loop that
    it is used in.

    Args:
        replicas: that have to have what is answered.

    Raises:
        StoreError: the library for it is missing.
        ValueError: the address is none.
    """
    return SharedService(
        open_link(url, replicas), limits, durability=durability, name=name, max_scopes=max_scopes
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


def check_store(url: str, durability: p.Durability, replicas: int = 0) -> None:
    """See that the store is there and keeps what is promised.

    Raises:
        StoreError: it is not, or does not.
        ValueError: the address is none.
    """

    async def see() -> None:
        link = open_link(url, replicas)
        try:
            await check_redis(link, durability)
        finally:
            await link.close()

    asyncio.run(see())


def open_link(url: str, replicas: int = 0) -> Link:
    """The way to the store at an address.

    Raises:
        StoreError: the library for it is missing.
        ValueError: the address is none.
    """
    try:
        return Link(url, replicas=replicas)
    except ImportError as error:
        raise StoreError(
            f"a shared store needs one more package: pip install 'hicache-storage[redis]' ({error})"
        ) from error
