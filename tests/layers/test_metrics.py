"""Counting from the outside, for storages that do not count themselves."""

from __future__ import annotations

import pytest

from hicache_storage.layers import MetricsLayer, StorageLayer, StorageOptions, innermost, wrap
from hicache_storage.spec import PoolName, PoolStats


class Foreign(StorageLayer):
    """Stands for a storage that is no `ObjectStorage`."""


def test_counts_what_is_answered(kit):
    storage, _ = kit.memory_storage(metrics=False)
    layer = MetricsLayer(storage)
    layer.register_mem_host_pool_v2(pool := kit.pool(), "kv")
    layer.batch_set_v2([pool.transfer("kv", ["a", "b"], [0, 1])])
    layer.batch_exists_v2(["a", "b", "c"])
    layer.batch_get_v2([pool.transfer("kv", ["a", "b", "x"], [2, 3, 4])])
    stats = layer.get_stats().pools["kv"]
    page = pool.geometry.page_bytes
    assert (stats.pages_written, stats.bytes_written) == (2, 2 * page)
    assert (stats.pages_hit, stats.pages_absent) == (2, 1)
    assert (stats.pages_read, stats.bytes_read, stats.pages_missed) == (2, 2 * page, 1)
    assert [stats.latency[name].calls for name in ("set", "exists", "get")] == [1, 1, 1]


@pytest.mark.parametrize(
    "counting", [MetricsLayer, StorageLayer], ids=["from outside", "by itself"]
)
def test_a_pool_is_counted_from_nothing_as_soon_as_it_is_there(kit, counting):
    """Prometheus sees no growth in a series that begins with a value."""
    storage, _ = kit.memory_storage(metrics=counting is StorageLayer)
    layer = counting(storage)
    layer.register_mem_host_pool_v2(kit.pool(), "index")
    assert layer.get_stats().pools["index"] == PoolStats()


def test_leaves_to_the_storage_what_only_it_can_count(kit):
    storage, pool = kit.memory_storage()
    layer = MetricsLayer(storage)
    layer.register_mem_host_pool_v2(pool, "kv")
    layer.batch_set_v2([pool.transfer("kv", ["a"], [0])])
    storage.recorder.count(PoolName.KV, pages_evicted=3, pages_damaged=2, pages_read=9)
    stats = layer.get_stats().pools["kv"]
    assert (stats.pages_evicted, stats.pages_damaged, stats.pages_read) == (3, 2, 0)


def test_only_foreign_storages_get_it(kit):
    storage, _ = kit.memory_storage()
    assert not isinstance(
        wrap(storage, StorageOptions(deadline_seconds=None, breaker_threshold=0)), MetricsLayer
    )
    foreign = wrap(Foreign(storage), StorageOptions(deadline_seconds=None, breaker_threshold=0))
    assert isinstance(foreign, MetricsLayer)
    assert innermost(foreign) is storage
