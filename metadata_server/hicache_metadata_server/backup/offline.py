"""Read-only access to a store that no server has open."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.export import CHUNK_SLOTS, export_slots
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.core.snapshot_parts import ScopeHeader
from hicache_metadata_server.storage.address import is_shared
from hicache_metadata_server.storage.factory import MEMORY, SQLITE, open_store

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from hicache_metadata_server.core.snapshot_parts import SnapshotPart
    from hicache_metadata_server.storage.store import MetadataStore


@contextmanager
def opened_store(
    url: str, max_lease_seconds: float = DEFAULTS.max_lease_seconds
) -> Generator[MetadataService]:
    """Return the service that a server would recover from a store; change nothing in the store.

    The store is locked meanwhile.

    Raises:
        StoreError: the store cannot be read, or a server has it open.
        ValueError: the address is not that of a store.
    """
    check_exists(url)
    store, now = open_any_store(url), time.time()
    try:
        limits = structs.replace(DEFAULTS, max_lease_seconds=max_lease_seconds)
        service = MetadataService(limits, durability=store.durability)
        service.restore(store.recover(now), store.rows, now)
        yield service
    finally:
        store.close()


def check_exists(url: str) -> None:
    """Check that a SQLite store exists, before it is opened.

    Raises:
        StoreError: it does not.
    """
    if url.startswith(SQLITE) and not Path(url.removeprefix(SQLITE)).is_file():
        # `open_store` would create it, and a mistyped path would be an empty store.
        raise StoreError(f"there is no store {url.removeprefix(SQLITE)}")


def open_any_store(url: str) -> MetadataStore:
    """Open a store that no server has open: a SQLite file, or all scopes of a Redis.

    Raises:
        StoreError: the store cannot be opened, or a server has it open.
        ValueError: the address is not that of a store.
    """
    if url == MEMORY:
        raise StoreError(
            "nothing is kept in memory: name a sqlite:///FILE or a redis://HOST:PORT/DB"
        )
    if is_shared(url):
        # Needs a library of its own.
        from hicache_metadata_server.shared.offline import OfflineScopes

        return OfflineScopes(url)
    return open_store(url)


def snapshot_of(service: MetadataService, now: float) -> Iterator[SnapshotPart]:
    """Yield the snapshot of a service, which must not change meanwhile."""
    for name in sorted(service.scopes):
        scope = service.scopes[name]
        yield ScopeHeader(scope.geometry, scope.epoch, service.tenants.of_scope[name], scope.model)
        for first in range(0, len(scope.table), CHUNK_SLOTS):
            yield from export_slots(
                scope, first, first + CHUNK_SLOTS, now, service.limits.max_lease_seconds
            )
    yield service.counters()
