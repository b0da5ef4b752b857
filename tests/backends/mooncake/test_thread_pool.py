"""The thread pool for transfers."""

from __future__ import annotations

import threading
from collections import deque

import pytest

from hicache_backends.mooncake.thread_pool import MAX_WORKERS, ThreadPool

PATIENCE = 60


@pytest.fixture
def thread_pool():
    made = ThreadPool()
    yield made
    made.close()


def names():
    return {thread.name for thread in threading.enumerate()}


def test_all_work_at_the_same_time(thread_pool):
    together, idents = threading.Barrier(3), list[int]()

    def work(_):
        together.wait(PATIENCE)
        idents.append(threading.get_ident())

    thread_pool.run(work, range(3))
    assert len(set(idents)) == 3
    # The same threads work again.
    thread_pool.run(work, range(3))
    assert len(set(idents)) == 3


def test_one_share_stays_with_the_caller(thread_pool):
    idents = list[int]()
    thread_pool.run(lambda _: idents.append(threading.get_ident()), [0])
    assert idents == [threading.get_ident()]


@pytest.mark.parametrize("bad", [0, 2])
def test_an_error_is_raised_when_all_have_ended(thread_pool, bad):
    """Whoever fails: the memory belongs to the caller again."""
    together, ended = threading.Barrier(3), list[int]()

    def work(share):
        together.wait(PATIENCE)
        if share == bad:
            raise ValueError(str(share))
        ended.append(share)

    with pytest.raises(ValueError, match=str(bad)):
        thread_pool.run(work, range(3))
    assert sorted(ended) == [share for share in range(3) if share != bad]


def test_after_the_end_the_caller_works_alone():
    made, before = ThreadPool(), set(threading.enumerate())
    idents, together = list[int](), threading.Barrier(2)
    made.run(lambda _: together.wait(PATIENCE), range(2))
    assert set(threading.enumerate()) - before
    made.close()
    made.close()
    assert set(threading.enumerate()) <= before
    made.run(lambda _: idents.append(threading.get_ident()), range(2))
    assert idents == [threading.get_ident()]


def test_threads_that_hang():
    """Others find threads while there are some, and then work alone; the end waits for none of
    those that hang."""
    made, released, begun = ThreadPool(), threading.Event(), threading.Semaphore(0)

    def hang(_):
        begun.release()
        released.wait(PATIENCE)

    callers = [threading.Thread(target=made.run, args=(hang, range(2))) for _ in range(MAX_WORKERS)]
    for caller in callers:
        caller.start()
    for _ in range(2 * MAX_WORKERS):
        assert begun.acquire(timeout=PATIENCE)
    left, done = deque(range(5)), list[int]()

    def work(_):
        while left:
            done.append(left.popleft())

    made.run(work, range(2))
    assert done == list(range(5))
    made.close()
    assert any(
        thread.name == "hicache-mooncake" and thread.daemon for thread in threading.enumerate()
    )
    released.set()
    for caller in callers:
        caller.join(PATIENCE)
    for thread in threading.enumerate():
        if thread.name == "hicache-mooncake":
            thread.join(PATIENCE)
    assert "hicache-mooncake" not in names()
