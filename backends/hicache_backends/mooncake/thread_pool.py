"""A thread pool for the transfers of one call: one thread copies while another transfers."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MAX_WORKERS: Final = 8
"""Threads for all calls together. If all are busy or hung, a call runs in its caller alone."""
MAX_THREADS: Final = 4
"""Threads for one call, including its caller."""
LARGE_BYTES: Final = 1 << 20
"""From this object size on, more than two threads are faster."""

ItemT = TypeVar("ItemT")


def threads_for(size: int) -> int:
    """Number of threads for the transfer of objects of `size` bytes over TCP.

    One prepares or copies while the other's transfer goes on. For large objects that takes longer
    than the library needs to begin the next transfer, so two more keep its connections busy.
    """
    return MAX_THREADS if size >= LARGE_BYTES else 2


class ThreadPool:
    """Runs the work of a call in its caller's thread and in threads of the pool. Thread-safe.

    Neither `close` nor the end of the process waits for a thread whose work hangs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = list[_Worker]()
        self._count = 0
        self._closed = False

    def run(self, work: Callable[[ItemT], None], shares: Sequence[ItemT]) -> None:
        """Call `work` with the first share, and with others as far as threads are free.

        Args:
            work: takes its items from a common queue until that is empty, so that the number of
                threads does not matter.
        """
        jobs = [
            job for share in shares[1:] if (job := self._begin(partial(work, share))) is not None
        ]
        try:
            work(shares[0])
        finally:
            # Also after an error: the caller releases the memory that these jobs use.
            for job in jobs:
                job.done.acquire()
        for job in jobs:
            if job.error is not None:
                raise job.error

    def close(self) -> None:
        """Stop idle threads now, and busy ones after their work. Idempotent."""
        with self._lock:
            self._closed = True
            idle = self._idle
            self._idle = []
        for worker in idle:
            worker.inbox.put(None)
        for worker in idle:
            worker.join()

    def _begin(self, work: Callable[[], None]) -> _Job | None:
        job = _Job(work)
        with self._lock:
            if self._idle:
                worker = self._idle.pop()
            elif self._closed or self._count == MAX_WORKERS:
                return None
            else:
                worker = _Worker(self._return)
                worker.start()
                self._count += 1
        worker.inbox.put(job)
        return job

    def _return(self, worker: _Worker) -> bool:
        """Return a worker to the pool. False if the worker is to exit."""
        with self._lock:
            if self._closed:
                return False
            self._idle.append(worker)
            return True


class _Job:
    __slots__ = ("done", "error", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.done = threading.Lock()
        """Released at the end of the job."""
        self.done.acquire()


class _Worker(threading.Thread):
    def __init__(self, rest: Callable[[_Worker], bool]) -> None:
        super().__init__(name="hicache-mooncake", daemon=True)
        self.inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._return = rest

    def run(self) -> None:
        again = True
        while again and (job := self.inbox.get()) is not None:
            try:
                job.work()
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                job.error = error
            again = self._return(self)
            job.done.release()
