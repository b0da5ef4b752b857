"""Threads that call a storage and abandon a call that does not return; its binding to a controller."""

from __future__ import annotations

import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from hicache_storage.hybrid.storage_io.calls import StorageCalls
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import HiCacheError, StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.hybrid.pools import HostPoolGroup
    from hicache_storage.hybrid.storage_io.calls import StatsCounter
    from hicache_storage.objects.thread_pool import Task
    from hicache_storage.spec import HiCacheStorage

logger = logging.getLogger(__name__)

MAX_STUCK_THREADS = 2
"""Threads of a worker that may hang in the storage; beyond this, jobs fail until one returns."""


class Job(ABC):
    """A sequence of storage calls in a worker's thread. Publishes its results under `lock`."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.task: Task[None] | None = None
        """Its run in a thread; None before it is submitted, and if no thread could run it."""
        self._cancelled = False
        self._called_at = math.inf

    @abstractmethod
    def perform(self) -> None:
        """Make the calls, each after `begin_call`."""

    @property
    def abandoned(self) -> bool:
        """True once the running call is not waited for."""
        return self.task is not None and self.task.abandoned

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
        """Return whether the job is not waited for any more."""
        return self.abandoned or self.query()

    def query(self) -> bool:
        """Return whether the thread has left the job.

        The storage does not use its pages any more then.
        """
        return self.task is None or self.task.ended

    def run(self) -> None:
        """Perform the job. No error of a driver ends the thread, not even `SystemExit`."""
        try:
            self.perform()
        except BaseException:
            logger.exception("a job of the storage worker failed")

    def overdue(self, seconds: float) -> bool:
        """Return whether the running call has taken longer than that."""
        return not self.query() and time.monotonic() - self._called_at > seconds


class StorageWorker:
    """Runs jobs in the order of submission, in one thread.

    A call that hangs is abandoned with its thread, and another thread takes over. All methods are
    called by the owner's thread.

    Args:
        name: name of the threads.
        call_seconds: how long a call of the storage may take.
        stats: counts abandoned calls.
    """

    def __init__(self, name: str, call_seconds: float, stats: StatsCounter) -> None:
        self._name = name
        self._call_seconds = call_seconds
        self._stats = stats
        self._thread_pool = ThreadPool(name, 1, MAX_STUCK_THREADS)
        self._tasks: dict[Job, Task[None]] = {}
        """Jobs in the order of submission; those that have ended are removed by `expire`."""

    def submit(self, job: Job) -> None:
        """Queue a job. If no thread can run it, it has ended, without a call."""
        # A storage whose calls hang would take one thread after the other. Beyond the limit jobs
        # miss at once, until a hanging call returns.
        job.task = self._thread_pool.submit(job.run)
        if job.task is not None:
            self._tasks[job] = job.task

    def expire(self) -> None:
        """Abandon the running call if it takes too long.

        To be called regularly while a job is awaited.
        """
        for job, task in list(self._tasks.items()):
            if job.query():
                # `_abandon` may have removed it in this loop.
                self._tasks.pop(job, None)
            elif task.begun and job.overdue(self._call_seconds):
                self._abandon(job)

    def stop(self, seconds: float) -> None:
        """End all queued jobs; abandon the running one if it does not end in time."""
        self._end_queued()
        for job, task in list(self._tasks.items()):
            job.cancel()
            if not task.wait(seconds):
                self._abandon(job)
        self._thread_pool.close(seconds)

    def _abandon(self, job: Job) -> None:
        if not self._thread_pool.abandon(self._tasks.pop(job)):
            return
        self._stats.abandoned(job)
        logger.warning("%s: a call of the storage has not returned; it is abandoned", self._name)
        if not self._thread_pool.has_threads:
            self._end_queued()

    def _end_queued(self) -> None:
        for job, task in list(self._tasks.items()):
            if self._thread_pool.withdraw(task):
                del self._tasks[job]
                job.task = None


class StorageAttachedError(HiCacheError, RuntimeError):
    """A storage is attached already; detach it first."""


class StorageBinding:
    """A registered storage and its worker threads for lookups, reads and writes.

    Owns the storage. Made and closed by one thread.

    Args:
        storage: the pools of `group` are registered with it.
        call_seconds: how long a call may take before it is abandoned.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        group: HostPoolGroup,
        call_seconds: float,
        stats: StatsCounter,
    ) -> None:
        self.identity = storage.identity
        self.calls = StorageCalls(storage, group, call_seconds, stats)
        self._storage = storage
        self._stats = stats
        # One thread for each kind of call, so that long reads and backups do not delay lookups.
        self.query = StorageWorker("hicache-query", call_seconds, stats)
        self.read = StorageWorker("hicache-read", call_seconds, stats)
        self.backup = StorageWorker("hicache-backup", call_seconds, stats)
        self.workers = (self.query, self.read, self.backup)

    def close(self, seconds: float) -> None:
        """End the threads and close the storage; waits for each at most so long."""
        # Workers first: a storage must not be closed under a call that still runs, unless it hangs.
        for worker in self.workers:
            worker.stop(seconds)
        close_quietly(self._storage, seconds, self._stats)


class StorageLink:
    """The storage of a controller, if one is attached. Used by the scheduler's thread."""

    def __init__(self) -> None:
        self.binding: StorageBinding | None = None

    def expire(self) -> None:
        """Abandon calls that take too long."""
        if self.binding is not None:
            for worker in self.binding.workers:
                worker.expire()


def call_with_timeout(what: str, call: Callable[[], None], seconds: float) -> None:
    """Make a call in a thread of its own, which is abandoned if it does not return.

    Raises:
        StorageTimeoutError: the call did not return in time.
        StorageUnavailableError: it raised an error that would end the caller, such as `SystemExit`,
            or no thread could be started.
        Exception: the error of the call.
    """
    thread_pool = ThreadPool(f"hicache-{what}", 1)
    task = thread_pool.submit(call)
    in_time = task is not None and task.wait(seconds)
    thread_pool.close(seconds if in_time else 0)
    if task is None:
        raise StorageUnavailableError(f"{what}: no thread could be started")
    if not in_time:
        raise StorageTimeoutError(f"{what} did not return within {seconds} s")
    try:
        task.result()
    except Exception:
        raise
    except BaseException as error:
        # A driver must not end the engine.
        raise StorageUnavailableError(f"{what} raised {type(error).__name__}: {error}") from error


def close_quietly(storage: HiCacheStorage, seconds: float, stats: StatsCounter) -> None:
    """Close a storage; errors are logged and counted, not raised."""
    try:
        call_with_timeout("close", storage.close, seconds)
    except Exception as error:  # noqa: BLE001 - the storage is given up, whatever the error
        timed_out = isinstance(error, StorageTimeoutError)
        stats.count(**{"abandoned_calls" if timed_out else "storage_errors": 1})
        logger.warning("the storage was closed, but not cleanly: %s", error)
