"""Pages of SGLang's persistence file, brought into a shared store."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.chunking import ENTRIES
from hicache_metadata_server.core.sglang_import import ImportFileError
from hicache_metadata_server.core.tenants import Caller
from hicache_metadata_server.shared.catalog import ScriptTask
from hicache_metadata_server.shared.names import ScopeKeys
from hicache_metadata_server.shared.script_results import NO_IDEMPOTENCY_KEY

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_metadata_server.core.sglang_import import ImportedScope
    from hicache_metadata_server.shared.service import SharedService


async def import_shared(
    service: SharedService, scopes: Sequence[ImportedScope], tenant: str = ""
) -> None:
    """Make the scopes, of a tenant or of none, in a store that has none of their names.

    A scope enters the list of scopes when all its pages are there, so that what is cut short is
    begun anew.

    Raises:
        ImportFileError: it has; nothing was imported.
    """
    catalog = service.catalog
    await catalog.refresh()
    there = [scope.name for scope in scopes if scope.name in catalog.known]
    if there:
        raise ImportFileError(f"the store has {', '.join(there)} already; nothing was imported")
    parts = [p.ScopeGeometry(scope=scope.name, slots=scope.slots) for scope in scopes]
    for scope, part in zip(scopes, parts, strict=True):
        await service.connection.command("UNLINK", *ScopeKeys(scope.name).all)
        await catalog.make([part], tenant)
        for piece in _chunks(scope):
            await catalog.run([ScriptTask("fill", scope.name, "scope", piece)])
    await catalog.register(
        parts,
        NO_IDEMPOTENCY_KEY,
        service.max_scopes + len(parts),
        Caller(tenant=tenant, sees_all=True),
    )


def _chunks(scope: ImportedScope) -> Iterator[tuple[list[str], list[int]]]:
    """Keys of neighbouring slots, "" for those without a page, and when each was used."""
    pages = {slot: (key, use) for use, (key, slot) in enumerate(scope.pages, 1)}
    end = max(pages, default=-1) + 1
    for start in range(0, end, ENTRIES):
        some = [pages.get(slot, ("", 0)) for slot in range(start, min(start + ENTRIES, end))]
        yield [key for key, _ in some], [use for _, use in some]
