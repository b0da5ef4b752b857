"""Worker threads that call a storage, and abandon a call that does not return."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.hybrid.stats import StatsCounter

logger = logging.getLogger(__name__)

MAX_STUCK_THREADS = 2
"""Threads of a worker that may hang in the storage; beyond this, jobs fail until one returns."""


class Job(ABC):
    """A sequence of storage calls in a worker's thread.

    A job publishes its results under `lock`, and only while it is not `abandoned`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.abandoned = False
        """True once the running call is not waited for; guarded by `lock`, as is `_cancelled`."""
        self._cancelled = False
        self._ended = threading.Event()
        self._called_at = math.inf

    @abstractmethod
    def perform(self) -> None:
        """Make the calls, each after `begin_call`."""

    def begin_call(self) -> bool:
        """Return whether to make another call, and start its time limit.

        Called with `lock` held.
        """
        self._called_at = time.monotonic()
        return not (self._cancelled or self.abandoned)

    def cancel(self) -> None:
        """Prevent further calls of this job."""
        with self.lock:
            self._cancelled = True

    def finished(self) -> bool:
        """Return whether the job will publish no further result."""
        return self.abandoned or self.query()

    def query(self) -> bool:
        """Return whether the thread has left the job.

        The storage does not use its pages any more then.
        """
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Block until the thread has left the job; returns whether it has."""
        return self._ended.wait(seconds)

    def run(self) -> None:
        """Perform the job. No error of a driver ends the thread, not even `SystemExit`."""
        try:
            self.perform()
        except BaseException:
            logger.exception("a job of the storage worker failed")
        finally:
            self.end()

    def end(self) -> None:
        """Mark the job as ended."""
        self._ended.set()

    def overdue(self, seconds: float) -> bool:
        """Return whether the running call has taken longer than that."""
        return not self.query() and time.monotonic() - self._called_at > seconds

    def abandon(self) -> bool:
        """Stop waiting for the job, unless it has just ended.

        Returns whether it is abandoned.
        """
        # Results are published under the lock, so that a job is either abandoned or has published
        # all of them, never a part.
        with self.lock:
            self.abandoned = not self.query()
        return self.abandoned


class StorageWorker:
    """Runs jobs in the order of submission, in one thread of its own.

    A call that hangs is abandoned with its thread, and another thread takes over. `submit`,
    `expire` and `stop` are called by the owner's thread.

    Args:
        name: name of the threads.
        call_seconds: how long a call of the storage may take.
        stats: counts abandoned calls.
    """

    def __init__(self, name: str, call_seconds: float, stats: StatsCounter) -> None:
        self._name = name
        self._call_seconds = call_seconds
        self._stats = stats
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._stuck = 0
        self._stopped = False

    def submit(self, job: Job) -> None:
        """Queue a job. If no thread can run it, it ends at once, without a call."""
        # A storage whose calls hang would take one thread after the other. Beyond the limit jobs
        # miss at once, until a hanging call returns.
        with self._changed:
            accepted = (
                not self._stopped and self._stuck < MAX_STUCK_THREADS and self._ensure_thread()
            )
            if accepted:
                self._queue.append(job)
                self._changed.notify_all()
        if not accepted:
            job.end()

    def expire(self) -> None:
        """Abandon the running call if it takes too long.

        To be called regularly while a job is awaited.
        """
        with self._changed:
            running = self._running
        # The job may end between this check and the next line; `_abandon` looks again under both
        # locks.
        if running is not None and running.overdue(self._call_seconds):
            self._abandon(running)

    def stop(self, seconds: float) -> None:
        """End all queued jobs; abandon the running one if it does not end in time."""
        with self._changed:
            self._stopped = True
            waiting, running, thread = list(self._queue), self._running, self._thread
            self._queue.clear()
            self._changed.notify_all()
        # Outside of the condition, which the thread needs to finish its job.
        for job in waiting:
            job.end()
        if running is not None:
            running.cancel()
            if not running.wait(seconds):
                self._abandon(running)
                return
        if thread is not None:
            thread.join(seconds)

    def _abandon(self, job: Job) -> None:
        with self._changed:
            if self._running is not job or not job.abandon():
                return
            # The hanging thread keeps the job; the next job gets a thread of its own.
            self._running = None
            self._thread = None
            self._stuck += 1
            has_thread = not self._queue or (
                self._stuck < MAX_STUCK_THREADS and self._ensure_thread()
            )
            refused = [] if has_thread else list(self._queue)
            if refused:
                self._queue.clear()
        self._stats.count(abandoned_calls=1, stuck_calls=1)
        logger.warning("%s: a call of the storage has not returned; it is abandoned", self._name)
        for waiting in refused:
            waiting.end()

    def _ensure_thread(self) -> bool:
        """Start a thread if there is none; False if the system cannot start one."""
        if self._thread is None:
            # A daemon: a call that hangs for ever must not keep the process from exiting.
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                logger.exception("%s: no thread could be started; counted as a miss", self._name)
                return False
            self._thread = thread
        return True

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                if job.abandoned:
                    # Another thread serves the queue by now; this one exits.
                    self._stuck -= 1
                    break
                self._running = None
        else:
            return
        self._stats.count(stuck_calls=-1)
        logger.warning("%s: an abandoned call of the storage has returned", self._name)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
            if self._stopped:
                return None
            job = self._queue.popleft()
            self._running = job
            return job
