"""Blocking calls in threads, for engines that submit jobs and ask later what has become of them."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import AskedScope

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.objects.thread_pool import Task

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")

JOIN_SECONDS: Final = 5.0
"""Limit of the time that threads may take to end after their last call."""


@dataclass(slots=True)
class _Job(Generic[ResultT]):
    """A job that was submitted and not reported."""

    otherwise: ResultT
    asked: AskedScope = field(default_factory=AskedScope)
    task: Task[None] | None = None


class AsyncCalls(Generic[ResultT]):
    """Executor of calls that may block; their results are collected by the number of the job.

    Each job that was submitted is reported exactly once, whatever its call does, and one that is
    reported as not made is never made: its memory belongs to the engine again. A call is expected
    to end by itself: `wait_idle` and `close` wait for those that run. Thread-safe.

    Args:
        name: prefix of the names of the threads.
        threads: calls that run at a time.
        notify: called after each result, in the thread that has brought it; may not raise.
    """

    def __init__(self, name: str, threads: int, notify: Callable[[], None] = lambda: None) -> None:
        self._thread_pool = ThreadPool(name, threads)
        self._notify = notify
        # Guards everything below; never held during a call.
        self._changed = threading.Condition()
        self._jobs = dict[int, _Job[ResultT]]()
        self._finished = list[tuple[int, ResultT]]()
        self._closed = False

    def submit(self, job: int, call: Callable[[], ResultT], otherwise: ResultT) -> None:
        """Begin a job without waiting for it.

        Args:
            job: number of the job.
            call: returns the result.
            otherwise: result of a call that raises, or that is not made: no thread can be started,
                or `close` was called before.
        """
        submitted = _Job(otherwise)
        with self._changed:
            self._jobs[job] = submitted
            if not self._closed:
                submitted.task = self._thread_pool.submit(partial(self._run, job, call, submitted))
        if submitted.task is None:
            self._report(job, otherwise)

    def finished(self) -> list[tuple[int, ResultT]]:
        """Return the jobs that have ended since the last call, in the order in which they did."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait_idle(self) -> None:
        """Return once every job that was submitted before has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._jobs)

    def close(self) -> None:
        """End the threads, after the calls that run; jobs that wait do not begin. Idempotent."""
        with self._changed:
            self._closed = True
            jobs = list(self._jobs.items())
        for number, job in jobs:
            if job.task is not None and self._thread_pool.withdraw(job.task):
                self._report(number, job.otherwise)
        self.wait_idle()
        self._thread_pool.close(JOIN_SECONDS)

    def _run(self, number: int, call: Callable[[], ResultT], job: _Job[ResultT]) -> None:
        result = job.otherwise
        try:
            with job.asked:
                result = call()
        except (Exception, SystemExit):
            # An engine waits for ever for a job that is never reported.
            logger.exception("hicache bridge: job %d failed", number)
        finally:
            self._report(number, result)

    def _report(self, job: int, result: ResultT) -> None:
        with self._changed:
            self._finished.append((job, result))
            del self._jobs[job]
            self._changed.notify_all()
            closed = self._closed
        # What is notified may be closed by then, as an event's descriptor is.
        if not closed:
            self._notify()
