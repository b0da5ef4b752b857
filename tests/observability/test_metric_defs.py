"""Exported and defined metrics are the same, for every component in real use; sums over several
storages."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields
from datetime import UTC, datetime, timedelta

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.files import record_of
from hicache_metadata_server.auth.security import Security, WatchedFiles
from hicache_metadata_server.core.limits import Quota, Quotas
from hicache_metadata_server.core.service import MetadataService
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.metric_defs import MAX_SCOPE_SERIES, OTHER_SCOPES
from hicache_metadata_server.storage.store import MemoryStore
from hicache_storage.hybrid import page_hashes
from hicache_storage.hybrid.storage_io.calls import ControllerStats
from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.observability.metric_defs import CACHE, CONTROLLER
from hicache_storage.observability.prometheus import (
    SnapshotCollector,
    StorageCollector,
    process_collector,
)
from hicache_storage.spec import StorageStats
from tests.hybrid.radix.controller import WorldController
from tests.hybrid.radix.world import SIZES, World
from tests.hybrid.stack import Stack, tokens
from tests.metadata_server.http_calls import SlowStore, running
from tests.metadata_server.services import NOW, commit, initialize, reserve
from tests.observability.components import COMPONENTS, series


def exported(text, constant=()):
    """Name, kind and labels of every series in an exposition, without the labels that are on all of
    them."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = frozenset(sample.labels) - {"le"} - set(constant)
            found[sample.name] = (family.type, labels, family.documentation)
    return found


def expected(component):
    return {
        name: (str(metric.kind), frozenset(metric.labels), metric.help)
        for metric in COMPONENTS[component].values()
        for name in series(metric)
    }


def exposition(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry).decode()


def test_a_storage_exports_what_is_defined(kit):
    driver, pool = kit.memory_storage()
    storage = wrap(driver, StorageOptions())
    storage.register_mem_host_pool_v2(pool, "kv")
    storage.batch_set_v2([pool.transfer("kv", ["a", "b"], [0, 1])])
    storage.batch_get_v2([pool.transfer("kv", ["a", "x"], [2, 3])])
    storage.batch_exists_v2(["a", "x", "y"])
    registry = CollectorRegistry()
    registry.register(StorageCollector(storage, {"tp_rank": "3"}))
    assert exported(generate_latest(registry).decode(), ["tp_rank"]) == expected("storage")
    of_pool = {"pool": "kv"}
    absent = {**of_pool, "reason": "absent"}
    for name, labels, value in (
        ("written_pages_total", of_pool, 2),
        ("written_bytes_total", of_pool, 2 * pool.geometry.page_bytes),
        ("missed_pages_total", absent, 1),
        ("hit_pages_total", of_pool, 1),
        ("absent_pages_total", absent, 2),
        ("call_seconds_bucket", {**of_pool, "operation": "get", "le": "+Inf"}, 1),
        ("faults_total", {}, 0),
        ("failovers_total", {}, 0),
        *(("breaker_open", {"operation": kind}, 0) for kind in ("read", "write", "delete")),
    ):
        labels = {"driver": "memory", "tp_rank": "3", **labels}
        assert registry.get_sample_value(f"hicache_storage_{name}", labels) == value, name


def test_a_controller_exports_what_is_defined():
    with closing(Stack()) as stack:
        span = stack.take("device", 2)
        stack.fill("device", span, page_hashes(tokens(2), 4))
        assert stack.controller.write(span, 1) is not None
        stack.controller.start_writing()
        read = stack.controller.stats
        text = exposition(SnapshotCollector(CONTROLLER, read, {"tp_rank": "0"}))
        told = read().tokens_written_back
    assert exported(text, ["tp_rank"]) == expected("controller")
    assert f'hicache_controller_written_back_tokens_total{{tp_rank="0"}} {told}.0' in text


def test_a_cache_exports_what_is_defined():
    world = World(WorldController.of(SIZES, 2, states=True))
    world.start(tuple(range(10, 27)))
    text = exposition(SnapshotCollector(CACHE, world.cache.usage))
    assert exported(text) == expected("cache")
    assert f'hicache_cache_tokens{{tier="device"}} {world.cache.usage().device_tokens}.0' in text
    assert world.cache.usage().device_tokens > 0
    world.controller.close()


async def test_a_server_exports_what_is_defined(tmp_path):
    store = SlowStore()
    store.sizes = lambda: {"log": 1}
    service = MetadataService(durability=store.durability)
    service.url = "http://one"
    security = Security(service)
    security.tokens.replace_records(
        [
            record_of("root", "admin", name="root", expires=datetime.now(UTC) + timedelta(days=1)),
            record_of("acme", "write", name="acme", tenant="acme"),
        ]
    )
    service.quotas = Quotas({"acme": Quota(slots=100)})
    security.watched.append(WatchedFiles("tokens", [tmp_path], lambda: None))
    root, acme = ({"authorization": f"Bearer {token}"} for token in ("root", "acme"))

    async with running(store, service, security=security) as caller:
        await caller.post(
            "/v2/initialize", {"scopes": [{"scope": "0:kv", "slots": 8}]}, headers=acme
        )
        await caller.store("0:kv", ["a", "b"], headers=root)
        await caller.post("/v2/describe", {"scope": "0:kv", "model": "m"}, headers=root)
        text = (await caller.send("GET", "/metrics", headers=root)).body.decode()
    assert exported(text) == expected("server") | expected("process")


async def test_a_server_without_a_store_has_no_transactions():
    async with running() as caller:
        names = exported((await caller.send("GET", "/metrics")).body.decode())
    assert "hicache_metadata_ready" in names
    assert not [name for name in names if "transaction" in name or "store" in name]


def metrics_text(service):
    return create_app(service, MemoryStore()).metrics.text()


def test_leases_that_end_by_themselves_are_counted():
    service = MetadataService()
    initialize(service, "0:kv", slots=8)
    given = reserve(service, ["a", "b", "c"], lease_seconds=1.0)
    commit(service, given.leases[:1])
    service.settle(NOW + 5.0, 1024)
    assert service.list_scopes().scopes[0].expired_leases == 2
    assert b'hicache_metadata_expired_leases_total{scope="0:kv"} 2.0' in metrics_text(service)


def test_the_model_of_a_scope_is_a_label():
    service = MetadataService()
    initialize(service, "0:kv", "0:unnamed", slots=8)
    for model in ("before", 'a "quoted" \\ name{}'):
        service.describe(p.Describe(scope="0:kv", model=model), NOW)
    [family] = [
        family
        for family in text_string_to_metric_families(metrics_text(service).decode())
        if family.name == "hicache_metadata_scope_info"
    ]
    assert [(sample.labels, sample.value) for sample in family.samples] == [
        ({"scope": "0:kv", "model": model}, 1.0)
    ]


def test_scopes_beyond_a_number_are_added_up_and_keep_their_names():
    service = MetadataService()
    for number in range(MAX_SCOPE_SERIES):
        initialize(service, f"1:s{number}", slots=8)
    metrics = create_app(service, MemoryStore()).metrics
    metrics.text()
    # Sorted before all others, and still not one that is named.
    for name in ("0:a", "0:b"):
        initialize(service, name, slots=8)
        service.describe(p.Describe(scope=name, model="m"), NOW)
    for _ in range(2):
        text = metrics.text().decode()
        assert '{scope="0:' not in text
        assert 'model="m"' not in text
        assert f'hicache_metadata_slots{{scope="{OTHER_SCOPES}",state="free"}} 16.0' in text
        assert text.count('state="live"') == MAX_SCOPE_SERIES + 1


def test_every_number_of_a_controller_is_exported():
    assert {metric.source for metric in CONTROLLER} == {
        field.name for field in fields(ControllerStats)
    }


def test_the_bounds_of_a_histogram_ascend():
    """Its counts are cumulative."""
    for metrics in COMPONENTS.values():
        for metric in metrics.values():
            assert list(metric.buckets) == sorted(set(metric.buckets)), metric.name


def test_sources_of_a_process_are_summed_in_its_default_registry(kit):
    published = process_collector()
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
    published.remove(storages[0])
    lines = generate_latest(REGISTRY).decode().splitlines()
    assert not [line for line in lines if line.startswith("hicache_storage")]


def test_a_total_has_the_name_of_the_driver_that_counted(kit):
    storage, _ = kit.memory_storage()
    assert StorageStats.total("wrapper", [storage.get_stats()]).driver == "memory"
    assert StorageStats.total("wrapper", []).driver == "wrapper"
