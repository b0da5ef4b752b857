"""Blocking calls in threads, for engines that submit jobs and ask later what has become of them."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

from hicache_storage.layers.deadline import JOIN_SECONDS
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import AskedScope, StorageTimeoutError, seconds_since_asked

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.engines.bridge_storage import RefusedCalls
    from hicache_storage.objects.thread_pool import Task

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class AsyncCalls(Generic[ResultT]):
    """Executor of calls that may block; their results are collected by the number of the job.

    Each job that was submitted is reported exactly once, whatever its call does, and one that is
    reported as not made is never made: its memory is the engine's again. The deadlines of its calls
    begin when it is submitted. A call is expected to end by itself: `wait_idle` and `close` wait
    for those that run. Thread-safe.

    Args:
        name: prefix of the names of the threads.
        threads: calls that run at a time.
        notify: called after each result, in the thread that has brought it; may not raise.
        deadline_seconds: time after which a job that still waits for a thread is not made.
        refusals: counts those jobs.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        notify: Callable[[], None] = lambda: None,
        deadline_seconds: float = threading.TIMEOUT_MAX,
        refusals: RefusedCalls | None = None,
    ) -> None:
        self._name = name
        self._thread_pool = ThreadPool(name, threads)
        # Answers jobs that wait, also while all other threads hang.
        self._timer = ThreadPool(f"{name}-deadline", 1)
        self._notify = notify
        self._deadline_seconds = min(deadline_seconds, threading.TIMEOUT_MAX)
        self._refusals = refusals
        self._closing = threading.Event()
        # Guards everything below; never held during a call.
        self._changed = threading.Condition()
        self._jobs: dict[int, tuple[Task[None] | None, ResultT]] = {}
        """Jobs that were not reported yet, with what is reported if they are not made."""
        self._finished = dict[int, ResultT]()

    def submit(self, job: int, call: Callable[[], ResultT], otherwise: ResultT) -> None:
        """Begin a job without waiting for it.

        Args:
            job: number of the job.
            call: returns the result.
            otherwise: result of a call that raises, or that is not made: it would begin after the
                deadline, no thread can be started, or `close` was called before.
        """
        until = time.monotonic() + self._deadline_seconds
        run = partial(self._run, job, call, otherwise, AskedScope())
        with self._changed:
            task = None if self._closing.is_set() else self._thread_pool.submit(run)
            self._jobs[job] = task, otherwise
        if task is None:
            self._report(job, otherwise)
        elif task.worker is None and self._deadline_seconds < threading.TIMEOUT_MAX:
            self._timer.submit(partial(self._withdraw, job, task, otherwise, until))

    def finished(self) -> list[tuple[int, ResultT]]:
        """Return the jobs that have ended since the last call, in the order in which they did."""
        with self._changed:
            finished = self._finished
            self._finished = {}
        return list(finished.items())

    def take(self, job: int) -> ResultT | None:
        """Return the result of one job, once; None while it has not ended."""
        with self._changed:
            return self._finished.pop(job, None)

    def wait_idle(self) -> None:
        """Return once every job that was submitted before has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def close(self) -> None:
        """End the threads, after the calls that run; jobs that wait do not begin. Idempotent."""
        with self._changed:
            self._closing.set()
            jobs = list(self._jobs.items())
        for job, (task, otherwise) in jobs:
            if task is not None:
                self._withdraw(job, task, otherwise, until=0)
        self.wait_idle()
        self._timer.close(JOIN_SECONDS)
        self._thread_pool.close(JOIN_SECONDS)

    def _run(
        self, job: int, call: Callable[[], ResultT], otherwise: ResultT, asked: AskedScope
    ) -> None:
        result = otherwise
        try:
            with asked:
                if seconds_since_asked() < self._deadline_seconds:
                    result = call()
                else:
                    self._note_late()
        except (Exception, SystemExit):
            # An engine waits for ever for a job that is never reported.
            logger.exception("hicache bridge: job %d failed", job)
        finally:
            self._report(job, result)

    def _withdraw(self, job: int, task: Task[None], otherwise: ResultT, until: float) -> None:
        """Report a job that no thread has taken at some time, or when this is closed."""
        self._closing.wait(max(0.0, until - time.monotonic()))
        if self._thread_pool.withdraw(task):
            self._note_late()
            self._report(job, otherwise)

    def _note_late(self) -> None:
        if self._refusals is not None and not self._closing.is_set():
            late = StorageTimeoutError(f"no thread was free within {self._deadline_seconds} s")
            self._refusals.note(self._name, "", late)

    def _report(self, job: int, result: ResultT) -> None:
        with self._changed:
            self._finished[job] = result
            del self._jobs[job]
            self._changed.notify_all()
            closed = self._closing.is_set()
        # What is notified may be closed by then, as an event's descriptor is.
        if not closed:
            self._notify()
