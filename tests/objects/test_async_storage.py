"""`AsyncObjectStorage`: bound, deadline, cancellation, faults, fork and close of its fan-out."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import warnings

import pytest

from hicache_storage.layers.deadline import DeadlineLayer
from hicache_storage.objects import AsyncObjectStorage
from hicache_storage.spec import (
    CancellationToken,
    Capabilities,
    HiCacheStorageExtraInfo,
    HungReads,
    StorageClosedError,
    StorageUnavailableError,
)
from tests.support.forking import in_child

CAPABILITIES = Capabilities(
    deletes=True, clears=True, hung_reads=HungReads.BOUNCE_BUFFER, requests_in_flight=4
)


class Gated(AsyncObjectStorage):
    """Pages in a dictionary; each request passes a gate, and is counted."""

    def __init__(self, identity, concurrency=4):
        super().__init__(
            identity, driver_name="gated", capabilities=CAPABILITIES, concurrency=concurrency
        )
        self.objects = {}
        self.hung = set()
        self.faults = {}
        self.asked = []
        self.running = self.max_running = self.cancelled = self.opened = self.closed = 0
        self.entered = threading.Event()

    async def open_store(self):
        self.opened += 1

    async def close_store(self):
        self.closed += 1

    async def request(self, key):
        self.asked.append(key)
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            if key in self.hung:
                self.entered.set()
                await asyncio.Event().wait()
            # Several turns of the loop, so that requests overlap wherever they may.
            for _ in range(5):
                await asyncio.sleep(0)
            if key in self.faults:
                raise self.faults[key]
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1

    async def object_exists(self, namespace, key):
        await self.request(key)
        return namespace.object_name(key) in self.objects

    async def read_object(self, read):
        await self.request(read.key)
        return read.fill(self.objects.get(read.namespace.object_name(read.key)))

    async def write_object(self, write, call):
        payload = write.tobytes()
        if call.expired():
            return False
        await self.request(write.key)
        self.objects[write.namespace.object_name(write.key)] = payload
        return True

    async def delete_object(self, namespace, key):
        await self.request(key)
        return self.objects.pop(namespace.object_name(key), None) is not None

    async def clear_namespace(self, namespace, call):
        await self.request("clear")
        self.objects.clear()


@pytest.fixture
def gated(kit):
    storages = []

    def made(**options):
        storage, pool = Gated(kit.identity(), **options), kit.pool()
        storage.register_mem_host_pool_v2(pool, "kv")
        storages.append(storage)
        return storage, pool

    yield made
    for storage in storages:
        storage.close()


def stored(storage, pool, keys):
    assert storage.batch_set_v2([pool.transfer("kv", keys, list(range(len(keys))))]) == {
        "kv": [True] * len(keys)
    }


@pytest.mark.parametrize("concurrency", [1, 4])
def test_requests_in_flight_are_bounded_for_all_threads_together(gated, concurrency):
    storage, _ = gated(concurrency=concurrency)
    threads = [
        threading.Thread(
            target=storage.batch_exists_v2, args=([f"{number}-{i}" for i in range(50)],)
        )
        for number in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert storage.max_running == concurrency
    assert len(storage.asked) == 150


def test_the_heads_of_all_pools_are_asked_first(kit):
    storage, pool = Gated(kit.identity(), concurrency=1), kit.pool()
    for name in ("kv", "mamba"):
        storage.register_mem_host_pool_v2(pool, name)
    storage.batch_get_v2(
        [
            pool.transfer("kv", ["a", "b", "c"], [0, 1, 2]),
            pool.transfer("mamba", ["x", "y"], [3, 4]),
        ]
    )
    assert storage.asked == ["a", "x", "b", "y", "c"]
    storage.close()


def test_at_the_deadline_what_is_known_is_the_answer(gated):
    storage, pool = gated()
    stored(storage, pool, ["a", "b", "c"])
    storage.hung = {"b"}
    info = HiCacheStorageExtraInfo(deadline_seconds=0.3)
    assert storage.batch_get_v2([pool.transfer("kv", ["a", "b", "c"], [4, 5, 6])], info) == {
        "kv": [True, False, True]
    }
    assert (storage.cancelled, storage.running, storage.get_stats().faults) == (1, 0, 1)


def test_the_deadline_layer_hears_of_it_in_time(gated):
    storage, pool = gated()
    stored(storage, pool, ["a", "b"])
    storage.hung = {"b"}
    layer = DeadlineLayer(storage, 2.0)
    assert layer.batch_get_v2([pool.transfer("kv", ["a", "b"], [4, 5])]) == {"kv": [True, False]}
    assert layer.get_stats().deadlines_missed == 0
    layer.close()


def test_nothing_begins_after_a_cancellation(gated):
    storage, pool = gated(concurrency=1)
    storage.open()
    token = CancellationToken()

    async def cancelling(key):
        storage.asked.append(key)
        token.cancel()

    storage.request = cancelling
    keys = ["a", "b", "c"]
    info = HiCacheStorageExtraInfo(cancellation=token)
    storage.batch_get_v2([pool.transfer("kv", keys, [0, 1, 2])], info)
    assert storage.asked == ["a"]


def test_one_page_s_fault_is_its_own(gated):
    storage, pool = gated()
    storage.faults = {"b": StorageUnavailableError("no"), "c": RuntimeError("a bug")}
    assert storage.batch_set_v2([pool.transfer("kv", ["a", "b", "c"], [0, 1, 2])]) == {
        "kv": [True, False, False]
    }


def test_a_call_without_an_answer_is_a_fault(gated, caplog):
    storage, _ = gated()
    storage.faults = {key: StorageUnavailableError(f"no {key}") for key in "abc"}
    assert storage.batch_exists_v2(["a", "b", "c"]).kv_hit_pages == 0
    assert storage.get_stats().faults == 1
    assert "answering misses: no a" in caplog.text


def test_close_cancels_a_hung_call_and_ends_the_thread(gated, monkeypatch):
    monkeypatch.setattr("hicache_storage.objects.storage.CLOSE_TIMEOUT_SECONDS", 0.1)
    storage, _ = gated()
    storage.hung = {"a"}
    found = []
    caller = threading.Thread(target=lambda: found.append(storage.batch_exists_v2(["a"])))
    caller.start()
    assert storage.entered.wait(10)
    storage.close()
    caller.join(10)
    assert [answer.kv_hit_pages for answer in found] == [0]
    assert (storage.cancelled, storage.closed) == (1, 1)
    assert not [thread for thread in threading.enumerate() if thread.name == "hicache-gated"]
    with pytest.raises(StorageClosedError):
        storage.batch_exists_v2(["a"])


def test_a_store_that_does_not_open_leaves_no_thread(gated, monkeypatch):
    storage, _ = gated()

    async def refuse():
        raise StorageUnavailableError("not today")

    monkeypatch.setattr(storage, "open_store", refuse)
    with pytest.raises(StorageUnavailableError, match="not today"):
        storage.open()
    assert not [thread for thread in threading.enumerate() if thread.name == "hicache-gated"]


def test_where_no_thread_can_be_started_nothing_is_left_open(gated, monkeypatch):
    storage, _ = gated()

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    descriptors = len(os.listdir("/proc/self/fd"))
    # Nothing that the garbage collection closes is counted as closed.
    gc.disable()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            for _ in range(5):
                with pytest.raises(StorageUnavailableError, match="can't start new thread"):
                    storage.open()
        assert len(os.listdir("/proc/self/fd")) == descriptors
    finally:
        gc.enable()
    storage.open()


def test_forked_children(gated):
    storage, _ = gated()
    # Before the fork it was not open: the child has an event loop of its own.
    assert in_child(lambda: str(storage.batch_exists_v2(["a"]).kv_hit_pages)) == "0"
    storage.open()
    assert in_child(lambda: str(storage.batch_exists_v2(["a"]))).startswith("StorageForkedError")
    assert storage.batch_exists_v2(["a"]).kv_hit_pages == 0


def test_run_raises_what_the_coroutine_raises(gated):
    storage, _ = gated()
    with pytest.raises(StorageUnavailableError):
        storage.run(storage.open_store)
    storage.open()

    async def hang():
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        storage.run(hang, 0.05)
    assert storage.opened == 1


def test_a_call_after_the_loop_has_ended_leaves_no_coroutine(gated):
    storage, _ = gated()
    storage.open()
    loop = storage._loop
    storage.close()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        with pytest.raises(StorageUnavailableError):
            loop.run(storage.open_store)
        gc.collect()
    assert not [warning for warning in told if "never awaited" in str(warning.message)]


def test_too_little_concurrency_is_refused(kit):
    with pytest.raises(ValueError, match="at least 1"):
        Gated(kit.identity(), concurrency=0)


class TestDiscard:
    @pytest.mark.parametrize(("certain", "existing"), [(True, 1), (False, 0)])
    def test_damage_is_hidden_unless_the_driver_has_removed_it(self, gated, certain, existing):
        storage, pool = gated()
        stored(storage, pool, ["a"])
        (name,) = storage.objects
        good, storage.objects[name] = storage.objects[name], b"torn"
        discarded = []

        async def discard(read):
            discarded.append(read.key)
            return certain

        storage.discard_object = discard
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [3])]) == {"kv": [False]}
        storage.objects[name] = good
        assert storage.batch_exists_v2(["a"]).kv_hit_pages == existing
        assert discarded == ["a"]

    def test_what_another_has_repaired_meanwhile_stays(self, gated):
        storage, pool = gated()
        stored(storage, pool, ["a"])
        (name,) = storage.objects
        whole = storage.objects[name]
        storage.objects[name] = whole[:-1]
        read = storage.read_object

        async def repaired_afterwards(asked):
            answer = await read(asked)
            storage.objects[name] = whole
            return answer

        storage.read_object = repaired_afterwards
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [False]}
        assert storage.objects[name] == whole
        assert storage.batch_get_v2([pool.transfer("kv", ["a"], [4])]) == {"kv": [True]}
