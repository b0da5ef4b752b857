"""Fixtures shared by the unit tests."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from hicache_storage.spec import StorageIdentity
from hicache_storage.testing import BytePool, MemoryStorage

if TYPE_CHECKING:
    from collections.abc import Callable

# A machine that is busy with something else is no fault of what is tested.
settings.register_profile(
    "unhurried",
    parent=settings(),
    deadline=None,
    suppress_health_check={*settings().suppress_health_check, HealthCheck.too_slow},
)
settings.load_profile("unhurried")


def make_identity(**changes: object) -> StorageIdentity:
    fields = {"model": "m", "kv_dtype": "bfloat16", "page_size": 2, "layout": "page_first"}
    return StorageIdentity(**{**fields, **changes})


@dataclass
class Kit:
    """Makers of identities, pools and storages."""

    identity: Callable[..., StorageIdentity] = make_identity
    pool: type[BytePool] = BytePool
    storage: type[MemoryStorage] = MemoryStorage
    opened: list[MemoryStorage] = field(default_factory=list)

    def memory_storage(
        self,
        pools: dict[str, BytePool] | None = None,
        **options: object,
    ) -> tuple[MemoryStorage, BytePool]:
        """Make a storage in memory with its pools registered; return it and the KV pool."""
        pools = pools or {"kv": BytePool()}
        storage = MemoryStorage(options.pop("identity", None) or make_identity(), **options)
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool, name)
        self.opened.append(storage)
        return storage, pools["kv"]


def pytest_collection_modifyitems(items):
    # Files are shared out among workers, and one that is begun last is waited for by all.
    def seconds(item):
        mark = item.get_closest_marker("slow")
        return mark.kwargs["seconds"] if mark else 0

    items.sort(key=seconds, reverse=True)


@pytest.fixture(autouse=True)
def logs_as_before():
    """A test that configures logs does so for itself: what the next ones log would be kept in
    memory by pytest."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def kit():
    kit = Kit()
    yield kit
    for storage in kit.opened:
        storage.close()
