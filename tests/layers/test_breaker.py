"""The circuit breaker: closed, open, half-open; misuse is told in every state."""

from __future__ import annotations

import threading

import pytest

from hicache_storage.layers import BreakerState, CircuitBreaker, CircuitBreakerLayer
from hicache_storage.spec import InvalidTransferError, PoolTransfer, StorageClosedError, StorageUnavailableError, UnknownPoolError


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def broken(kit):
    """A storage that fails while `down` is set, behind a breaker of three faults and ten seconds."""
    storage, pool = kit.dict_storage()
    down = threading.Event()

    def before(operation):
        if down.is_set():
            raise OSError("down")

    storage.open()
    storage.before = before
    clock = Clock()
    layer = CircuitBreakerLayer(storage, CircuitBreaker(3, 10.0, clock))
    layer.register_mem_host_pool_v2(pool, "kv")
    return layer, storage, pool, down, clock


def test_opens_after_a_row_of_faults_and_leaves_the_store_alone(broken):
    layer, storage, pool, down, _clock = broken
    down.set()
    for _ in range(3):
        assert layer.batch_exists_v2(["a"]).kv_hit_pages == 0
    asked = len(storage.asked)
    assert layer.batch_get_v2([pool.transfer("kv", ["a", "b"], [0, 1])]) == {"kv": [False, False]}
    assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
    result = layer.batch_exists_v2(["a"], [PoolTransfer("mamba")])
    assert (result.kv_hit_pages, result.extra_pool_hit_pages) == (0, {"kv": 0, "mamba": 0})
    assert len(storage.asked) == asked
    stats = layer.get_stats()
    assert (stats.breaker_state, stats.breaker_refusals, stats.faults) == ("open", 3, 3)


def test_a_success_in_between_starts_the_row_again(broken):
    layer, _, _, down, _ = broken
    for _ in range(5):
        down.set()
        layer.batch_exists_v2(["a"])
        layer.batch_exists_v2(["a"])
        down.clear()
        layer.batch_exists_v2(["a"])
    assert layer.breaker.state is BreakerState.CLOSED


def test_half_open_closes_after_one_good_call(broken):
    layer, _storage, pool, down, clock = broken
    down.set()
    for _ in range(3):
        layer.batch_exists_v2(["a"])
    clock.now = 9.9
    down.clear()
    assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
    clock.now = 10.0
    assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
    assert layer.breaker.state is BreakerState.CLOSED


def test_half_open_opens_again_after_one_bad_call(broken):
    layer, _, _, down, clock = broken
    down.set()
    for _ in range(3):
        layer.batch_exists_v2(["a"])
    clock.now = 10.0
    layer.batch_exists_v2(["a"])
    assert layer.breaker.state is BreakerState.OPEN
    clock.now = 19.9
    assert not layer.breaker.admits()
    clock.now = 20.0
    assert layer.breaker.admits()


def test_half_open_lets_one_caller_through():
    clock = Clock()
    breaker = CircuitBreaker(1, 1.0, clock)
    breaker.failed()
    clock.now = 1.0
    assert [breaker.admits() for _ in range(5)] == [True, False, False, False, False]
    breaker.succeeded()
    assert breaker.admits()


def test_misuse_is_told_while_open_and_does_not_block_half_open(broken):
    layer, _, pool, down, clock = broken
    down.set()
    for _ in range(3):
        layer.batch_exists_v2(["a"])
    with pytest.raises(UnknownPoolError):
        layer.batch_get_v2([pool.transfer("swa", ["a"], [0])])
    with pytest.raises(InvalidTransferError):
        layer.batch_exists_v2(["a\0"])
    down.clear()
    clock.now = 10.0
    with pytest.raises(UnknownPoolError):
        layer.batch_get_v2([pool.transfer("swa", ["a"], [0])])
    assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}


def test_a_clear_is_asked_of_the_store_in_every_state(broken):
    """LC-7: an operator's request is not answered by what the data path has met; nor does it decide about that."""
    layer, storage, pool, down, _clock = broken
    assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
    down.set()
    for _ in range(3):
        layer.batch_exists_v2(["a"])
    with pytest.raises(StorageUnavailableError, match="down"):
        layer.clear()
    down.clear()
    layer.clear()
    assert not storage.objects
    assert layer.breaker.state is BreakerState.OPEN


def test_closed_is_told_while_open(broken):
    layer, _, _, down, _ = broken
    down.set()
    for _ in range(3):
        layer.batch_exists_v2(["a"])
    layer.close()
    with pytest.raises(StorageClosedError):
        layer.batch_exists_v2(["a"])
