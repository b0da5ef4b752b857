"""Calls that may block, made in threads and collected by the number of their job."""

from __future__ import annotations

import threading
import time

import pytest

from hicache_storage.engines.async_calls import AsyncCalls
from hicache_storage.engines.bridge_storage import RefusedCalls
from hicache_storage.spec import seconds_since_asked
from tests.support.waiting import eventually


@pytest.fixture
def calls():
    made = AsyncCalls[str]("test", 2)
    yield made
    made.close()


def test_each_job_is_reported_once(calls):
    for job in range(20):
        calls.submit(job, lambda job=job: f"result {job}", "nothing")
    calls.wait_idle()
    assert sorted(calls.finished()) == [(job, f"result {job}") for job in range(20)]
    assert calls.finished() == []


@pytest.mark.parametrize("error", [OSError("gone"), SystemExit(3)])
def test_a_call_that_raises_is_reported_with_the_other_result(calls, error):
    def fails() -> str:
        raise error

    calls.submit(1, fails, "nothing")
    calls.wait_idle()
    assert calls.finished() == [(1, "nothing")]


class Waits:
    """A call that goes on when it is told."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        self.go_on.wait(60)
        return "done"


def test_jobs_that_wait_when_it_is_closed_do_not_begin():
    calls, waits = AsyncCalls[str]("test", 1), Waits()
    calls.submit(1, waits, "nothing")
    calls.submit(2, lambda: "done", "nothing")
    assert waits.begun.wait(60)
    closing = threading.Thread(target=calls.close)
    closing.start()
    # Withdrawn by `close`, which waits for the one that runs.
    eventually(lambda: calls.take(2) == "nothing")
    waits.go_on.set()
    closing.join(60)
    calls.submit(3, lambda: "done", "nothing")
    assert sorted(calls.finished()) == [(1, "done"), (3, "nothing")]
    calls.close()


def refuse(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_a_job_for_which_no_thread_can_be_started_is_reported_and_never_made(monkeypatch):
    calls, made = AsyncCalls[str]("test", 2), list[int]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        calls.submit(1, lambda: made.append(1) or "done", "nothing")
    assert calls.finished() == [(1, "nothing")]
    calls.submit(2, lambda: made.append(2) or "done", "nothing")
    calls.wait_idle()
    calls.close()
    assert (calls.finished(), made) == ([(2, "done")], [2])


def test_where_no_further_thread_can_be_started_a_job_waits_and_is_reported_once(monkeypatch):
    """Reported as failed, and made all the same, it would write to another request's memory."""
    calls, made = AsyncCalls[str]("test", 2), list[int]()
    waits = Waits()
    calls.submit(1, waits, "nothing")
    assert waits.begun.wait(60)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        calls.submit(2, lambda: made.append(2) or "done", "nothing")
    assert (calls.finished(), made) == ([], [])
    waits.go_on.set()
    calls.wait_idle()
    calls.close()
    assert (calls.finished(), made) == ([(1, "done"), (2, "done")], [2])


def test_jobs_that_wait_behind_hung_ones_are_answered_at_their_deadline_and_never_made():
    notified, late = threading.Semaphore(0), RefusedCalls("test")
    calls = AsyncCalls[str]("test", 1, notified.release, 60.0, late)
    waits, made = Waits(), list[int]()
    # In the memory of a read that hangs, a storage with `HungReads.WAIT` may still write.
    calls.submit(0, waits, "nothing")
    assert waits.begun.wait(60)
    # Only for those that wait: a busy machine may begin a call later than that.
    calls._deadline_seconds = 0.05
    for row in (range(1, 4), range(4, 6)):
        for job in row:
            calls.submit(job, lambda job=job: made.append(job) or "done", "nothing")
        for _ in row:
            assert notified.acquire(timeout=60)
        assert calls.finished() == [(job, "nothing") for job in row]
    waits.go_on.set()
    assert notified.acquire(timeout=60)
    calls.close()
    assert (calls.finished(), made) == ([(0, "done")], [])
    assert late.count == 5


def test_a_job_that_a_thread_takes_too_late_is_not_made():
    made, late = list[int](), RefusedCalls("test")
    calls = AsyncCalls[str]("test", 1, deadline_seconds=0, refusals=late)
    calls.submit(1, lambda: made.append(1) or "done", "nothing")
    calls.wait_idle()
    assert (calls.finished(), made, late.count) == ([(1, "nothing")], [], 1)
    calls.close()


def test_nothing_is_notified_once_it_is_closed():
    """The descriptor of an event is closed by then, and its number may be another file's."""
    notified = []
    calls = AsyncCalls[str]("test", 1, lambda: notified.append(1))
    calls.close()
    calls.submit(1, lambda: "done", "nothing")
    assert calls.finished() == [(1, "nothing")]
    assert not notified


def test_a_call_knows_how_long_its_job_has_waited():
    """A deadline began when a thread took the job: jobs behind hung ones had one each, in turn."""
    calls, go_on = AsyncCalls[float]("test", 1), threading.Event()
    calls.submit(1, lambda: float(go_on.wait(60)), 0.0)
    calls.submit(2, seconds_since_asked, -1.0)
    submitted = time.monotonic()
    while (released := time.monotonic()) <= submitted:
        pass
    go_on.set()
    calls.wait_idle()
    assert dict(calls.finished())[2] >= released - submitted
    calls.close()
