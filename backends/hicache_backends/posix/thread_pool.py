"""Threads that move the bytes of one call side by side."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)


class IoThreadPool:
    """A bounded number of threads, started when first needed. Safe for many callers.

    Args:
        count: most threads; the caller of `run` is one more pair of hands and is not counted. With 0 of them, `run` is left
            to its caller, and what is only started has one thread: a caller must not wait for it.
        name: of the threads.
    """

    def __init__(self, count: int, name: str = "hicache-file") -> None:
        self._count = count
        self._name = name
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def run(self, tasks: Sequence[Callable[[], None]]) -> None:
        """Run all tasks and return when the last has ended. A task keeps its errors to itself.

        The caller goes on with what no thread has begun: threads that hang in the file system keep nobody waiting.
        """
        if len(tasks) < 2 or not self._count:
            for task in tasks:
                task()
            return
        batch = _TaskGroup(tasks)
        for _ in tasks[1 : self._count + 1]:
            self.start(batch.work)
        try:
            batch.work()
        finally:
            # Also where this thread is interrupted: the others write into buffers that are the caller's again after this.
            batch.wait()

    def start(self, task: Callable[[], None]) -> None:
        """Run a task some time, and do not wait for it."""
        with self._lock:
            closed = self._closed
            if not closed and len(self._threads) < max(1, self._count):
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    # The process may have no more. Those that are there do it, or one that a later task can start.
                    logger.debug("cannot start a thread: %s", error)
                else:
                    self._threads.append(thread)
        if closed:
            task()
        else:
            self._tasks.put(task)

    def close(self, timeout_seconds: float) -> None:
        """End the threads; one that hangs in the file system ends when it comes back."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._tasks.put(None)
        until = time.monotonic() + timeout_seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:
                logger.exception("a background task failed")
            # While this thread waits for the next one, nothing of this may stay open or in memory.
            del task


class _TaskGroup:
    """Tasks that several threads take one after the other, and one thread waits for."""

    def __init__(self, tasks: Sequence[Callable[[], None]]) -> None:
        self._tasks = deque(tasks)
        self._unfinished = len(tasks)
        self._lock = threading.Lock()
        self._done = threading.Event()

    def work(self) -> None:
        """Run tasks until none is left to begin."""
        while True:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            try:
                task()
            finally:
                with self._lock:
                    self._unfinished -= 1
                    if not self._unfinished:
                        self._done.set()

    def wait(self) -> None:
        """Wait until the last task has ended; where the caller was interrupted, none is begun any more."""
        with self._lock:
            while self._tasks:
                self._tasks.pop()
                self._unfinished -= 1
            if not self._unfinished:
                self._done.set()
        self._done.wait()
