"""Metrics of storages that keep none themselves."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_storage.layers.base import StorageLayer, innermost
from hicache_storage.objects.recorder import StatsRecorder
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import MissReason, PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.spec import (
        HiCacheStorage,
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
        StorageStats,
    )


class MetricsLayer(StorageLayer):
    """Counters of pages, bytes and latencies, derived from the answers of the wrapped storage.

    `ObjectStorage` drivers keep more precise ones: an answer does not tell a page that existed from
    one that was written, nor a damaged page from a missing one: all misses count as absent.
    """

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self._recorder = StatsRecorder(type(innermost(inner)).__name__)
        self._page_bytes: dict[PoolName, int] = {}

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._page_bytes[PoolName(host_pool_name)] = page_access(host_pool).geometry.page_bytes
        # Start the counters at 0, as `ObjectStorage` does: Prometheus does not see the first value
        # of a new series as an increase.
        self._recorder.count(PoolName(host_pool_name))

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        started = time.perf_counter()
        result = super().batch_exists_v2(keys, pool_transfers, extra_info)
        for pool, pages in result.extra_pool_hit_pages.items():
            absent = Counter({MissReason.ABSENT: len(keys) - pages})
            self._recorder.count(pool, pages_hit=pages, absent=absent)
        self._recorder.observe("exists", result.extra_pool_hit_pages, started)
        return result

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        started = time.perf_counter()
        found = super().batch_present(keys, pool=pool, extra_info=extra_info)
        self._recorder.observe_lookup({PoolName(pool): found}, started)
        return found

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        started = time.perf_counter()
        results = super().batch_get_v2(transfers, extra_info)
        for pool, delivered in results.items():
            pages = sum(delivered)
            read_bytes = pages * self._page_bytes[pool]
            missed = Counter({MissReason.ABSENT: len(delivered) - pages})
            self._recorder.count(pool, pages_read=pages, bytes_read=read_bytes, missed=missed)
        self._recorder.observe("get", results, started)
        return results

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        started = time.perf_counter()
        results = super().batch_set_v2(transfers, extra_info)
        for pool, stored in results.items():
            pages = sum(stored)
            written_bytes = pages * self._page_bytes[pool]
            self._recorder.count(
                pool,
                pages_written=pages,
                bytes_written=written_bytes,
                pages_refused=len(stored) - pages,
            )
        self._recorder.observe("set", results, started)
        return results

    def get_stats(self) -> StorageStats:
        stats, counted = super().get_stats(), self._recorder.snapshot().pools
        # Answers do not tell these; the wrapped storage may have counted them.
        for name, pool in stats.pools.items():
            if name in counted:
                counted[name].pages_damaged = pool.pages_damaged
                counted[name].pages_evicted = pool.pages_evicted
        return replace(stats, pools=counted)
