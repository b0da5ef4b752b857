"""A server on a shared store, put together."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

from hicache_metadata_server.service.service import MOST_SCOPES
from hicache_metadata_server.shared.desk import SharedDesk
from hicache_metadata_server.shared.link import Link
from hicache_metadata_server.shared.opening import see_redis
from hicache_metadata_server.shared.service import SharedService
from hicache_metadata_server.stores.store import MemoryStore, StoreError
from hicache_metadata_server.web.app import create_app

if TYPE_CHECKING:
    from hicache_metadata_server import protocol as p
    from hicache_metadata_server.web.front import Front
    from hicache_metadata_server.web.tokens import Tokens


def shared_app(
    url: str, limits: p.Limits, durability: p.Durability, *, name: str = "hicache-storage", most_scopes: int = MOST_SCOPES,
    tokens: Tokens | None = None,
) -> Front:  # fmt: skip
    """The application of one server of several; its connections are made in the event loop that it runs in."""
    service = SharedService(open_link(url), limits, durability=durability, name=name, most_scopes=most_scopes)
    # No process keeps anything for itself.
    return create_app(cast("Any", service), MemoryStore(), tokens=tokens, desk=SharedDesk(service))


def see_store(url: str, durability: p.Durability) -> None:
    """See that the store is there and keeps what is promised.

    Raises:
        StoreError: it is not, or does not.
        ValueError: the address is none.
    """

    async def see() -> None:
        link = open_link(url)
        try:
            await see_redis(link, durability)
        finally:
            await link.close()

    asyncio.run(see())


def open_link(url: str) -> Link:
    """The way to the store at an address.

    Raises:
        StoreError: the library for it is missing.
        ValueError: the address is none.
    """
    try:
        return Link(url)
    except ImportError as error:
        raise StoreError(f"a shared store needs one more package: pip install 'hicache-storage[redis]' ({error})") from error
