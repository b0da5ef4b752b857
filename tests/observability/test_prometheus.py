"""The exported text has the documented names and adds up."""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest

from hicache_storage.observability.prometheus import ProcessCollector, StorageCollector
from hicache_storage.spec import StorageStats


def test_exported_text(kit):
    storage, pool = kit.memory_storage()
    storage.batch_set_v2([pool.transfer("kv", ["a", "b"], [0, 1])])
    storage.batch_get_v2([pool.transfer("kv", ["a", "x"], [2, 3])])
    storage.batch_exists_v2(["a", "x", "y"])
    registry = CollectorRegistry()
    registry.register(StorageCollector(storage, {"tp_rank": "3"}))
    text = generate_latest(registry).decode()
    labels = '{driver="memory",pool="kv",tp_rank="3"}'
    absent = '{driver="memory",pool="kv",reason="absent",tp_rank="3"}'
    assert f"hicache_storage_written_pages_total{labels} 2.0" in text
    assert f"hicache_storage_written_bytes_total{labels} {2 * pool.geometry.page_bytes}.0" in text
    assert f"hicache_storage_missed_pages_total{absent} 1.0" in text
    assert f"hicache_storage_hit_pages_total{labels} 1.0" in text
    assert f"hicache_storage_absent_pages_total{absent} 2.0" in text
    assert 'hicache_storage_faults_total{driver="memory",tp_rank="3"} 0.0' in text
    assert 'hicache_storage_failovers_total{driver="memory",tp_rank="3"} 0.0' in text
    for kind in ("read", "write", "delete"):
        labels = f'{{driver="memory",operation="{kind}",tp_rank="3"}}'
        assert f"hicache_storage_breaker_open{labels} 0.0" in text
    infinite = 'hicache_storage_call_seconds_bucket{driver="memory",le="+Inf",operation="get",pool="kv",tp_rank="3"} 1.0'
    assert infinite in text


def test_sources_of_a_process_are_summed_in_its_default_registry(kit):
    published = ProcessCollector()
    storages = []
    for keys in (["a", "b"], ["c"]):
        storage, pool = kit.memory_storage()
        storage.batch_set_v2([pool.transfer("kv", keys, list(range(len(keys))))])
        storages.append(storage)
        published.add(storage)
    labels = '{driver="memory",pool="kv"}'
    try:
        text = generate_latest(REGISTRY).decode()
        assert f"hicache_storage_written_pages_total{labels} 3.0" in text
        sets = 'hicache_storage_call_seconds_count{driver="memory",operation="set",pool="kv"} 2.0'
        assert sets in text
        assert text.count("# TYPE hicache_storage_written_pages_total counter") == 1
        published.remove(storages[0])
        assert (
            f"hicache_storage_written_pages_total{labels} 1.0" in generate_latest(REGISTRY).decode()
        )
    finally:
        for storage in storages:
            published.remove(storage)
    assert "hicache_storage" not in generate_latest(REGISTRY).decode()
    published.remove(storages[0])


def test_a_total_has_the_name_of_the_driver_that_counted(kit):
    storage, _ = kit.memory_storage()
    assert StorageStats.total("wrapper", [storage.get_stats()]).driver == "memory"
    assert StorageStats.total("wrapper", []).driver == "wrapper"
