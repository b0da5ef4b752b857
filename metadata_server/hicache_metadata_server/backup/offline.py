"""A store that no server has open, as a source."""

from __future__ import annotations

import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.storage.factory import MEMORY, SQLITE, open_store
from hicache_metadata_server.storage.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Generator


@contextmanager
def opened_store(
    url: str, max_lease_seconds: float = DEFAULTS.max_lease_seconds
) -> Generator[MetadataService]:
    """What a store has kept, as a server would take it over; nobody else can open it meanwhile, and
    nothing in it is changed.

    Raises:
        StoreError: it cannot be read, or a server has it.
        ValueError: the address is not the address of a store.
    """
    if url == MEMORY:
        raise StoreError(
            "nothing is kept in memory: name a sqlite:///FILE or a redis://HOST:PORT/DB"
        )
    if url.startswith(SQLITE) and not Path(url.removeprefix(SQLITE)).is_file():
        # It would be made.
        raise StoreError(f"there is no store {url.removeprefix(SQLITE)}")
    store, now = open_store(url), time.time()
    try:
        limits = structs.replace(DEFAULTS, max_lease_seconds=max_lease_seconds)
        service = MetadataService(limits, durability=store.durability)
        service.restore(store.recover(now), store.rows, now)
        yield service
    finally:
        store.close()
