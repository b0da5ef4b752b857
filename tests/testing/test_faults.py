"""Faults around a storage: what an engine sees of them, and that they stay within the contract."""

from __future__ import annotations

import math
import threading

import pytest

from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.spec import (
    ConfigError,
    HiCacheStorageExtraInfo,
    StorageTimeoutError,
    StorageUnavailableError,
    UnknownPoolError,
)
from hicache_storage.testing import FaultLayer, FaultOptions
from tests.support.waiting import eventually

KEYS = [f"page{number}" for number in range(6)]
PLACES = list(range(6))


@pytest.fixture
def around(kit):
    """A layer around a dict that has the pages of KEYS, its pool, and the dict's storage."""

    def make(**options):
        storage, _ = kit.memory_storage()
        layer = FaultLayer(storage, FaultOptions(**options))
        pool = kit.pool()
        layer.register_mem_host_pool_v2(pool, "kv")
        layer.open()
        for place in PLACES:
            pool.fill(place, place)
        assert storage.batch_set_v2([pool.transfer("kv", KEYS, PLACES)])["kv"] == [True] * 6
        storage.operations.clear()
        return layer, pool, storage

    return make


def _calls(layer, pool, rounds=20):
    """Answers of some calls."""
    return [
        (
            layer.batch_exists_v2(KEYS).kv_hit_pages,
            layer.batch_get_v2([pool.transfer("kv", KEYS, PLACES)])["kv"],
            layer.batch_set_v2([pool.transfer("kv", KEYS, PLACES)])["kv"],
        )
        for _ in range(rounds)
    ]


def test_without_probabilities_nothing_happens(around):
    layer, pool, _ = around()
    assert _calls(layer, pool) == [(6, [True] * 6, [True] * 6)] * 20
    assert not layer.injected
    assert not layer.capabilities.may_hang


def test_the_same_seed_brings_the_same_faults(around):
    def answers(seed):
        layer, pool, _ = around(seed=seed, failure=0.3, partial=0.3)
        return _calls(layer, pool), layer.injected

    assert answers(1) == answers(1)
    assert answers(1) != answers(2)


def test_a_failure_is_a_counted_miss_and_half_of_them_have_reached_the_storage(around):
    layer, pool, storage = around(failure=1.0)
    assert _calls(layer, pool) == [(0, [False] * 6, [False] * 6)] * 20
    assert layer.fault_count() == layer.get_stats().faults == layer.injected["failure"] == 60
    assert 10 < len(storage.operations) < 60


def test_of_a_partial_answer_every_hit_is_right(around):
    layer, pool, _ = around(partial=1.0)
    for number in range(20):
        contents = [pool.fill(place, place) for place in PLACES]
        assert layer.batch_exists_v2(KEYS).kv_hit_pages < 6
        for place in PLACES:
            pool.fill(place, 100 + number)
        found = layer.batch_get_v2([pool.transfer("kv", KEYS, PLACES)])["kv"]
        assert False in found
        assert all(pool.page(place) == contents[place] for place in PLACES if found[place])


def test_a_hang_ends_when_told_and_is_a_miss(around):
    layer, pool, storage = around(hang=1.0)
    answers = []
    call = threading.Thread(
        target=lambda: answers.extend(layer.batch_get_v2([pool.transfer("kv", KEYS, PLACES)])["kv"])
    )
    call.start()
    eventually(lambda: layer.injected["hang"])
    call.join(0.05)
    assert call.is_alive()
    layer.disable()
    call.join()
    assert answers == [False] * 6
    assert not storage.operations
    assert layer.fault_count() == 1
    assert layer.batch_get_v2([pool.transfer("kv", KEYS, PLACES)])["kv"] == [True] * 6


def test_closing_lets_go_what_hangs(around):
    layer, *_ = around(hang=1.0)
    call = threading.Thread(target=lambda: layer.batch_exists_v2(KEYS))
    call.start()
    eventually(lambda: layer.injected["hang"])
    layer.close()
    call.join(60)
    assert not call.is_alive()


def test_under_a_deadline_a_hang_is_a_miss_in_time(kit):
    storage, _ = kit.memory_storage()
    layer = FaultLayer(storage, FaultOptions(hang=1.0))
    guarded = wrap(layer, StorageOptions(deadline_seconds=60, breaker_threshold=0))
    guarded.register_mem_host_pool_v2(kit.pool(), "kv")
    guarded.open()
    info = HiCacheStorageExtraInfo(deadline_seconds=0.05)
    assert guarded.batch_exists_v2(KEYS, None, info).kv_hit_pages == 0
    assert guarded.get_stats().deadlines_missed == 1
    layer.disable()
    guarded.close()


def test_a_delay_eats_into_the_deadline(around):
    layer, _, storage = around(delay=1.0, delay_seconds=0.1)
    told = []
    inner = storage.batch_exists_v2
    storage.batch_exists_v2 = lambda keys, pools, info: (
        told.append(info.deadline_seconds) or inner(keys, pools, info)
    )
    for seconds, hits in ((30.0, 6), (1e-6, 0)):
        info = HiCacheStorageExtraInfo(deadline_seconds=seconds)
        assert layer.batch_exists_v2(KEYS, None, info).kv_hit_pages == hits
    assert told[0] < 30.0
    assert len(told) == 1
    assert layer.injected == {"delay": 2}


def test_misuse_is_told_all_the_same(around):
    layer, pool, _ = around(failure=1.0)
    with pytest.raises(UnknownPoolError):
        layer.batch_get_v2([pool.transfer("swa", ["a"], [0])])


@pytest.mark.parametrize(
    "options",
    [
        *({"hang": 1.1}, {"failure": -0.1}, {"delay_seconds": -1}),
        *({"hang_seconds": seconds} for seconds in (-0.1, math.nan, math.inf)),
    ],
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ConfigError):
        FaultOptions(**options)


def test_a_clear_that_fails_raises_whether_it_has_happened_or_not(around):
    """LC-7, as a store is: half of the failures are answers that were lost."""
    outcomes = set()
    for seed in range(20):
        layer, _pool, storage = around(seed=seed, failure=1.0)
        with pytest.raises(StorageUnavailableError):
            layer.clear()
        outcomes.add(bool(storage.objects))
    assert outcomes == {True, False}


def test_a_clear_that_hangs_raises_in_the_end(around):
    layer, _pool, storage = around(hang=1.0, hang_seconds=0.01)
    with pytest.raises(StorageTimeoutError):
        layer.clear()
    assert storage.objects
