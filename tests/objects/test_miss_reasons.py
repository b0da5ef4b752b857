"""Misses are counted once, by their reason, in the driver's base and in the layers above it."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.spec import HiCacheStorageExtraInfo, HungReads, StorageRefusedError
from hicache_storage.testing import BytePool, MemoryStorage
from hicache_storage.testing.storage import CAPABILITIES
from tests.objects.test_head_shards import KEYS, stored_rank
from tests.support.failing import failing
from tests.support.waiting import eventually


def reasons(storage, pool="kv"):
    """Misses of lookups and of gets so far, by reason."""
    stats = storage.get_stats().pools[pool]
    assert stats.pages_absent == sum(stats.absent.values())
    assert stats.pages_missed == sum(stats.missed.values())
    return dict(stats.absent), dict(stats.missed)


def ask(storage, pool, keys, info=None):
    """Look pages up by both calls, and get them."""
    storage.batch_exists_v2(keys, extra_info=info)
    storage.batch_present(keys, extra_info=info)
    return storage.batch_get_v2([pool.transfer("kv", keys, list(range(len(keys))))], info)["kv"]


FAULT = failing(OSError(5, "Input/output error"))


def test_hits_have_no_reason(kit):
    storage, pool = kit.memory_storage()
    storage.batch_set_v2([pool.transfer("kv", ["a"], [0])])
    assert ask(storage, pool, ["a"]) == [True]
    assert reasons(storage) == ({}, {})


@pytest.mark.parametrize(
    ("before", "reason"),
    [
        (lambda _: None, "absent"),
        (failing(StorageRefusedError("429 too_many")), "refused"),
        (FAULT, "fault"),
    ],
)
def test_what_the_store_has_answered(kit, before, reason):
    storage, pool = kit.memory_storage()
    storage.open()
    storage.before = before
    ask(storage, pool, ["a", "b"])
    assert reasons(storage) == ({reason: 4}, {reason: 2})
    # A tenant beyond its rate has no alert of faults, and opens no breaker.
    assert storage.fault_count() == (3 if reason == "fault" else 0)


def test_a_fault_of_some_pages_is_the_reason_of_the_call(kit):
    storage, pool = kit.memory_storage()
    storage.batch_set_v2([pool.transfer("kv", ["a"], [0])])
    storage.before = lambda _: storage.note_partial_faults([OSError(5, "one shard")], served=True)
    assert ask(storage, pool, ["a", "b"]) == [True, False]
    assert reasons(storage) == ({"fault": 2}, {"fault": 1})
    storage.before = lambda _: None
    ask(storage, pool, ["b"])
    assert reasons(storage)[1] == {"fault": 1, "absent": 1}


def test_a_damaged_page_has_its_reason_until_it_is_set_again(kit):
    storage, pool = kit.memory_storage()
    transfer = pool.transfer("kv", ["a"], [0])
    storage.batch_set_v2([transfer])
    (name,) = storage.objects
    storage.objects[name] = b"\0" * len(storage.objects[name])
    # The first get finds the damage, later lookups remember it.
    assert storage.batch_get_v2([transfer]) == {"kv": [False]}
    ask(storage, pool, ["a", "x"])
    assert reasons(storage) == ({"damaged": 2, "absent": 2}, {"damaged": 2, "absent": 1})
    storage.batch_set_v2([transfer])
    ask(storage, pool, ["a"])
    assert reasons(storage)[0] == {"damaged": 2, "absent": 2}


def test_a_page_without_some_of_its_shards_is_incomplete(kit):
    storage, transfer = stored_rank(kit, {}, 4)
    storage.objects.pop(next(iter(storage.objects)))
    storage.batch_present([*KEYS, "x"])
    assert storage.batch_get_v2([transfer])["kv"].count(False) == 1
    assert reasons(storage) == ({"incomplete": 1, "absent": 1}, {"incomplete": 1})


def test_a_deadline_that_has_passed(kit):
    for storage, pool in (kit.memory_storage(), layered(kit)):
        ask(storage, pool, ["a"], HiCacheStorageExtraInfo(deadline_seconds=0))
        assert reasons(storage) == ({"deadline": 2}, {"deadline": 1})


def layered(kit, **options):
    """A driver below all layers, which may hang."""
    capabilities = replace(CAPABILITIES, may_hang=True, hung_reads=HungReads.BOUNCE_BUFFER)
    driver = MemoryStorage(kit.identity(), capabilities=capabilities)
    storage = wrap(driver, StorageOptions(**options))
    pool = BytePool()
    storage.register_mem_host_pool_v2(pool, "kv")
    kit.opened.append(driver)
    return storage, pool


def test_a_late_call_is_counted_once_by_the_layer_that_has_answered(kit):
    storage, pool = layered(kit, breaker_threshold=0)
    storage.open()
    driver, ends = storage.inner, threading.Event()
    driver.before = lambda _: ends.wait(60)
    ask(storage, pool, ["a", "b"], HiCacheStorageExtraInfo(deadline_seconds=0.05))
    ends.set()
    eventually(lambda: not storage._thread_pool.hung)
    storage.close()
    assert reasons(storage) == ({"deadline": 4}, {"deadline": 2})


def test_an_open_breaker_is_the_reason(kit):
    storage, pool = layered(kit, breaker_threshold=1, breaker_cooldown_seconds=60.0)
    storage.open()
    storage.inner.inner.before = FAULT
    storage.batch_exists_v2(["a"])
    ask(storage, pool, ["a"])
    assert reasons(storage) == ({"fault": 1, "breaker": 2}, {"breaker": 1})


def test_layers_count_nothing_where_metrics_are_off(kit):
    storage, pool = layered(kit, metrics=False)
    ask(storage, pool, ["a"], HiCacheStorageExtraInfo(deadline_seconds=0))
    assert not storage.get_stats().pools
