"""Deadlines that no caller should give, and what becomes of them: passed already, too long, or no
number at all."""

from __future__ import annotations

import math
import threading

import numpy
import pytest

from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.spec import (
    AskedScope,
    Capabilities,
    ConfigError,
    HiCacheStorageExtraInfo,
    HungReads,
    InvalidTransferError,
    StorageClosedError,
    StorageTimeoutError,
    UnknownPoolError,
    seconds_since_asked,
)
from tests.support.failing import kept_calls

PAST = [0.0, -0.0, -0.5, -1.0, -1e300, -math.inf, 0, -1, -(10**400)]
NO_TIME = [math.nan, "x", "1", True, [1.0], 1j, b"1"]
TOO_LONG = [math.inf, math.nan, 1e10, threading.TIMEOUT_MAX * 2, 0, -1.0, -math.inf, "x", True]


def info(seconds):
    return HiCacheStorageExtraInfo(deadline_seconds=seconds)


@pytest.fixture(params=["may_hang", "wait", "may not", "no layer"])
def surrounded(kit, request):
    """A dict in the default layers, by which way a call takes through them."""
    storage, pool = kit.memory_storage(
        capabilities=Capabilities(
            may_hang=request.param != "may not",
            hung_reads=HungReads.WAIT if request.param == "wait" else HungReads.BOUNCE_BUFFER,
            lookup_seconds=0.01 if request.param == "wait" else None,
        )
    )
    seconds = None if request.param == "no layer" else 60.0
    layers = wrap(storage, StorageOptions(deadline_seconds=seconds, breaker_threshold=1))
    layers.register_mem_host_pool_v2(pool, "kv")
    layers.open()
    yield layers, storage, pool
    layers.close()


@pytest.mark.parametrize("seconds", PAST)
def test_a_deadline_that_has_passed_is_a_miss_at_once(surrounded, seconds):
    """An engine hands on `deadline - now`. The store is not asked, and it is no fault of the
    store."""
    layers, storage, pool = surrounded
    transfer = pool.transfer("kv", ["a"], [0])
    page = pool.fill(0, 3)
    assert layers.batch_set_v2([transfer]) == {"kv": [True]}
    storage.operations.clear()
    assert layers.batch_exists_v2(["a"], None, info(seconds)).kv_hit_pages == 0
    assert layers.batch_get_v2([pool.transfer("kv", ["a"], [1])], info(seconds)) == {"kv": [False]}
    assert layers.batch_set_v2([pool.transfer("kv", ["b"], [0])], info(seconds)) == {"kv": [False]}
    assert storage.operations == []
    assert pool.page(1) != page
    stats = layers.get_stats()
    assert (stats.faults, stats.deadlines_missed, stats.breaker_state) == (0, 0, "closed")
    with pytest.raises(UnknownPoolError):
        layers.batch_get_v2([pool.transfer("swa", ["a"], [0])], info(seconds))
    layers.close()
    with pytest.raises(StorageClosedError):
        layers.batch_exists_v2(["a"], None, info(seconds))


@pytest.mark.parametrize(
    "seconds", [math.inf, 1e308, threading.TIMEOUT_MAX, 10**30, 10**400, numpy.float32(60.0)]
)
def test_a_deadline_that_is_too_long_is_the_storages_own(surrounded, seconds):
    layers, storage, pool = surrounded
    calls = kept_calls(storage, "write_objects")
    assert layers.batch_set_v2([pool.transfer("kv", ["a"], [0])], info(seconds)) == {"kv": [True]}
    left = calls[0].remaining()
    assert left is None or left <= threading.TIMEOUT_MAX
    if layers.inner is not storage:
        assert left <= 60.0


@pytest.mark.parametrize("seconds", NO_TIME)
def test_what_is_no_time_is_misuse(seconds):
    """With NaN a get raised, and wrote its page half a second later."""
    with pytest.raises(InvalidTransferError, match="deadline_seconds must be a number of seconds"):
        info(seconds)


@pytest.mark.parametrize("name", ["deadline_seconds", "breaker_cooldown_seconds"])
@pytest.mark.parametrize("seconds", TOO_LONG)
def test_options_have_to_be_times_that_a_thread_can_wait(name, seconds):
    with pytest.raises(ConfigError, match=name):
        StorageOptions(**{name: seconds})


def test_the_max_deadline_is_one_that_a_thread_can_wait(kit):
    storage, _pool = kit.memory_storage(capabilities=Capabilities(may_hang=True))
    layers = wrap(storage, StorageOptions(deadline_seconds=threading.TIMEOUT_MAX))
    assert layers.batch_exists_v2(["a"]).kv_hit_pages == 0
    layers.close()


@pytest.mark.parametrize("threshold", [-1, 1.5, "5", None, math.nan])
def test_a_threshold_is_a_number_of_calls(threshold):
    with pytest.raises(ConfigError, match="breaker_threshold"):
        StorageOptions(breaker_threshold=threshold)


@pytest.mark.parametrize("may_hang", [False, True])
def test_a_deadline_begins_when_the_engine_asks(kit, may_hang):
    """Calls that had waited in a queue of a bridge for their whole time had it once more."""
    storage, pool = kit.memory_storage(
        capabilities=Capabilities(may_hang=may_hang, deletes=True, clears=True)
    )
    layers = wrap(storage, StorageOptions(deadline_seconds=0.001, breaker_threshold=1))
    layers.register_mem_host_pool_v2(pool, "kv")
    transfers, asked = [pool.transfer("kv", ["a"], [0])], AskedScope()
    while seconds_since_is_short(asked):
        pass
    with asked:
        assert layers.batch_exists_v2(["a"]).kv_hit_pages == 0
        assert layers.batch_present(["a"]) == [False]
        assert layers.batch_get_v2(transfers) == {"kv": [False]}
        assert layers.batch_set_v2(transfers, info(60.0)) == {"kv": [False]}
        assert layers.delete(["a"]) == [False]
        assert not layers.health().ok
        for call in (layers.clear, layers.open):
            with pytest.raises(StorageTimeoutError):
                call()
    assert storage.operations == []
    assert layers.get_stats().faults == 0
    layers.close()


def seconds_since_is_short(asked):
    with asked:
        return seconds_since_asked() <= 0.001
