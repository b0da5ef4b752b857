"""Threads that help with a call: while one puts together or copies what has come, the other's transfer goes on."""

from __future__ import annotations

import threading
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_HELPERS: Final = 8
"""Threads for all calls together. A call that finds all of them busy, or hanging, works alone."""
MOST_THREADS: Final = 4
"""For one call, its caller's among them."""
LARGE_BYTES: Final = 1 << 20
"""Transfers of objects from here on gain by more threads than two."""

ItemT = TypeVar("ItemT")


def threads_for(size: int) -> int:
    """How many threads shall transfer objects of so many bytes over TCP.

    One prepares or copies while the other's transfer goes on. Of large objects these take longer than the library needs to begin the next
    transfer, so that two more keep its connections busy.
    """
    return MOST_THREADS if size >= LARGE_BYTES else 2


class Crew:
    """Does the work of a call in several threads, the caller's and its own. Safe for many threads.

    Work may hang: its thread is left behind then, also by `close` and by the end of the process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle = list[_Helper]()
        self._count = 0
        self._closed = False

    def share(self, work: Callable[[ItemT], None], shares: Sequence[ItemT]) -> None:
        """Do the work with the first share, and with the others as far as there are threads for them.

        Args:
            work: takes what is to be done from where all of them find it, so that whoever works leaves nothing.
        """
        jobs = [job for share in shares[1:] if (job := self._begin(partial(work, share))) is not None]
        try:
            work(shares[0])
        finally:
            # The memory that they work on is given back after this.
            for job in jobs:
                job.done.acquire()
        for job in jobs:
            if job.error is not None:
                raise job.error

    def close(self) -> None:
        """End the threads; those that work end after that. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for helper in idle:
            helper.inbox.put(None)
        for helper in idle:
            helper.join()

    def _begin(self, work: Callable[[], None]) -> _Job | None:
        job = _Job(work)
        with self._lock:
            if self._idle:
                helper = self._idle.pop()
            elif self._closed or self._count == MOST_HELPERS:
                return None
            else:
                helper = _Helper(self._rest)
                helper.start()
                self._count += 1
        helper.inbox.put(job)
        return job

    def _rest(self, helper: _Helper) -> bool:
        """Whether a helper that has done its job shall wait for another."""
        with self._lock:
            if self._closed:
                return False
            self._idle.append(helper)
            return True


class _Job:
    __slots__ = ("done", "error", "work")

    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.error: BaseException | None = None
        self.done = threading.Lock()
        """Released when the job has been done."""
        self.done.acquire()


class _Helper(threading.Thread):
    def __init__(self, rest: Callable[[_Helper], bool]) -> None:
        super().__init__(name="hicache-mooncake", daemon=True)
        self.inbox: SimpleQueue[_Job | None] = SimpleQueue()
        self._rest = rest

    def run(self) -> None:
        goes_on = True
        while goes_on and (job := self.inbox.get()) is not None:
            try:
                job.work()
            except BaseException as error:  # noqa: BLE001 - raised by who waits for it
                job.error = error
            goes_on = self._rest(self)
            job.done.release()
