"""LC-5: a child that is forked in the middle of its parent's calls is told, or served; it waits for
no lock of theirs."""

from __future__ import annotations

from operator import attrgetter

import pytest

from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.observability.exporter import Exporter
from hicache_storage.spec import Capabilities, StorageForkedError
from tests.support.forking import in_child

LOCKS = {
    "call": lambda layers: layers.inner.inner._lifecycle.lock(),
    "lifecycle": attrgetter("inner.inner._lifecycle._lock"),
    "connecting": attrgetter("inner.inner._lifecycle._connecting"),
    "damage": attrgetter("inner.inner._damaged._lock"),
    "recorder": attrgetter("inner.inner.recorder._lock"),
    "breaker": lambda layers: layers.breakers["read"]._lock,
    "closing": attrgetter("inner._closing"),
    "thread_pool": attrgetter("inner._thread_pool._lock"),
}


@pytest.fixture
def around(kit):
    """A dict in the default layers, after a fault: from then on the breaker takes its lock."""
    storage, pool = kit.memory_storage(
        capabilities=Capabilities(may_hang=True, deletes=True, clears=True)
    )
    layers = wrap(storage, StorageOptions())
    layers.register_mem_host_pool_v2(pool, "kv")
    for breaker in layers.breakers.values():
        breaker.failed()
    yield layers, pool
    layers.close()


def used(layers, pool):
    """Every call of a storage; what the first of them comes to."""
    transfer = pool.transfer("kv", ["a"], [0])
    outcomes = []
    for call in (
        lambda: layers.batch_set_v2([transfer])["kv"],
        lambda: layers.batch_get_v2([transfer])["kv"],
        lambda: layers.batch_exists_v2(["a"]).kv_hit_pages,
        lambda: layers.delete(["b"]),
        lambda: layers.register_mem_host_pool_v2(pool, "kv"),
        layers.clear,
        layers.open,
    ):
        try:
            outcomes.append(str(call()))
        except StorageForkedError:
            outcomes.append("forked")
    outcomes.append(f"ok={layers.health().ok}")
    layers.get_stats()
    layers.close()
    return " ".join(outcomes)


@pytest.mark.parametrize("lock", LOCKS)
def test_of_an_open_storage(around, lock):
    layers, pool = around
    layers.open()
    layers.batch_exists_v2(["a"])
    with LOCKS[lock](layers):
        assert in_child(lambda: used(layers, pool)) == "forked " * 7 + "ok=False"
    assert layers.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}


@pytest.mark.parametrize("lock", sorted(LOCKS.keys() - {"connecting"}))
def test_of_one_that_was_never_opened(around, lock):
    """It belongs to nobody yet, and calls of the parent that are on their way do not count in the
    child."""
    layers, pool = around
    with LOCKS[lock](layers):
        assert (
            in_child(lambda: used(layers, pool)) == "[True] [True] 1 [False] None None None ok=True"
        )


def test_while_the_parent_connects(around):
    """Half of a connection is the parent's."""
    layers, pool = around
    with LOCKS["connecting"](layers):
        assert in_child(lambda: used(layers, pool)).startswith("forked forked")


def test_an_exporter_is_closed_in_a_child_without_its_thread(around):
    layers, _pool = around
    exporter = Exporter(layers, "127.0.0.1", 0, {})
    try:
        assert in_child(lambda: str(exporter.close())) == "None"
        assert exporter.port
    finally:
        exporter.close()
