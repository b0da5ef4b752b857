"""Registration of host pools' memory: once, with refusals, and its release after the last use."""

from __future__ import annotations

import pytest

from hicache_backends.mooncake import driver as driver_module
from hicache_conformance.harness.pools import EngineHostPool
from hicache_storage.spec import InvalidPoolError, StorageUnavailableError
from hicache_storage.testing import BytePool
from tests.backends.file.harness import COMPONENTS
from tests.backends.mooncake.harness import Rig


@pytest.fixture
def registering(rig, monkeypatch):
    """A storage whose memory is registered, as for other protocols than TCP."""
    one = rig()
    one.storage.open()
    connection = one.connection
    fields = {
        name: getattr(connection.settings, name) for name in connection.settings.__struct_fields__
    }
    other = connection.settings.__class__(**{**fields, "protocol": "rdma"})
    with monkeypatch.context() as changed:
        changed.setattr(connection, "settings", other)
        yield one
    one.storage.close()


def registered(rig):
    """What the storage's client has registered, with how often."""
    return rig.connection._registered


def regions(rig, pool="kv"):
    return rig.driver.handle._pools[pool].regions


def register(rig, pool, name="kv"):
    rig.storage.register_mem_host_pool_v2(pool, name)


def test_memory_is_registered_once_and_let_go(registering):
    one = registering
    register(one, one.pool)
    [region], known = regions(one), registered(one)
    assert known == {region: 1}
    register(one, one.pool)
    assert known == {region: 1}
    register(one, one.pool, "draft")
    assert known == {region: 2}
    one.driver.handle.close()
    assert known == {}


def test_over_tcp_nothing_is_registered(rig):
    one = rig()
    register(one, BytePool(components=(100,)), "swa")
    one.storage.open()
    register(one, BytePool(components=(100,)), "mamba")
    assert one.put(["a"]) == [True]
    for pool in ("kv", "swa", "mamba"):
        assert regions(one, pool) == []
        assert one.driver.handle._pools[pool].owner is not None
    assert registered(one) == {}


def test_memory_that_is_replaced_stays_until_no_call_is_in_flight(registering):
    """A call may still be reading into it."""
    one = registering
    register(one, one.pool)
    [former] = regions(one)
    with one.driver.handle:
        register(one, BytePool(page_size=4, components=COMPONENTS))
        [present] = regions(one)
        assert former in registered(one)
    assert former not in registered(one)
    assert present in registered(one)


def test_a_call_that_is_in_flight_at_the_end_keeps_the_memory(registering):
    one = registering
    register(one, one.pool)
    handle, known, [region] = one.driver.handle, registered(one), regions(one)
    with handle as connection:
        handle.close()
        assert region in known
        assert connection.exist(["nobody's"]) == [False]
        with pytest.raises(StorageUnavailableError, match="closed"), handle:
            pass
    assert region not in known
    # Nothing is released twice.
    handle.close()


def test_a_pool_that_is_refused_changes_nothing(cluster):
    one = Rig(cluster.options, protocol="rdma")
    copied = EngineHostPool(page_size=one.storage.identity.page_size)
    copied.layout = one.storage.identity.layout
    with pytest.raises(InvalidPoolError, match=r"no addresses in host memory.*page_first"):
        one.driver.register_mem_host_pool_v2(copied, "kv")
    assert one.driver.pools["kv"].namespace.geometry == one.pool.geometry
    one.storage.close()


def test_memory_that_the_transport_refuses(registering, monkeypatch):
    """The pool is refused, and what was there before stays."""
    one = registering
    register(one, one.pool)
    handle, before, known = one.driver.handle, regions(one), dict(registered(one))
    with monkeypatch.context() as refusing:
        refusing.setattr(handle._connection, "register", lambda start, size: False)
        with pytest.raises(
            InvalidPoolError,
            match=r"pool 'kv': 2 bytes of it cannot be registered for rdma.*ulimit -l",
        ):
            handle.register("kv", [(1, 2)], None)
    assert regions(one) == before
    assert registered(one) == known


def test_a_page_larger_than_a_buffer(rig, monkeypatch):
    monkeypatch.setattr(driver_module, "BUFFER_BYTES", 8192)
    one = rig()
    with pytest.raises(
        InvalidPoolError,
        match=r"pool 'kv': a page and its envelope have 9064 bytes, and over tcp 8192",
    ):
        one.storage.register_mem_host_pool_v2(BytePool(components=(9000,)), "kv")
    assert one.put(["fits"]) == [True]
    one.expect(["fits"])
