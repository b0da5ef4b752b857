"""The deadline: a hung store is a miss, late results go nowhere, nothing is left behind."""

from __future__ import annotations

import threading

import pytest

from hicache_storage.layers import DeadlineLayer, StorageOptions, wrap
from hicache_storage.layers.deadline import MAX_HUNG_CALLS
from hicache_storage.objects.thread_pool import Task
from hicache_storage.spec import (
    Capabilities,
    HiCacheStorageExtraInfo,
    HungReads,
    StorageClosedError,
    StorageTimeoutError,
    StorageUnavailableError,
    UnknownPoolError,
)
from tests.support.failing import kept_calls
from tests.support.waiting import eventually

PATIENCE_SECONDS = 60.0
SHORT_SECONDS = 0.05
"""Only for calls that hang: under load a call that does not may take longer."""


def hurry(layer, seconds=SHORT_SECONDS):
    """Give the calls from now on another deadline."""
    layer._seconds = seconds
    layer._default = HiCacheStorageExtraInfo(deadline_seconds=seconds)


@pytest.fixture
def hanging(kit):
    """A storage that hangs in `operation` until released, behind a deadline that a busy machine
    keeps until `hurry`."""

    def make(operation, **capabilities):
        storage, pool = kit.memory_storage(capabilities=Capabilities(**capabilities))
        storage.open()
        release = threading.Event()
        releases.append(release)
        storage.before = lambda asked: asked == operation and release.wait(2 * PATIENCE_SECONDS)
        layer = DeadlineLayer(storage, PATIENCE_SECONDS)
        layer.register_mem_host_pool_v2(pool, "kv")
        layers.append(layer)
        return layer, storage, pool, release

    releases, layers = [], []
    yield make
    for release in releases:
        release.set()
    for layer in layers:
        # One that was closed while all its threads hung waits for that no longer than for an
        # answer.
        hurry(layer, 1.0)
        layer.close()


def test_a_get_into_the_pool_is_waited_for(hanging):
    """GET-9: it could still write there."""
    layer, _storage, pool, release = hanging("read", hung_reads=HungReads.WAIT)
    page = pool.fill(0, 1)
    assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
    timer = threading.Timer(4 * SHORT_SECONDS, release.set)
    timer.start()
    hurry(layer)
    assert layer.batch_get_v2([pool.transfer("kv", ["a"], [1])]) == {"kv": [True]}
    assert pool.page(1) == page
    timer.join()


def test_a_delete_is_told_its_deadline(hanging):
    layer, storage, _pool, _release = hanging("nothing", deletes=True)
    calls = kept_calls(storage, "delete_objects")
    assert layer.delete(["a"]) == [False]
    assert calls[0].remaining() is not None


def test_a_hung_delete_ends_in_time(hanging):
    layer, _storage, _pool, _release = hanging("delete", deletes=True)
    hurry(layer)
    assert layer.delete(["a", "b"]) == [False, False]
    assert layer.fault_count() >= 1


def test_a_hang_is_told_once_an_episode_with_the_id_of_its_call(hanging, caplog):
    layer, storage, _pool, release = hanging("exist")
    calls = kept_calls(storage, "objects_exist")
    # The first call has to reach the driver, also on a busy machine.
    for seconds in (2.0, SHORT_SECONDS, SHORT_SECONDS):
        hurry(layer, seconds)
        layer.batch_exists_v2(["a"])
    [record] = [record for record in caplog.records if record.levelname == "WARNING"]
    assert (record.request_id, record.seconds) == (calls[0].request_id, 2.0)
    release.set()


def test_errors_of_the_caller_come_through(hanging):
    layer, _storage, pool, _ = hanging("nothing")
    with pytest.raises(UnknownPoolError):
        layer.batch_set_v2([pool.transfer("swa", ["a"], [0])])
    layer.close()
    with pytest.raises(StorageClosedError):
        layer.batch_exists_v2(["a"])


def test_hung_threads_are_bounded_and_end_with_their_calls(hanging):
    layer, storage, _pool, release = hanging("exist")
    before = set(threading.enumerate())

    def hang() -> bool:
        # On a busy machine the deadline may pass before a thread has begun: that call does not hang.
        layer.batch_exists_v2(["a"], None, HiCacheStorageExtraInfo(deadline_seconds=0.005))
        return storage.operations.count("exist") == MAX_HUNG_CALLS

    eventually(hang)
    for _ in range(5):
        hang()
    hung = set(threading.enumerate()) - before
    assert len(hung) == MAX_HUNG_CALLS
    release.set()
    layer.close()
    eventually(lambda: not hung & set(threading.enumerate()))
    assert storage.operations.count("exist") == MAX_HUNG_CALLS


@pytest.fixture
def no_more_threads(monkeypatch):
    """What a limit of threads does, and the end of the interpreter in Python 3.12.0."""

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    return lambda: monkeypatch.setattr(threading.Thread, "start", refuse)


def test_a_call_without_a_thread_says_so(kit, no_more_threads):
    """It had not opened within 30.0 s, after 0.0 s."""
    storage, pool = kit.memory_storage(capabilities=Capabilities(may_hang=True, clears=True))
    layer = DeadlineLayer(storage, PATIENCE_SECONDS)
    layer.register_mem_host_pool_v2(pool, "kv")
    no_more_threads()
    for call in (layer.open, layer.clear):
        with pytest.raises(StorageUnavailableError, match="can't start new thread") as caught:
            call()
        assert not isinstance(caught.value, StorageTimeoutError)
    assert "can't start new thread" in layer.health().detail
    assert layer.batch_exists_v2(["a"]).kv_hit_pages == 0
    assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [False]}
    assert storage.operations == []
    assert layer.fault_count() == 5


@pytest.mark.parametrize("idle", [False, True])
def test_a_storage_is_closed_where_no_thread_can_be_started(hanging, no_more_threads, idle):
    """In atexit of Python 3.12.0 it stayed open."""
    layer, storage, _pool, release = hanging("exist")
    release.set()
    if idle:
        layer.batch_exists_v2(["a"])
    closed_in = []
    storage.before = lambda asked: closed_in.append((asked, threading.current_thread()))
    no_more_threads()
    layer.close()
    [(asked, thread)] = closed_in
    assert asked == "disconnect"
    assert (thread is threading.current_thread()) is not idle


def test_a_hung_storage_that_no_thread_can_close_is_told(hanging, no_more_threads, caplog):
    layer, storage, _pool, _release = hanging("exist")
    hurry(layer)
    # On a busy machine the deadline may pass before a thread has begun.
    eventually(lambda: layer.batch_exists_v2(["a"]) and "exist" in storage.operations)
    no_more_threads()
    layer.close()
    assert "no thread can be started; the storage stays open" in caplog.text
    assert "disconnect" not in storage.operations


def test_a_storage_is_closed_when_all_its_threads_hang(hanging):
    """By a thread more, as soon as the storage can be: nobody else would ever do it."""
    layer, storage, _pool, release = hanging("exist")
    hurry(layer)
    for _ in range(MAX_HUNG_CALLS):
        layer.batch_exists_v2(["a"])
    hurry(layer, PATIENCE_SECONDS)
    closed = threading.Event()
    inner, storage.close = storage.close, lambda: (inner(), closed.set())
    closing = threading.Thread(target=layer.close)
    closing.start()
    release.set()
    assert closed.wait(PATIENCE_SECONDS)
    closing.join()


def test_without_need_there_is_no_thread(hanging):
    layer, _storage, _pool, _ = hanging("nothing", may_hang=False)
    before = set(threading.enumerate())
    layer.batch_exists_v2(["a"])
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("call", ["exists", "present"])
def test_a_lookup_from_memory_needs_no_thread(hanging, call):
    layer, storage, _, release = hanging("exists", may_hang=True)
    answers = [[True, True]]
    storage.caches_lookups = True
    storage.objects_exist_cached = lambda batches, call: answers
    storage._damaged.remember(storage.pools["kv"].namespace, ["b"])

    def found():
        if call == "present":
            return layer.batch_present(["a", "b"])
        hit = layer.batch_exists_v2(["a", "b"]).kv_hit_pages
        return [place < hit for place in range(2)]

    assert found() == [True, False], "a damaged page is hidden"
    assert not layer._thread_pool.has_threads
    assert storage.get_stats().pools["kv"].pages_hit == 1
    # Where memory does not tell, and after a fault, the store is asked.
    release.set()
    answers = None
    assert found() == [False, False]
    answers = [[True, True]]
    storage._guard.faulty = {"exists"}
    assert found() == [False, False]
    assert layer._thread_pool.has_threads


def test_a_lookup_that_ends_by_itself_needs_no_thread(hanging):
    """Unless its deadline comes first."""
    layer, storage, pool, _ = hanging("nothing", lookup_seconds=PATIENCE_SECONDS)
    threads = []
    storage.before = lambda asked: threads.append((asked, threading.current_thread()))
    layer.batch_exists_v2(["a"])
    layer.batch_exists_v2(["a"], None, HiCacheStorageExtraInfo(deadline_seconds=50.0))
    layer.batch_set_v2([pool.transfer("kv", ["a"], [0])])
    here = threading.current_thread()
    assert [(asked, thread is here) for asked, thread in threads] == [
        ("exist", True),
        ("exist", False),
        ("exist", False),
        ("write", False),
    ]
    layer.close()


def test_the_default_stack(kit):
    storage, _pool = kit.memory_storage()
    layers = wrap(storage, StorageOptions())
    assert [type(layers).__name__, type(layers.inner).__name__] == [
        "CircuitBreakerLayer",
        "DeadlineLayer",
    ]
    assert (
        wrap(storage, StorageOptions(deadline_seconds=None, breaker_threshold=0, metrics=False))
        is storage
    )
    assert storage.recorder.enabled is False


def test_who_is_interrupted_has_left(hanging, monkeypatch):
    """GET-9, as after the deadline: after Ctrl-C the memory is the caller's again."""
    layer, _storage, pool, release = hanging("read", hung_reads=HungReads.BOUNCE_BUFFER)
    pool.fill(0, 1)
    assert layer.batch_set_v2([pool.transfer("kv", ["a"], [0])]) == {"kv": [True]}
    wait = Task.wait

    def interrupted(task, seconds):
        wait(task, SHORT_SECONDS)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Task, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            layer.batch_get_v2([pool.transfer("kv", ["a"], [1])])
    page = pool.fill(1, 7)
    release.set()
    layer.close()
    assert pool.page(1) == page
