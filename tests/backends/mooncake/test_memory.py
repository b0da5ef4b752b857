"""Registration of host pools' memory: once, with refusals, and its release after the last use."""

from __future__ import annotations

import pytest

from hicache_backends.mooncake.client.connection_handle import ConnectionHandle
from hicache_conformance.harness.pools import EngineHostPool
from hicache_storage.spec import InvalidPoolError, StorageUnavailableError
from tests.backends.file.harness import ScratchPool
from tests.backends.mooncake.harness import COMPONENTS, Rig


def registered(rig):
    """What the storage's client has registered, with how often."""
    return rig.driver.handle._connection._registered


def regions(rig, pool="kv"):
    return rig.driver.handle._pools[pool].regions


def test_memory_is_registered_once_and_let_go(rig):
    one = rig()
    one.storage.open()
    [region], known = regions(one), registered(one)
    before = len(known)
    one.storage.register_mem_host_pool_v2(one.pool, "kv")
    assert (len(known), known[region]) == (before, 1)
    one.storage.register_mem_host_pool_v2(one.pool, "draft")
    assert (len(known), known[region]) == (before, 2)
    one.storage.close()
    assert region not in known


def test_pools_that_come_before_and_after_the_connection(rig):
    one = rig()
    one.storage.register_mem_host_pool_v2(ScratchPool(4, (100,)), "swa")
    one.storage.open()
    one.storage.register_mem_host_pool_v2(ScratchPool(4, (100,)), "mamba")
    for pool in ("kv", "swa", "mamba"):
        [region] = regions(one, pool)
        assert registered(one)[region] == 1


def test_memory_that_is_replaced_stays_until_no_call_is_in_flight(rig):
    """A call may still be reading into it."""
    one = rig()
    one.storage.open()
    [former] = regions(one)
    with one.driver.handle.call():
        one.storage.register_mem_host_pool_v2(ScratchPool(8, COMPONENTS), "kv")
        [present] = regions(one)
        assert former in registered(one)
    assert former not in registered(one)
    assert present in registered(one)


def test_a_call_that_is_in_flight_at_the_end_keeps_the_memory(rig):
    one = rig()
    one.storage.open()
    handle, known, [region] = one.driver.handle, registered(one), regions(one)
    with handle.call() as connection:
        handle.close()
        assert region in known
        assert connection.exist(["nobody's"]) == [False]
        with pytest.raises(StorageUnavailableError, match="closed"), handle.call():
            pass
    assert region not in known
    # Nothing is released twice: the client is still there for the others.
    handle.close()
    two = rig()
    assert two.put(["a"]) == [True]


def test_a_connection_that_is_replaced_takes_its_registrations_along(rig, monkeypatch):
    """What another storage has registered of the same memory with the newer one stays."""
    one, two = rig(), rig()
    for each in (one, two):
        each.storage.open()
    [region], former, [others] = regions(one), registered(one), regions(two)
    with monkeypatch.context() as stale:
        stale.setattr(type(one.driver.handle._connection), "is_stale", True)
        one.driver.handle.replace_stale()
    newer = registered(one)
    assert newer is not former
    assert regions(one) == []
    assert (former.get(region), former[others], newer) == (None, 1, {})
    three = rig()
    three.storage.register_mem_host_pool_v2(one.pool, "kv")
    three.storage.open()
    assert registered(three) is newer
    for each in (one, two):
        each.storage.close()
    assert newer[region] == 1
    assert former == {}
    assert three.put(["a"]) == [True]
    three.storage.close()
    assert newer == {}


def test_a_pool_that_is_refused_changes_nothing(cluster):
    one = Rig(cluster.options, protocol="rdma")
    copied = EngineHostPool(page_size=one.storage.identity.page_size)
    copied.layout = one.storage.identity.layout
    with pytest.raises(InvalidPoolError, match=r"no addresses in host memory.*page_first"):
        one.driver.register_mem_host_pool_v2(copied, "kv")
    assert one.driver.pools["kv"].namespace.geometry == one.pool.geometry
    one.storage.close()


def test_memory_that_the_transport_refuses(rig, monkeypatch):
    """Over TCP it does not matter; elsewhere the pool is refused, and what was there before
    stays."""
    one = rig()
    one.storage.open()
    handle = one.driver.handle
    assert isinstance(handle, ConnectionHandle)
    before, known = regions(one), dict(registered(one))
    monkeypatch.setattr(handle._connection, "register", lambda start, size: False)
    handle.register("swa", [(1, 2)], None)
    assert handle._pools["swa"].regions == []
    settings = handle._connection.settings
    monkeypatch.setattr(
        handle._connection,
        "settings",
        settings.__class__(**{**as_dict(settings), "protocol": "rdma"}),
    )
    with pytest.raises(
        InvalidPoolError, match=r"pool 'kv': 2 bytes of it cannot be registered for rdma.*ulimit -l"
    ):
        handle.register("kv", [(1, 2)], None)
    assert regions(one) == before
    assert registered(one) == known
    monkeypatch.undo()


def test_a_page_larger_than_a_buffer(rig):
    one = rig(buffer_size=8192)
    with pytest.raises(
        InvalidPoolError,
        match=r"pool 'kv': a page and its envelope have 9064 bytes.*'buffer_size' is 8192",
    ):
        one.storage.register_mem_host_pool_v2(ScratchPool(4, (9000,)), "kv")
    assert one.put(["fits"]) == [True]
    one.expect(["fits"])
    rig(buffer_size=8192, hung_reads="wait").storage.register_mem_host_pool_v2(
        ScratchPool(4, (9000,)), "kv"
    )


def as_dict(settings):
    return {name: getattr(settings, name) for name in settings.__struct_fields__}
