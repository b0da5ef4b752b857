"""Commands on a shared store that need no running server: fsck and import."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.chunking import CHUNK_ENTRIES
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.sglang_import import ImportFileError
from hicache_metadata_server.core.tenants import Caller
from hicache_metadata_server.shared.assembly import open_connection
from hicache_metadata_server.shared.catalog import ScriptTask
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.names import ScopeKeys
from hicache_metadata_server.shared.preflight import check_redis
from hicache_metadata_server.shared.scripts import NO_IDEMPOTENCY_KEY
from hicache_metadata_server.shared.service import SharedService

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from hicache_metadata_server.core.sglang_import import ImportedScope

_T = TypeVar("_T")


def fsck_store(url: str, request: p.Fsck) -> p.FsckReport:
    """Check every invariant of a store; servers may use it at the same time.

    Raises:
        RequestError: there is no such scope.
        StoreError: the store cannot be read.
    """
    return _run(url, lambda service: fsck(service, request))


def import_into_store(url: str, scopes: Sequence[ImportedScope], tenant: str = "") -> None:
    """Import the pages of SGLang's persistence file, for a tenant or for none.

    Raises:
        ImportFileError: the store has a scope of one of the names; nothing was imported.
        StoreError: the store cannot be written.
    """
    _run(url, lambda service: _import_scopes(service, scopes, tenant))


async def _import_scopes(
    service: SharedService, scopes: Sequence[ImportedScope], tenant: str
) -> None:
    catalog = service.catalog
    await catalog.refresh()
    present = [scope.name for scope in scopes if scope.name in catalog.known]
    if present:
        raise ImportFileError(f"the store has {', '.join(present)} already; nothing was imported")
    parts = [p.ScopeGeometry(scope=scope.name, slots=scope.slots) for scope in scopes]
    for scope, part in zip(scopes, parts, strict=True):
        # An earlier import that was cut short may have left keys, which nothing else removes.
        await service.connection.command("UNLINK", *ScopeKeys(scope.name).all)
        await catalog.make([part], tenant)
        for chunk in _chunks(scope):
            await catalog.run([ScriptTask("fill", scope.name, "scope", chunk)])
    # Registered last: no server uses a scope that is not in the list, so an import that is cut
    # short shows none of its pages, and can be repeated.
    await catalog.register(
        parts,
        NO_IDEMPOTENCY_KEY,
        service.max_scopes + len(parts),
        Caller(tenant=tenant, sees_all=True),
    )


def _chunks(scope: ImportedScope) -> Iterator[tuple[list[str], list[int]]]:
    """Yield keys of neighbouring slots ("" for a slot without a page) and their order of use."""
    pages = {slot: (key, use) for use, (key, slot) in enumerate(scope.pages, 1)}
    end = max(pages, default=-1) + 1
    for start in range(0, end, CHUNK_ENTRIES):
        entries = [
            pages.get(slot, ("", 0)) for slot in range(start, min(start + CHUNK_ENTRIES, end))
        ]
        yield [key for key, _ in entries], [use for _, use in entries]


def _run(url: str, do: Callable[[SharedService], Awaitable[_T]]) -> _T:
    async def run() -> _T:
        connection = open_connection(url)
        try:
            # Durability is the servers' promise to their clients; an operator's command has none.
            await check_redis(connection, p.StoreDurability.NONE)
            return await do(SharedService(connection, DEFAULTS, durability=p.StoreDurability.NONE))
        finally:
            await connection.close()

    return asyncio.run(run())
