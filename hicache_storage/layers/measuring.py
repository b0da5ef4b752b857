"""A layer that weighs what passes through it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.layers.base import StorageLayer
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from hicache_storage.spec import HiCacheStorage


class MeasuringLayer(StorageLayer):
    """Knows how many bytes a page of each registered pool has."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self._page_bytes: dict[PoolName, int] = {}

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._page_bytes[PoolName(host_pool_name)] = page_access(host_pool).geometry.page_bytes
