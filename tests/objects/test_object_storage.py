"""`ObjectStorage` on three methods of a driver: results, deduplication, writers of replicas,
statistics."""

from __future__ import annotations

import logging
import sys
import threading

import pytest

from hicache_storage.objects import recorder
from hicache_storage.spec import (
    HiCacheStorageExtraInfo,
    PoolTransfer,
)
from tests.objects.storing import stored


def test_round_trip_with_holes_in_the_middle(kit):
    storage, pool = kit.memory_storage()
    a, c = pool.fill(0, 1), pool.fill(1, 3)
    stored(storage, pool, ["a"], [0])
    pool.memory[:] = bytes(len(pool.memory))
    pool.fill(1, 3)
    assert storage.batch_set_v2([pool.transfer("kv", ["c"], [1])]) == {"kv": [True]}
    pool.memory[:] = bytes(len(pool.memory))
    assert storage.batch_get_v2([pool.transfer("kv", ["a", "b", "c"], [4, 5, 6])]) == {
        "kv": [True, False, True]
    }
    assert (pool.page(4), pool.page(6)) == (a, c)
    untouched = bytes(pool.geometry.page_bytes)
    assert [pool.page(index) for index in (0, 1, 2, 3, 7)] == [untouched] * 5


def test_a_duplicate_key_is_written_once_and_answered_twice(kit):
    storage, pool = kit.memory_storage()
    first = pool.fill(0, 1)
    pool.fill(1, 2)
    assert storage.batch_set_v2([pool.transfer("kv", ["a", "a"], [0, 1])]) == {"kv": [True, True]}
    assert len(storage.objects) == 1
    assert storage.batch_get_v2([pool.transfer("kv", ["a", "a"], [2, 3])]) == {"kv": [True, True]}
    assert pool.page(2) == pool.page(3) == first


def test_an_existing_key_is_not_written_again(kit):
    storage, pool = kit.memory_storage()
    stored(storage, pool, ["a"], [0])
    storage.operations.clear()
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [True]}
    assert "write" not in storage.operations


class TestDriversThatFindWhatExists:
    def test_they_are_not_asked_before(self, kit, finding):
        storage, pool = finding()
        first = pool.fill(0, 1)
        pool.fill(1, 2)
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
        assert storage.batch_set_v2([pool.transfer("kv", ["b", "a", "b"], [1, 1, 0])]) == {
            "kv": [True] * 3
        }
        assert storage.operations == ["connect", "write", "write"]
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [3])]) == {"kv": [True]}
        assert pool.page(3) == first
        stats = storage.get_stats().pools["kv"]
        assert (stats.pages_written, stats.bytes_written, stats.pages_refused) == (
            2,
            2 * pool.geometry.page_bytes,
            0,
        )

    def test_a_rank_that_does_not_write_asks(self, kit, finding):
        storage, pool = finding(identity=kit.identity(kv_replicated=True, tp_rank=1, tp_size=2))
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
        assert storage.operations == ["connect", "exist"]

    @pytest.fixture
    def finding(self, kit, monkeypatch):
        """Makes storages of a driver that leaves out by itself what is there."""

        def write(storage, batches, call):
            storage._record("write")
            for each in (each for batch in batches for each in batch.writes):
                name = each.namespace.object_name(each.key)
                each.existed = name in storage.objects
                storage.objects.setdefault(name, each.tobytes())
            return [[True] * len(batch.writes) for batch in batches]

        monkeypatch.setattr(kit.storage, "write_objects", write)
        monkeypatch.setattr(kit.storage, "writes_find_existing", True)
        return kit.memory_storage


def test_two_transfers_of_one_pool_answer_in_one_list(kit):
    storage, pool = kit.memory_storage()
    stored(storage, pool, ["a", "b"], [0, 1])
    answer = storage.batch_get_v2(
        [pool.transfer("kv", ["a"], [2]), pool.transfer("kv", ["x", "b"], [3, 4])]
    )
    assert answer == {"kv": [True, False, True]}


def test_a_registered_pool_tells_its_namespace(kit, caplog):
    with caplog.at_level(logging.INFO):
        storage, _ = kit.memory_storage()
    [line] = [
        record.getMessage() for record in caplog.records if "namespace" in record.getMessage()
    ]
    assert line.endswith(storage.pools["kv"].namespace.name)
    assert f"pool kv of model {storage.identity.model!r}" in line


def test_empty_batches(kit):
    storage, _pool = kit.memory_storage()
    assert storage.batch_get_v2([]) == {}
    assert storage.batch_set_v2([PoolTransfer("kv", keys=[])]) == {"kv": []}
    assert storage.batch_exists_v2([]).kv_hit_pages == 0
    assert storage.operations == []


def test_one_question_for_all_pools_of_an_exists(kit):
    storage, _pool = kit.memory_storage({name: kit.pool() for name in ("kv", "mamba", "indexer")})
    transfers = [PoolTransfer("mamba", hit_policy="trailing_pages"), PoolTransfer("indexer")]
    storage.batch_exists_v2([f"k{i}" for i in range(128)], transfers)
    assert storage.operations.count("exist") == 1


def test_an_unknown_pool_makes_the_hit_zero(kit):
    storage, pool = kit.memory_storage()
    stored(storage, pool, ["a"], [0])
    result = storage.batch_exists_v2(["a"], [PoolTransfer("mamba", hit_policy="trailing_pages")])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    assert result.extra_pool_hit_pages == {"kv": 1, "mamba": 0}


def test_derived_transfers_borrow_keys_and_indices(kit):
    storage, pool = kit.memory_storage({"kv": kit.pool(), "indexer": kit.pool(components=[16])})
    indexer = storage.pools["indexer"].access
    answer = storage.batch_set_v2(
        [pool.transfer("kv", ["a", "b"], [0, 1]), PoolTransfer("indexer", indices_from_pool="kv")]
    )
    assert answer == {"kv": [True, True], "indexer": [True, True]}
    assert indexer.geometry.page_bytes == 16


class TestWriterElection:
    def test_a_rank_that_does_not_write_answers_what_exists(self, kit):
        objects = {}
        writer = kit.storage(kit.identity(kv_replicated=True, tp_size=2), objects)
        reader = kit.storage(kit.identity(kv_replicated=True, tp_rank=1, tp_size=2), objects)
        pools = [kit.pool(), kit.pool()]
        for storage, pool in zip((writer, reader), pools, strict=True):
            storage.register_mem_host_pool_v2(pool, "kv")
            storage.register_mem_host_pool_v2(pool, "mamba")
        assert reader.batch_set_v2([pools[1].transfer("kv", ["a"], [0])]) == {"kv": [False]}
        assert not objects
        page = pools[0].fill(0, 1)
        assert writer.batch_set_v2([pools[0].transfer("kv", ["a"], [0])]) == {"kv": [True]}
        assert reader.batch_set_v2([pools[1].transfer("kv", ["a"], [0])]) == {"kv": [True]}
        assert reader.batch_get_v2([pools[1].transfer("kv", ["a"], [5])]) == {"kv": [True]}
        assert pools[1].page(5) == page
        assert reader.batch_set_v2([pools[1].transfer("mamba", ["a"], [0])]) == {"mamba": [True]}
        assert writer.batch_exists_v2(["a"], [PoolTransfer("mamba")]).kv_hit_pages == 0


def test_statistics(kit):
    storage, pool = kit.memory_storage()
    stored(storage, pool, ["a", "b"], [0, 1])
    storage.batch_exists_v2(["a", "b", "c"])
    storage.batch_get_v2([pool.transfer("kv", ["a", "c"], [2, 3])])
    stats = storage.get_stats().pools["kv"]
    page = pool.geometry.page_bytes
    assert (stats.pages_written, stats.bytes_written, stats.pages_refused) == (2, 2 * page, 0)
    assert (stats.pages_hit, stats.pages_read, stats.bytes_read, stats.pages_missed) == (
        2,
        1,
        page,
        1,
    )
    assert [stats.latency[name].calls for name in ("set", "exists", "get")] == [1, 1, 1]
    assert sum(stats.latency["get"].buckets) == 1


def test_statistics_can_be_switched_off_but_not_faults(kit):
    storage, pool = kit.memory_storage(metrics=False)
    stored(storage, pool, ["a"], [0])

    def fail(operation):
        raise OSError

    storage.before = fail
    storage.batch_exists_v2(["a"])
    assert storage.get_stats().pools == {}
    assert storage.get_stats().faults == 1


def test_a_call_is_counted_once_however_many_pages_it_has(kit):
    def counted(pages):
        storage, pool = kit.memory_storage()
        keys, entered = [f"key {page}" for page in range(pages)], []

        def note(frame, event, argument):
            if event == "call" and frame.f_code.co_filename == recorder.__file__:
                entered.append(frame.f_code.co_name)

        sys.setprofile(note)
        try:
            stored(storage, pool, keys, range(pages))
            storage.batch_exists_v2(keys)
            storage.batch_get_v2([pool.transfer("kv", keys, range(pages))])
        finally:
            sys.setprofile(None)
        return entered

    assert counted(4) == counted(1) != []


def test_pages_over_the_limit_are_refused(kit):
    from hicache_storage.spec import Capabilities

    storage, pool = kit.memory_storage(capabilities=Capabilities(max_page_bytes=10))
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
    assert storage.get_stats().pools["kv"].pages_refused == 1


def test_the_deadline_reaches_the_driver(kit):
    storage, _pool = kit.memory_storage()
    seen = []
    storage.objects_exist = lambda batches, call: (
        seen.append(call),
        [[False] * len(b.keys) for b in batches],
    )[1]
    storage.batch_exists_v2(
        ["a"],
        extra_info=HiCacheStorageExtraInfo(
            deadline_seconds=60.0, prefix_keys=["p"], request_id="r"
        ),
    )
    storage.batch_exists_v2(["a"])
    assert (seen[0].expired(), seen[0].prefix_keys, seen[0].request_id) == (False, ["p"], "r")
    assert 0.0 < seen[0].remaining() <= 60.0
    assert (seen[1].expired(), seen[1].remaining()) == (False, None)


def test_many_threads(kit):
    """CC-1: sixteen threads set, get, look up and clear; every page delivered is one that was
    written."""
    storage, _ = kit.memory_storage()
    storage.register_mem_host_pool_v2(pool := kit.pool(pages=32), "kv")
    wrong = []

    def work(number):
        for turn in range(30):
            keys = [f"{turn % 4}-{page}" for page in (0, 1)]
            pages = [2 * number, 2 * number + 1]
            written = [
                pool.fill(page, seed)
                for page, seed in zip(pages, (turn % 4, turn % 4 + 100), strict=True)
            ]
            storage.batch_set_v2([pool.transfer("kv", keys, pages)])
            got = storage.batch_get_v2([pool.transfer("kv", keys, pages)])["kv"]
            wrong.extend(
                page
                for page, ok, bytes_ in zip(pages, got, written, strict=True)
                if ok and pool.page(page) != bytes_
            )
            storage.batch_exists_v2(keys)
            if turn % 10 == 9:
                storage.clear()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert storage.get_stats().faults == 0
