"""Sums over several storages, in the exported text and in statistics."""

from __future__ import annotations

from prometheus_client import REGISTRY, generate_latest

from hicache_storage.observability.prometheus import ProcessCollector
from hicache_storage.spec import StorageStats


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
