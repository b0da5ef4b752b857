"""All scopes of a Redis, without a server, for `hicache metadata fsck`. Nothing is written."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.errors import FencedError, StoreError
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.scope_log import load, log_of, read_head, restored
from hicache_metadata_server.shared.scope_owner import ENTRIES

if TYPE_CHECKING:
    from hicache_metadata_server.shared.scope_log import LoadedScope, ScopeHead

READS: Final = 3
"""Attempts to read a scope between two writes of its owner."""


def restored_service(url: str, now: float) -> MetadataService:
    """Restore a service with all scopes of a Redis.

    Raises:
        StoreError: Redis is not reached, a scope cannot be read, or a server changes it meanwhile.
        ValueError: the address is not valid.
    """

    async def read() -> MetadataService:
        connection, service = RedisConnection(url), MetadataService(shares_store=True)
        try:
            for name in sorted(map(bytes.decode, await connection.command("HGETALL", ENTRIES))):
                head, loaded = await load_unchanged(connection, name)
                if loaded is None:
                    continue
                log = log_of(name, service.new_number(), head.token, head, now)
                found, scope = restored(service, log, loaded, now)
                if scope is not None:
                    service.adopt(scope, found)
        finally:
            await connection.close()
        return service

    return asyncio.run(read())


async def load_unchanged(
    connection: RedisConnection, name: str
) -> tuple[ScopeHead, LoadedScope | None]:
    """Read snapshot and log of a scope as they were at one time; None for one without a head."""
    for _ in range(READS):
        head = await read_head(connection, name)
        if not head.token:
            return head, None
        with suppress(FencedError):
            loaded = await load(connection, name, head.token)
            # Each write changes the head.
            if await read_head(connection, name) == head:
                return head, loaded
    raise StoreError(
        f"{connection.redacted}: a server changes scope {name}: let it check the scope (--url), or "
        f"stop it"
    )
