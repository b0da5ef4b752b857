"""Removals over `ObjectStorage` beside the suite's `RemovalCases`: pools, damaged pages, faults."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

import pytest

from hicache_storage.layers import StorageOptions, wrap
from hicache_storage.spec import (
    HiCacheStorageExtraInfo,
    InvalidTransferError,
    RemovalReason,
    RemovalScope,
    StorageClosedError,
    UnsupportedOperationError,
)
from hicache_storage.testing import BytePool, MemoryStorage
from hicache_storage.testing.storage import CAPABILITIES
from tests.support.failing import failing

KEYS = ["a", "b", "c"]


def stored(storage, pool, keys=KEYS, name="kv"):
    transfer = pool.transfer(name, keys, range(len(keys)))
    assert storage.batch_set_v2([transfer])[name] == [True] * len(keys)


def keys_of(answer):
    return [(str(one.pool), one.key) for one in answer.removed]


@pytest.fixture
def filled(kit):
    storage, pool = kit.memory_storage()
    stored(storage, pool)
    return storage, storage.removals()


def test_a_pool_that_is_registered_later_may_have_lost_some(filled):
    storage, first = filled
    pool = BytePool()
    storage.register_mem_host_pool_v2(pool, "mamba")
    stored(storage, pool, ["m"], "mamba")
    answer = storage.removals(first.cursor)
    assert answer.lost
    storage.delete(["m"], pool="mamba")
    answer = storage.removals(answer.cursor)
    assert keys_of(answer) == [("mamba", "m")]
    assert not answer.lost


def test_a_page_that_is_found_damaged_is_reported(filled):
    storage, first = filled
    name = next(iter(storage.objects))
    storage.objects[name] = storage.objects[name][:-1]
    transfer = BytePool().transfer("kv", KEYS, range(len(KEYS)))
    [answers] = storage.batch_get_v2([transfer]).values()
    assert answers.count(False) == 1
    answer = storage.removals(first.cursor)
    assert [(one.key, one.reason) for one in answer.removed] == [
        (KEYS[answers.index(False)], RemovalReason.DAMAGED)
    ]
    assert storage.removals(answer.cursor).removed == []


def test_a_fault_leaves_the_cursor_and_the_next_call_catches_up(filled):
    storage, first = filled
    storage.delete(["a"])
    storage.before, faults = failing(OSError("away")), storage.fault_count()
    assert storage.removals(first.cursor) == replace(first, removed=[])
    assert storage.fault_count() == faults + 1
    assert storage.removals().cursor == 0
    storage.before = lambda operation: None
    [told] = storage.removals(first.cursor).removed
    assert (told.key, told.reason) == ("a", RemovalReason.DELETED)
    assert told.seconds > 0
    assert str(os.getpid()) in told.by
    # The watch of the listener that was not answered has not begun.
    assert storage.removals(0).lost


def test_a_call_that_hangs_ends_at_its_deadline_and_keeps_no_other(kit):
    driver = MemoryStorage(kit.identity(), capabilities=replace(CAPABILITIES, may_hang=True))
    storage, pool = wrap(driver, StorageOptions(deadline_seconds=60)), BytePool()
    storage.register_mem_host_pool_v2(pool, "kv")
    stored(storage, pool)
    first = storage.removals()
    storage.delete(["a"])
    release, hangs = threading.Event(), threading.Event()

    def hang(operation):
        if operation == "removals" and not hangs.is_set():
            hangs.set()
            release.wait(60)

    driver.before = hang
    short = HiCacheStorageExtraInfo(deadline_seconds=0.2)
    assert storage.removals(first.cursor, extra_info=short) == first
    # The lock is still held by the first: this one is late, too, and sees no other fault.
    assert storage.removals(first.cursor, extra_info=short) == first
    assert storage.get_stats().deadlines_missed >= 1
    release.set()
    assert keys_of(storage.removals(first.cursor)) == [("kv", "a")]
    storage.close()


def test_misuse(filled, kit):
    storage, first = filled
    for cursor in ("1", 1.0, True):
        with pytest.raises(InvalidTransferError, match="since must be the cursor"):
            wrap(storage, StorageOptions()).removals(cursor)
    passed = HiCacheStorageExtraInfo(deadline_seconds=0)
    assert storage.removals(first.cursor, extra_info=passed) == first
    silent, _ = kit.memory_storage(capabilities=replace(CAPABILITIES, removals=RemovalScope.NONE))
    with pytest.raises(UnsupportedOperationError, match="'removals'"):
        wrap(silent, StorageOptions()).removals()
    storage.close()
    with pytest.raises(StorageClosedError):
        storage.removals(first.cursor)


def test_without_a_listener_nothing_is_kept(kit):
    storage, pool = kit.memory_storage()
    stored(storage, pool)
    storage.delete(KEYS)
    assert "removals" not in storage.operations


def test_an_instance_reports_no_more_than_its_driver():
    weak = replace(CAPABILITIES, removals=RemovalScope.PROCESS)
    strong = replace(CAPABILITIES, removals=RemovalScope.STORE)
    assert strong.exceeding(weak) == ["removals=store"]
    assert weak.exceeding(strong) == []
