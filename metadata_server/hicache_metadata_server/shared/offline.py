"""What the command line does with a shared store without asking a server."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.shared.assembly import open_connection
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.importing import import_shared
from hicache_metadata_server.shared.preflight import check_redis
from hicache_metadata_server.shared.service import SharedService

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hicache_metadata_server.core.sglang_import import ImportedScope

_T = TypeVar("_T")


def fsck_store(url: str, request: p.Fsck) -> p.Checked:
    """Check every invariant, while servers may go on.

    Raises:
        RefusedError: there is no such scope.
        StoreError: the store cannot be read.
    """
    return _run(url, lambda service: fsck(service, request))


def import_into_store(url: str, scopes: Sequence[ImportedScope], tenant: str = "") -> None:
    """Bring pages in.

    Raises:
        ImportFileError: the store has a scope of one of the names.
        StoreError: the store cannot be written.
    """
    _run(url, lambda service: import_shared(service, scopes, tenant))


def _run(url: str, do: Callable[[SharedService], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        connection = open_connection(url)
        try:
            await check_redis(connection, p.Durability.NONE)
            return await do(SharedService(connection, DEFAULTS, durability=p.Durability.NONE))
        finally:
            await connection.close()

    return asyncio.run(run())
