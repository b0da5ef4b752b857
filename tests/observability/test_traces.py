"""Spans from the engine's call through the client to the server, over real HTTP; and nothing where
nobody wants them."""

from __future__ import annotations

import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from hicache_metadata_server.core.errors import StoreError
from hicache_storage.layers import BreakerState, CircuitBreakerLayer, StorageOptions, wrap
from hicache_storage.observability import tracing
from hicache_storage.observability.otel import provider_from_environment
from hicache_storage.spec import ConfigError, HiCacheStorageExtraInfo
from tests.metadata_server.http_calls import SlowStore, running
from tests.support.commands import run_python

SERVE = f'{sys.executable} -c "from hicache_storage.cli.main import main; main()" metadata serve --port {{port}}'


@pytest.fixture
def finished():
    """Traces this process, and tells the spans that have ended, in that order."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracing.enable(provider)
    yield exporter.get_finished_spans
    tracing.disable()
    provider.shutdown()


def traced_storage(kit, **options):
    driver, pool = kit.memory_storage(**options)
    storage = wrap(driver, StorageOptions(traces=True))
    storage.register_mem_host_pool_v2(pool, "kv")
    return storage, driver, pool


def test_spans_of_a_storage(kit, finished):
    storage, _, pool = traced_storage(kit)
    info = HiCacheStorageExtraInfo(request_id="chat 7")
    storage.batch_set_v2([pool.transfer("kv", ["a", "b"], [0, 1])], info)
    storage.batch_get_v2([pool.transfer("kv", ["a", "x"], [2, 3])], info)
    storage.batch_exists_v2(["a", "b", "x"])
    put, got, found = finished()
    page = pool.geometry.page_bytes
    assert put.name == "hicache.batch_set"
    common = {"hicache.request_id": "chat_7", "hicache.pools": ("kv",)}
    assert dict(put.attributes) == {
        **common,
        "hicache.pages": 2,
        "hicache.hits": 2,
        "hicache.bytes": 2 * page,
    }
    assert dict(got.attributes) == {
        **common,
        "hicache.pages": 2,
        "hicache.hits": 1,
        "hicache.bytes": page,
    }
    assert (found.name, found.attributes["hicache.pages"], found.attributes["hicache.hits"]) == (
        "hicache.batch_exists",
        3,
        2,
    )
    assert found.attributes["hicache.request_id"] not in ("", "chat_7")


def test_what_a_layer_refuses_has_a_span_too(kit, finished):
    storage, driver, pool = traced_storage(kit)
    driver.before = lambda operation: (_ for _ in ()).throw(OSError("gone"))
    for _ in range(9):
        storage.batch_get_v2([pool.transfer("kv", ["a"], [0])])
    assert isinstance(storage.inner, CircuitBreakerLayer)
    assert storage.inner.breakers["read"].state is BreakerState.OPEN
    assert [span.attributes["hicache.hits"] for span in finished()] == [0] * 9


def test_misuse_ends_the_span_with_an_error(kit, finished):
    storage, _, pool = traced_storage(kit)
    with pytest.raises(Exception, match="not registered"):
        storage.batch_get_v2([pool.transfer("mamba", ["a"], [0])])
    assert finished()[0].status.status_code is StatusCode.ERROR


async def test_a_server_that_fails_says_so_in_its_span(finished):
    store = SlowStore()
    store.error = StoreError("no space")
    async with running(store) as caller:
        assert (await caller.initialize("0:kv")).status == 503
        store.error = None
    [span] = [span for span in finished() if span.attributes["http.route"] == "/v2/initialize"]
    assert (span.status.status_code, span.attributes["http.response.status_code"]) == (
        StatusCode.ERROR,
        503,
    )
    assert span.parent is None


def test_nothing_is_imported_where_nothing_is_traced():
    code = (
        "import sys\n"
        "from hicache_storage import StorageOptions, create_storage, StorageIdentity\n"
        "import hicache_storage.layers, hicache_metadata_server.client.http_client, "
        "hicache_metadata_server.http.asgi\n"
        "sys.exit(any(name.split('.')[0] == 'opentelemetry' for name in sys.modules))"
    )
    run_python(code)


def test_traces_without_opentelemetry_are_refused_with_advice(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    for name in [
        name
        for name in sys.modules
        if name.startswith(("opentelemetry.", "hicache_storage.observability.otel"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"pip install 'hicache-storage\[otel\]'"):
        tracing.enable()
    assert tracing.spans() is None


def test_an_exporter_that_is_not_there(monkeypatch):
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "nonesuch")
    with pytest.raises(ConfigError, match="OTEL_TRACES_EXPORTER=nonesuch"):
        provider_from_environment("x")
