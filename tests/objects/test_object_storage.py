"""What `ObjectStorage` makes of three methods: results, dedup, damage, misuse, faults, lifecycle."""

from __future__ import annotations

import logging
import os
import threading
import time

import pytest
import torch

from hicache_storage.spec import (
    HiCacheStorageExtraInfo,
    InvalidTransferError,
    PoolTransfer,
    StorageClosedError,
    StorageForkedError,
    StorageUnavailableError,
    UnknownPoolError,
    UnsupportedOperationError,
)


def stored(storage, pool, keys, pages):
    for seed, page in enumerate(pages, start=1):
        pool.fill(page, seed)
    assert storage.batch_set_v2([pool.transfer("kv", keys, pages)]) == {"kv": [True] * len(keys)}


def test_round_trip_with_holes_in_the_middle(kit):
    storage, pool = kit.dict_storage()
    a, c = pool.fill(0, 1), pool.fill(1, 3)
    stored(storage, pool, ["a"], [0])
    pool.memory[:] = bytes(len(pool.memory))
    pool.fill(1, 3)
    assert storage.batch_set_v2([pool.transfer("kv", ["c"], [1])]) == {"kv": [True]}
    pool.memory[:] = bytes(len(pool.memory))
    assert storage.batch_get_v2([pool.transfer("kv", ["a", "b", "c"], [4, 5, 6])]) == {"kv": [True, False, True]}
    assert (pool.page(4), pool.page(6)) == (a, c)
    untouched = bytes(pool.geometry.page_bytes)
    assert [pool.page(index) for index in (0, 1, 2, 3, 7)] == [untouched] * 5


def test_a_duplicate_key_is_written_once_and_answered_twice(kit):
    storage, pool = kit.dict_storage()
    first = pool.fill(0, 1)
    pool.fill(1, 2)
    assert storage.batch_set_v2([pool.transfer("kv", ["a", "a"], [0, 1])]) == {"kv": [True, True]}
    assert len(storage.objects) == 1
    assert storage.batch_get_v2([pool.transfer("kv", ["a", "a"], [2, 3])]) == {"kv": [True, True]}
    assert pool.page(2) == pool.page(3) == first


def test_an_existing_key_is_not_written_again(kit):
    storage, pool = kit.dict_storage()
    stored(storage, pool, ["a"], [0])
    storage.asked.clear()
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [True]}
    assert "write" not in storage.asked


class TestDriversThatFindWhatExists:
    def test_they_are_not_asked_before(self, kit, finding):
        storage, pool = finding()
        first = pool.fill(0, 1)
        pool.fill(1, 2)
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
        assert storage.batch_set_v2([pool.transfer("kv", ["b", "a", "b"], [1, 1, 0])]) == {"kv": [True] * 3}
        assert storage.asked == ["connect", "write", "write"]
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [3])]) == {"kv": [True]}
        assert pool.page(3) == first
        stats = storage.get_stats().pools["kv"]
        assert (stats.pages_written, stats.bytes_written, stats.pages_refused) == (2, 2 * pool.geometry.page_bytes, 0)

    def test_a_rank_that_does_not_write_asks(self, kit, finding):
        storage, pool = finding(identity=kit.identity(kv_replicated=True, tp_rank=1, tp_size=2))
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
        assert storage.asked == ["connect", "exist"]

    @pytest.fixture
    def finding(self, kit, monkeypatch):
        """Makes storages of a driver that leaves out by itself what is there."""

        def write(storage, batches, call):
            storage._note("write")
            for each in (each for batch in batches for each in batch.writes):
                name = each.namespace.object_name(each.key)
                each.existed = name in storage.objects
                storage.objects.setdefault(name, each.tobytes())
            return [[True] * len(batch.writes) for batch in batches]

        monkeypatch.setattr(kit.storage, "write_objects", write)
        monkeypatch.setattr(kit.storage, "writes_find_existing", True)
        return kit.dict_storage


def test_two_transfers_of_one_pool_answer_in_one_list(kit):
    storage, pool = kit.dict_storage()
    stored(storage, pool, ["a", "b"], [0, 1])
    answer = storage.batch_get_v2([pool.transfer("kv", ["a"], [2]), pool.transfer("kv", ["x", "b"], [3, 4])])
    assert answer == {"kv": [True, False, True]}


def test_empty_batches(kit):
    storage, _pool = kit.dict_storage()
    assert storage.batch_get_v2([]) == {}
    assert storage.batch_set_v2([PoolTransfer("kv", keys=[])]) == {"kv": []}
    assert storage.batch_exists_v2([]).kv_hit_pages == 0
    assert storage.asked == []


def test_one_question_for_all_pools_of_an_exists(kit):
    storage, _pool = kit.dict_storage({name: kit.pool() for name in ("kv", "mamba", "indexer")})
    transfers = [PoolTransfer("mamba", hit_policy="trailing_pages"), PoolTransfer("indexer")]
    storage.batch_exists_v2([f"k{i}" for i in range(128)], transfers)
    assert storage.asked.count("exist") == 1


def test_an_unknown_pool_makes_the_hit_zero(kit):
    storage, pool = kit.dict_storage()
    stored(storage, pool, ["a"], [0])
    result = storage.batch_exists_v2(["a"], [PoolTransfer("mamba", hit_policy="trailing_pages")])
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (0, [])
    assert result.extra_pool_hit_pages == {"kv": 1, "mamba": 0}


def test_derived_transfers_borrow_keys_and_indices(kit):
    storage, pool = kit.dict_storage({"kv": kit.pool(), "indexer": kit.pool(components=[16])})
    indexer = storage.pools["indexer"].access
    answer = storage.batch_set_v2([pool.transfer("kv", ["a", "b"], [0, 1]), PoolTransfer("indexer", indices_from_pool="kv")])
    assert answer == {"kv": [True, True], "indexer": [True, True]}
    assert indexer.geometry.page_bytes == 16


class TestDamage:
    @pytest.mark.parametrize("what", ["bit", "short", "long", "other key", "other pool", "empty"])
    def test_a_damaged_page_is_a_miss_until_it_is_set_again(self, kit, what, caplog):
        storage, pool = kit.dict_storage({"kv": kit.pool(), "mamba": kit.pool()})
        stored(storage, pool, ["a", "b"], [0, 1])
        name = storage.pools["kv"].namespace.object_name("a")
        other = storage.pools["kv"].namespace.object_name("b")
        storage.batch_set_v2([pool.transfer("mamba", ["a"], [0])])
        payload = storage.objects[name]
        storage.objects[name] = {
            "bit": bytes([payload[0] ^ 1]) + payload[1:],
            "short": payload[:-1],
            "long": payload + b"\0",
            "other key": storage.objects[other],
            "other pool": storage.objects[storage.pools["mamba"].namespace.object_name("a")],
            "empty": b"",
        }[what]
        with caplog.at_level(logging.WARNING):
            assert storage.batch_get_v2([pool.transfer("kv", ["a", "b"], [4, 5])]) == {"kv": [False, True]}
        assert "1 damaged pages in pool kv, first 'a'" in caplog.text
        assert storage.get_stats().pools["kv"].pages_damaged == 1
        assert storage.batch_exists_v2(["a", "b"]).kv_hit_pages == 0
        again = pool.fill(0, 9)
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
        assert storage.batch_exists_v2(["a", "b"]).kv_hit_pages == 2
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [6])]) == {"kv": [True]}
        assert pool.page(6) == again

    def test_it_is_reported_once_and_forgotten_when_somebody_else_repairs_it(self, kit, caplog):
        objects = {}
        mine, other = kit.storage(kit.identity(), objects), kit.storage(kit.identity(), objects)
        pool = kit.pool()
        for storage in (mine, other):
            storage.register_mem_host_pool_v2(pool, "kv")
        stored(mine, pool, ["a"], [0])
        (name,) = objects
        good, objects[name] = objects[name], objects[name][:-1]
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                assert mine.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [False]}
        assert caplog.text.count("damaged pages") == 1
        assert mine.get_stats().pools["kv"].pages_damaged == 1
        objects[name] = good
        assert mine.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [True]}
        assert mine.batch_exists_v2(["a"]).kv_hit_pages == 1

    def test_a_driver_that_discards_leaves_nothing_to_remember(self, kit):
        storage, pool = kit.dict_storage()
        stored(storage, pool, ["a"], [0])
        (name,) = storage.objects
        storage.objects[name] = b"torn"
        storage.discard_objects = lambda batches, call: storage.objects.pop(name) is not None
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [False]}
        storage.objects[name] = b"written by somebody else"
        assert storage.batch_exists_v2(["a"]).kv_hit_pages == 1

    def test_without_checksums_the_rest_is_still_verified(self, kit):
        storage, pool = kit.dict_storage(verifies_checksums=False)
        stored(storage, pool, ["a", "b"], [0, 1])
        names = [storage.pools["kv"].namespace.object_name(key) for key in "ab"]
        flipped = bytes([storage.objects[names[0]][0] ^ 1]) + storage.objects[names[0]][1:]
        storage.objects[names[0]] = flipped
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [True]}
        storage.objects[names[0]] = storage.objects[names[1]]
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [False]}
        assert storage.get_stats().verifies_checksums is False


class TestMisuse:
    """FT-2: told by name, before the driver is asked anything."""

    @pytest.mark.parametrize(
        ("transfer", "message"),
        [
            (PoolTransfer("mamba", torch.arange(2), keys=["a"]), "'mamba' is not registered; registered: kv"),
            (PoolTransfer("kv", torch.arange(2)), "keys is None"),
            (PoolTransfer("kv", torch.arange(2), keys="a"), "keys is one text"),
            (PoolTransfer("kv", torch.arange(2), keys=[b"a"]), "keys must be text, got bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=["a" * 513]), "513 bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=["ä" * 257]), "514 bytes"),
            (PoolTransfer("kv", torch.arange(2), keys=["a\0"]), "contains NUL"),
            (PoolTransfer("kv", torch.arange(2), keys=["\ud800"]), "lone surrogate"),
            (PoolTransfer("kv", None, keys=["a"]), "host_indices is None; pass 2 slots for 1 keys"),
            (PoolTransfer("kv", torch.arange(2, dtype=torch.int32), keys=["a"]), "int64 tensor, got torch.int32"),
            (PoolTransfer("kv", [0, 1], keys=["a"]), "int64 tensor, got list"),
            (PoolTransfer("kv", torch.arange(2), keys=["a", "b"]), "2 keys x 2 slots = 4 entries"),
            (PoolTransfer("kv", torch.arange(4), keys=["a"]), "1 keys x 2 slots = 2 entries"),
            (PoolTransfer("kv", torch.arange(4).view(2, 2), keys=["a", "b"]), "in one dimension"),
            (PoolTransfer("kv", torch.tensor([1, 0]), keys=["a"]), "2 consecutive slots"),
            (PoolTransfer("kv", torch.tensor([1, 2]), keys=["a"]), "multiples of 2"),
            (PoolTransfer("kv", torch.tensor([16, 17]), keys=["a"]), r"in \[0, 16\)"),
            (PoolTransfer("kv", torch.tensor([-2, -1]), keys=["a"]), r"in \[0, 16\)"),
            (PoolTransfer("kv", indices_from_pool="swa", keys=["a"]), "indices_from_pool names 'swa'"),
        ],
    )
    @pytest.mark.parametrize("operation", ["batch_get_v2", "batch_set_v2"])
    def test_bad_transfers(self, kit, operation, transfer, message):
        storage, pool = kit.dict_storage()
        good = pool.transfer("kv", ["good"], [3])
        with pytest.raises(InvalidTransferError, match=message):
            getattr(storage, operation)([good, transfer])
        assert storage.asked == []

    def test_a_page_read_into_twice(self, kit):
        storage, pool = kit.dict_storage()
        with pytest.raises(InvalidTransferError, match="name a page twice"):
            storage.batch_get_v2([pool.transfer("kv", ["a"], [0]), pool.transfer("kv", ["b"], [0])])

    def test_a_device_tensor_of_indices(self, kit):
        storage, _pool = kit.dict_storage()
        indices = torch.arange(2, device="meta")
        with pytest.raises(InvalidTransferError, match="must be on the CPU, got meta"):
            storage.batch_get_v2([PoolTransfer("kv", indices, keys=["a"])])

    def test_strided_indices_are_fine(self, kit):
        storage, _pool = kit.dict_storage()
        indices = torch.tensor([[0, 9], [1, 9], [2, 9], [3, 9]])[:, 0]
        assert storage.batch_set_v2([PoolTransfer("kv", indices, keys=["a", "b"])]) == {"kv": [True, True]}

    def test_operations_that_are_not_declared(self, kit):
        from hicache_storage.spec import Capabilities

        storage, _pool = kit.dict_storage(capabilities=Capabilities())
        with pytest.raises(UnsupportedOperationError, match="'deletes'"):
            storage.delete(["a"])
        with pytest.raises(UnsupportedOperationError, match="'clears'"):
            storage.clear()

    def test_delete_in_an_unknown_pool(self, kit):
        storage, _ = kit.dict_storage()
        with pytest.raises(UnknownPoolError, match="swa"):
            storage.delete(["a"], pool="swa")


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


class TestFaults:
    """FT-1: whatever the driver raises is a miss, counted, and logged once for each episode."""

    @pytest.mark.parametrize("error", [OSError(5, "I/O error"), StorageUnavailableError("down"), KeyError("bug"), EOFError()])
    def test_a_failing_driver_is_a_miss(self, kit, error, caplog):
        storage, pool = kit.dict_storage()
        stored(storage, pool, ["a"], [0])

        def fail(operation):
            raise error

        storage.before = fail
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert storage.batch_exists_v2(["a"]).kv_hit_pages == 0
                assert storage.batch_get_v2([pool.transfer("kv", ["a", "b"], [1, 2])]) == {"kv": [False, False]}
                assert storage.batch_set_v2([pool.transfer("kv", ["c"], [1])]) == {"kv": [False]}
            assert caplog.text.count("answering misses") == 1
            faults = storage.get_stats().faults
            assert faults == storage.fault_count() > 6
            storage.before = lambda operation: None
            assert storage.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [True]}
            assert caplog.text.count("serving again") == 1

    @pytest.mark.parametrize("failing", ["read", "write"])
    def test_lookups_that_serve_do_not_end_the_episode_of_others(self, kit, failing, caplog):
        storage, pool = kit.dict_storage()
        stored(storage, pool, ["a"], [0])

        def fail(operation):
            if operation == failing:
                raise OSError(28, "No space left on device")

        storage.before = fail
        with caplog.at_level(logging.INFO):
            for number in range(3):
                assert storage.batch_exists_v2(["a"]).kv_hit_pages == 1
                storage.batch_get_v2([pool.transfer("kv", ["a"], [1])])
                storage.batch_set_v2([pool.transfer("kv", [f"new{number}"], [1])])
            assert caplog.text.count("answering misses") == 1
            assert "serving again" not in caplog.text

    def test_reads_of_nothing_do_not_end_the_episode_of_reads(self, kit, caplog):
        """A driver that knows that a page is not there does not touch what fails."""
        storage, pool = kit.dict_storage()
        stored(storage, pool, ["a"], [0])
        real = storage.read_objects

        def fail(batches, call):
            if any(read.key == "a" for batch in batches for read in batch.reads):
                raise OSError(5, "I/O error")
            return real(batches, call)

        storage.read_objects = fail
        with caplog.at_level(logging.INFO):
            for _ in range(3):
                assert storage.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [False]}
                assert storage.batch_get_v2([pool.transfer("kv", ["nowhere"], [1])]) == {"kv": [False]}
            assert caplog.text.count("answering misses") == 1
            storage.read_objects = real
            assert storage.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [True]}
            assert caplog.text.count("serving again") == 1

    def test_an_answer_of_the_wrong_length(self, kit):
        storage, _pool = kit.dict_storage()
        storage.objects_exist = lambda batches, call: [[True]]
        assert storage.batch_exists_v2(["a", "b"]).kv_hit_pages == 0
        assert storage.get_stats().faults == 1

    def test_connecting_fails_and_is_tried_again(self, kit, monkeypatch):
        storage, pool = kit.dict_storage()

        def down(operation):
            if operation == "connect":
                raise OSError("no route")

        storage.before = down
        with pytest.raises(StorageUnavailableError, match="no route"):
            storage.open()
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
        assert storage.health().ok is False
        storage.before = lambda operation: None
        monkeypatch.setattr("hicache_storage.objects.lifecycle.OPEN_RETRY_SECONDS", 0)
        storage.open()
        assert storage.health().ok
        assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}

    def test_an_absent_store_is_not_asked_at_every_call(self, kit):
        storage, _pool = kit.dict_storage()

        def down(operation):
            raise OSError("down")

        storage.before = down
        for _ in range(5):
            storage.batch_exists_v2(["a"])
        assert storage.asked == ["connect"]


class TestLifecycle:
    def test_nothing_happens_before_the_first_call(self, kit):
        storage, _ = kit.dict_storage()
        assert storage.asked == []
        storage.batch_exists_v2(["a"])
        assert storage.asked == ["connect", "exist"]

    def test_closed_once_and_refused_afterwards(self, kit):
        storage, pool = kit.dict_storage()
        storage.open()
        storage.close()
        storage.close()
        assert storage.asked == ["connect", "disconnect"]
        for call in (
            lambda: storage.batch_exists_v2(["a"]),
            lambda: storage.batch_get_v2([pool.transfer("kv", ["a"], [0])]),
            lambda: storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]),
            lambda: storage.register_mem_host_pool_v2(pool, "kv"),
            storage.open,
            storage.clear,
        ):
            with pytest.raises(StorageClosedError, match="dict: the storage is closed"):
                call()
        assert storage.get_stats().driver == "dict"
        assert storage.health().ok is False

    def test_a_storage_that_was_never_opened_has_nothing_to_disconnect(self, kit):
        storage, _ = kit.dict_storage()
        storage.close()
        assert storage.asked == []

    def test_close_waits_for_calls_in_flight(self, kit):
        storage, _pool = kit.dict_storage()
        storage.open()
        entered, leave = threading.Event(), threading.Event()

        def slow(operation):
            if operation == "exist":
                entered.set()
                leave.wait(60)

        storage.before = slow
        caller = threading.Thread(target=storage.batch_exists_v2, args=(["a"],))
        caller.start()
        assert entered.wait(60)
        closer = threading.Thread(target=storage.close)
        closer.start()
        while not storage._lifecycle.closed:
            time.sleep(0.001)
        assert "disconnect" not in storage.asked
        leave.set()
        caller.join(60)
        closer.join(60)
        assert storage.asked[-1] == "disconnect"

    def test_a_forked_child_is_told(self, kit):
        storage, _ = kit.dict_storage()
        storage.open()
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                storage.batch_exists_v2(["a"])
                os.write(writer, b"served")
            except StorageForkedError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert "before a fork" in os.read(reader, 1000).decode()
        os.close(reader)
        os.close(writer)


def test_statistics(kit):
    storage, pool = kit.dict_storage()
    stored(storage, pool, ["a", "b"], [0, 1])
    storage.batch_exists_v2(["a", "b", "c"])
    storage.batch_get_v2([pool.transfer("kv", ["a", "c"], [2, 3])])
    stats = storage.get_stats().pools["kv"]
    page = pool.geometry.page_bytes
    assert (stats.pages_written, stats.bytes_written, stats.pages_refused) == (2, 2 * page, 0)
    assert (stats.pages_hit, stats.pages_read, stats.bytes_read, stats.pages_missed) == (2, 1, page, 1)
    assert [stats.latency[name].calls for name in ("set", "exists", "get")] == [1, 1, 1]
    assert sum(stats.latency["get"].buckets) == 1


def test_statistics_can_be_switched_off_but_not_faults(kit):
    storage, pool = kit.dict_storage(metrics=False)
    stored(storage, pool, ["a"], [0])

    def fail(operation):
        raise OSError

    storage.before = fail
    storage.batch_exists_v2(["a"])
    assert storage.get_stats().pools == {}
    assert storage.get_stats().faults == 1


def test_pages_over_the_limit_are_refused(kit):
    from hicache_storage.spec import Capabilities

    storage, pool = kit.dict_storage(capabilities=Capabilities(max_page_bytes=10))
    assert storage.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
    assert storage.get_stats().pools["kv"].pages_refused == 1


def test_the_deadline_reaches_the_driver(kit):
    storage, _pool = kit.dict_storage()
    seen = []
    storage.objects_exist = lambda batches, call: (seen.append(call), [[False] * len(b.keys) for b in batches])[1]
    storage.batch_exists_v2(["a"], extra_info=HiCacheStorageExtraInfo(deadline_seconds=0.0, prefix_keys=["p"], request_id="r"))
    storage.batch_exists_v2(["a"])
    assert (seen[0].expired(), seen[0].remaining(), seen[0].prefix_keys, seen[0].request_id) == (True, 0.0, ["p"], "r")
    assert (seen[1].expired(), seen[1].remaining()) == (False, None)


def test_many_threads(kit):
    """CC-1: sixteen threads set, get, look up and clear; every page delivered is one that was written."""
    storage, _ = kit.dict_storage()
    storage.register_mem_host_pool_v2(pool := kit.pool(pages=32), "kv")
    wrong = []

    def work(number):
        for turn in range(30):
            keys = [f"{turn % 4}-{page}" for page in (0, 1)]
            pages = [2 * number, 2 * number + 1]
            written = [pool.fill(page, seed) for page, seed in zip(pages, (turn % 4, turn % 4 + 100), strict=True)]
            storage.batch_set_v2([pool.transfer("kv", keys, pages)])
            got = storage.batch_get_v2([pool.transfer("kv", keys, pages)])["kv"]
            wrong.extend(page for page, ok, bytes_ in zip(pages, got, written, strict=True) if ok and pool.page(page) != bytes_)
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
