"""Blocking calls in threads, for engines that submit jobs and ask later what has become of them."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from hicache_storage.spec import AskedScope

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class AsyncCalls(Generic[ResultT]):
    """Executor of calls that may block; their results are collected by the number of the job.

    Each job that was submitted is reported exactly once, whatever its call does. A call is expected
    to end by itself: `wait_idle` and `close` wait for those that run. Thread-safe.

    Args:
        name: prefix of the names of the threads.
        threads: calls that run at a time.
        notify: called after each result, in the thread that has brought it; may not raise.
    """

    def __init__(self, name: str, threads: int, notify: Callable[[], None] = lambda: None) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._notify = notify
        # Guards everything below; never held during a call.
        self._changed = threading.Condition()
        self._finished = list[tuple[int, ResultT]]()
        self._running = 0
        self._closed = False

    def submit(self, job: int, call: Callable[[], ResultT], otherwise: ResultT) -> None:
        """Begin a job without waiting for it.

        Args:
            job: number of the job.
            call: returns the result.
            otherwise: result of a call that raises, or that has not begun when `close` is called.
        """
        asked = AskedScope()
        with self._changed:
            self._running += 1
        try:
            self._executor.submit(self._run, job, asked, call, otherwise)
        except RuntimeError:
            # Closed already, or the interpreter ends.
            self._report(job, otherwise)

    def finished(self) -> list[tuple[int, ResultT]]:
        """Return the jobs that have ended since the last call, in the order in which they did."""
        with self._changed:
            finished, self._finished = self._finished, []
        return finished

    def wait_idle(self) -> None:
        """Return once every job that was submitted before has ended."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running)

    def close(self) -> None:
        """End the threads, after the calls that run; jobs that wait do not begin. Idempotent."""
        with self._changed:
            self._closed = True
        self._executor.shutdown()

    def _run(
        self, job: int, asked: AskedScope, call: Callable[[], ResultT], otherwise: ResultT
    ) -> None:
        result = otherwise
        try:
            if not self._closed:
                with asked:
                    result = call()
        except (Exception, SystemExit):
            # An engine waits for ever for a job that is never reported.
            logger.exception("hicache bridge: job %d failed", job)
        finally:
            self._report(job, result)

    def _report(self, job: int, result: ResultT) -> None:
        with self._changed:
            self._finished.append((job, result))
            self._running -= 1
            self._changed.notify_all()
            closed = self._closed
        # What is notified may be closed by then, as an event's descriptor is.
        if not closed:
            self._notify()
