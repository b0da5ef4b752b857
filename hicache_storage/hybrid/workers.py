"""Threads that call a storage, and leave a call behind that does not come back."""

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
"""Threads of a worker that may hang in the storage; beyond this, jobs fail at once until one comes back."""


class Job(ABC):
    """Some calls of a storage, one after the other, in a worker's thread.

    What it finds out it publishes under `lock`, and only while it is not `abandoned`.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.abandoned = False
        """Nobody waits for the call that runs; guarded by `lock`, as is `_cancelled`."""
        self._cancelled = False
        self._ended = threading.Event()
        self._called_at = math.inf

    @abstractmethod
    def perform(self) -> None:
        """Make the calls: `begin_call` before each."""

    def begin_call(self) -> bool:
        """Whether to make another call; the time it may take counts from here. To be called with `lock` held."""
        self._called_at = time.monotonic()
        return not (self._cancelled or self.abandoned)

    def cancel(self) -> None:
        """Begin no further call."""
        with self.lock:
            self._cancelled = True

    def finished(self) -> bool:
        """Whether nothing more is to come of it."""
        return self.abandoned or self.query()

    def query(self) -> bool:
        """Whether the storage is done with the job's pages, too."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Block until the thread has left the job; whether it has."""
        return self._ended.wait(seconds)

    def run(self) -> None:
        """Perform it; nothing that a driver raises ends the thread, `SystemExit` included."""
        try:
            self.perform()
        except BaseException:
            logger.exception("a job of the storage worker failed")
        finally:
            self.end()

    def end(self) -> None:
        """Nothing runs any more, or ever will."""
        self._ended.set()

    def overdue(self, seconds: float) -> bool:
        """Whether the call that runs takes longer than that."""
        return not self.query() and time.monotonic() - self._called_at > seconds

    def abandon(self) -> bool:
        """Stop waiting for it, unless it has just ended; whether it was abandoned."""
        with self.lock:
            self.abandoned = not self.query()
        return self.abandoned


class StorageWorker:
    """Runs jobs in the order in which they were submitted, in one thread of its own.

    A call that hangs is left behind with its thread, and another thread goes on. `submit`, `expire` and `stop` are called
    by the owner's thread.

    Args:
        name: of the threads.
        call_seconds: how long a call of the storage may take.
        stats: where abandoned calls are counted.
    """

    def __init__(self, name: str, call_seconds: float, stats: StatsCounter) -> None:
        self._name, self._call_seconds, self._stats = name, call_seconds, stats
        self._changed = threading.Condition()
        # Guarded by the condition.
        self._queue: deque[Job] = deque()
        self._running: Job | None = None
        self._thread: threading.Thread | None = None
        self._stuck = 0
        self._stopped = False

    def submit(self, job: Job) -> None:
        """Run a job behind the others; at once it has ended, without a call, where that cannot be."""
        with self._changed:
            accepted = not self._stopped and self._stuck < MAX_STUCK_THREADS and self._ensure_thread()
            if accepted:
                self._queue.append(job)
                self._changed.notify_all()
        if not accepted:
            job.end()

    def expire(self) -> None:
        """Abandon the call that runs if it takes too long; to be called from time to time by whoever waits for a job."""
        with self._changed:
            running = self._running
        if running is not None and running.overdue(self._call_seconds):
            self._abandon(running)

    def stop(self, seconds: float) -> None:
        """End all jobs that have not begun, wait so long for the one that runs, and leave it behind if it does not end."""
        with self._changed:
            self._stopped = True
            waiting, running, thread = list(self._queue), self._running, self._thread
            self._queue.clear()
            self._changed.notify_all()
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
            self._running = self._thread = None
            self._stuck += 1
            goes_on = not self._queue or (self._stuck < MAX_STUCK_THREADS and self._ensure_thread())
            refused = [] if goes_on else list(self._queue)
            if refused:
                self._queue.clear()
        self._stats.count(abandoned_calls=1, stuck_calls=1)
        logger.warning("%s: a call of the storage has not come back; going on without it", self._name)
        for waiting in refused:
            waiting.end()

    def _ensure_thread(self) -> bool:
        """Whether there is a thread; False where the system gives none."""
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                logger.exception("%s: no thread could be started; taken for a miss", self._name)
                return False
            self._thread = thread
        return True

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            job.run()
            with self._changed:
                if job.abandoned:
                    # Another thread has taken over.
                    self._stuck -= 1
                    break
                self._running = None
        else:
            return
        self._stats.count(stuck_calls=-1)
        logger.warning("%s: a call of the storage that was given up has come back", self._name)

    def _next(self) -> Job | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopped)
            if self._stopped:
                return None
            self._running = job = self._queue.popleft()
            return job
