"""The thread pool for calls that may hang."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from contextlib import suppress
from functools import partial

import pytest

from hicache_storage.objects.thread_pool import ThreadPool
from tests.support.forking import in_child

PATIENCE = 60.0


@pytest.fixture
def make_pool():
    made = []

    def make(*limits, name="pool-under-test", **options):
        made.append(ThreadPool(name, *limits, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close(PATIENCE)
    assert not threads(), "every call has returned"


@pytest.fixture
def hang():
    """A call that hangs until the test, or `hang.set`, releases it; `begun` counts it."""
    release = threading.Event()

    def call():
        call.begun.release()
        assert release.wait(2 * PATIENCE)
        return threading.current_thread()

    call.begun, call.set = threading.Semaphore(0), release.set
    yield call
    release.set()


def threads():
    return {thread for thread in threading.enumerate() if thread.name == "pool-under-test"}


def refuse(thread):
    raise RuntimeError("can't start new thread")


def begin(pool, call, count=1):
    """Submit a call some times, and wait until each has begun."""
    tasks = [pool.submit(call) for _ in range(count)]
    for _ in tasks:
        assert call.begun.acquire(timeout=PATIENCE)
    return tasks


def result(task):
    assert task.wait(PATIENCE)
    return task.result()


# Calls -------------------------------------------------------------------------------------------


def test_a_caller_that_waits_for_each_call_uses_one_thread(make_pool):
    pool = make_pool()
    assert len({result(pool.submit(threading.get_ident)) for _ in range(200)}) == 1


def test_calls_that_run_at_once_have_a_thread_each_until_it_is_closed(make_pool):
    pool, meeting = make_pool(), threading.Barrier(40)
    tasks = [pool.submit(partial(meeting.wait, PATIENCE)) for _ in range(40)]
    assert sorted(map(result, tasks)) == list(range(40))
    assert len(threads()) == 40
    for _ in range(2):
        pool.close(PATIENCE)
        assert not threads()


def test_calls_beyond_the_limit_wait_in_order(make_pool, hang):
    pool, order = make_pool(1), list[int]()
    begin(pool, hang)
    tasks = [pool.submit(partial(order.append, number)) for number in range(20)]
    assert len(threads()) == 1
    hang.set()
    assert [result(task) for task in tasks] == [None] * 20
    assert order == list(range(20))


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_an_error_is_raised_in_the_caller_and_ends_no_thread(make_pool, error):
    pool = make_pool(1)

    def fail():
        raise error("x")

    for _ in range(3):
        with pytest.raises(error, match="x"):
            result(pool.submit(fail))
    assert len(threads()) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_is_released_when_its_task_is(make_pool, fails):
    """Neither the idle thread nor a cycle keeps the call's buffers."""

    class Buffer:
        def use(self):
            if fails:
                raise ValueError("x")

    pool = make_pool()
    buffer = Buffer()
    gone = threading.Event()
    weakref.finalize(buffer, gone.set)
    gc.disable()
    try:
        task = pool.submit(buffer.use)
        with suppress(ValueError):
            result(task)
        del task, buffer
        assert gone.wait(PATIENCE)
    finally:
        gc.enable()


def test_errors_in_the_background_are_logged(make_pool, caplog):
    pool = make_pool(1)
    pool.run_in_background(lambda: 1 / 0)
    result(pool.submit(lambda: None))
    assert "a background task failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


# Hung calls --------------------------------------------------------------------------------------


def test_another_thread_takes_the_place_of_a_hung_one(make_pool, hang):
    pool = make_pool(1)
    [hung] = begin(pool, hang)
    queued = pool.submit(threading.current_thread)
    assert not queued.wait(0.01)
    assert pool.abandon(hung)
    assert not hung.wait(0.01)
    other = result(queued)
    assert result(pool.submit(threading.current_thread)) is other
    # Neither `close` nor the end of the process waits for the hung one.
    pool.close(2 * PATIENCE)
    [thread] = threads()
    assert thread.daemon
    hang.set()
    assert result(hung) is thread is not other
    assert not pool.abandon(hung), "it has ended"


def test_the_thread_of_an_abandoned_call_is_used_again_if_no_other_has_its_place(make_pool, hang):
    pool = make_pool(1)
    [hung] = begin(pool, hang)
    assert pool.abandon(hung)
    assert not pool.has_threads
    hang.set()
    assert result(hung) is result(pool.submit(threading.current_thread))
    assert pool.has_threads


def test_calls_that_waited_for_the_last_thread_that_may_hang_can_be_withdrawn(make_pool, hang):
    pool = make_pool(1, 1)
    [hung] = begin(pool, hang)
    queued = pool.submit(hang)
    assert pool.abandon(hung)
    assert not pool.has_threads
    assert pool.submit(hang) is None
    assert pool.withdraw(queued)
    assert not pool.withdraw(queued)
    assert not pool.withdraw(hung)
    hang.set()
    assert result(hung)
    assert not hang.begun.acquire(blocking=False), "the withdrawn call was not made"


def test_without_a_thread_to_be_had_no_call_is_accepted(make_pool, monkeypatch):
    pool, done = make_pool(2), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert pool.submit(threading.get_ident) is None
        assert not pool.run_in_background(partial(done.append, 2))
        pool.run([partial(done.append, 1)] * 4)
    assert done == [1] * 4
    assert result(pool.submit(threading.get_ident))


# Calls that are divided among threads ------------------------------------------------------------


@pytest.mark.parametrize("limit", [3, 8])
def test_the_caller_and_threads_work_at_the_same_time(make_pool, limit):
    pool, meeting, idents = make_pool(limit), threading.Barrier(4), set[int]()

    def work():
        meeting.wait(PATIENCE)
        idents.add(threading.get_ident())

    for _ in range(5):
        pool.run([work] * 4)
    assert threading.get_ident() in idents
    assert len(idents) <= limit + 1


@pytest.mark.parametrize(("limit", "calls"), [(3, 1), (0, 1), (0, 2)])
def test_one_call_stays_with_the_caller_and_so_do_all_without_threads(make_pool, limit, calls):
    """`threads: 1`, or one core: the pool has a thread for the background alone."""
    pool, done, idents = make_pool(limit), threading.Event(), list[int]()
    pool.run_in_background(done.set)
    assert done.wait(PATIENCE)
    pool.run([lambda: idents.append(threading.get_ident())] * calls)
    assert idents == [threading.get_ident()] * calls
    pool.run([])


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_is_raised_when_all_that_have_begun_have_ended(make_pool, bad):
    """The caller's memory belongs to the caller again."""
    pool, meeting, ended = make_pool(2), threading.Barrier(3), list[int]()

    def work(number):
        if number < 3:
            meeting.wait(PATIENCE)
        if number == bad:
            raise ValueError(str(number))
        ended.append(number)

    with pytest.raises(ValueError, match=str(bad)):
        pool.run([partial(work, number) for number in range(3)])
    assert sorted(ended) == [number for number in range(3) if number != bad]


def test_what_has_not_begun_when_a_call_fails_is_dropped(make_pool):
    pool, done = make_pool(1), list[int]()
    with pytest.raises(ZeroDivisionError):
        pool.run([lambda: 1 / 0] * 2 + [partial(done.append, number) for number in range(1000)])
    assert len(done) < 1000


def test_hung_threads_keep_no_caller_waiting(make_pool, hang):
    pool, done = make_pool(2), list[int]()
    begin(pool, hang, 2)
    for _ in range(3):
        pool.run([partial(done.append, number) for number in range(5)])
    assert done == [*range(5)] * 3
    assert not pool._queue, "the calls of a hung store would pile up"


def test_a_caller_waits_for_the_calls_that_threads_have_begun(make_pool, hang):
    pool, ended = make_pool(1), threading.Event()

    def run():
        pool.run([hang, hang])
        ended.set()

    caller = threading.Thread(target=run)
    caller.start()
    for _ in range(2):
        assert hang.begun.acquire(timeout=PATIENCE)
    assert not ended.wait(0.01)
    hang.set()
    caller.join(PATIENCE)
    assert ended.is_set()


# Ends --------------------------------------------------------------------------------------------


def test_close_lets_calls_end_that_run_or_are_queued(make_pool, hang):
    pool = make_pool(1)
    [running], queued = begin(pool, hang), pool.submit(lambda: "queued")
    pool.close(0.01)
    assert pool.closed
    assert pool.submit(threading.get_ident) is None
    hang.set()
    assert result(running)
    assert result(queued) == "queued"
    pool.close(PATIENCE)
    assert not threads()
    idents = list[int]()
    pool.run([lambda: idents.append(threading.get_ident())] * 3)
    assert idents == [threading.get_ident()] * 3, "the caller works alone"


def test_a_forked_child_has_threads_of_its_own(make_pool, hang):
    pool = make_pool(1, 1)
    begin(pool, hang)
    pool.submit(hang)

    def use():
        first = result(pool.submit(os.getpid)) == os.getpid()
        pool.close(PATIENCE)
        return f"{first} {pool.submit(os.getpid)}"

    assert in_child(use) == "True None"
    hang.set()
