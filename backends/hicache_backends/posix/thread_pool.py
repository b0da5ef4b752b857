"""A thread pool for blocking I/O, in which the caller works too."""

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
    """A bounded number of threads, started on demand. Safe for many callers.

    Args:
        count: limit on threads; the caller of `run` works too and is not counted. With 0, `run`
            leaves all tasks to its caller, and `submit` has one thread, since its caller must not
            wait.
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
        """Run all tasks and return when the last has ended. A task handles its own errors.

        The caller runs every task that no thread has begun: threads that hang in the file system do
        not delay it.
        """
        if len(tasks) < 2 or not self._count:
            for task in tasks:
                task()
            return
        batch = _TaskGroup(tasks)
        for _ in tasks[1 : self._count + 1]:
            self.submit(batch.work)
        try:
            batch.work()
        finally:
            # Also after an interrupt: the other threads write into buffers that the caller gets
            # back.
            batch.wait()

    def submit(self, task: Callable[[], None]) -> None:
        """Run a task in the background."""
        with self._lock:
            closed = self._closed
            if not closed and len(self._threads) < max(1, self._count):
                thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    # The process may have no more threads. The existing ones run the task, or one
                    # started later.
                    logger.debug("cannot start a thread: %s", error)
                else:
                    self._threads.append(thread)
        if closed:
            task()
        else:
            self._tasks.put(task)

    def close(self, timeout_seconds: float) -> None:
        """Stop the threads; one that hangs in the file system ends when its call returns."""
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
            # A reference kept while waiting would keep the task's files and buffers.
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
        """Wait for the last task; after an interrupt the tasks not begun are dropped."""
        with self._lock:
            while self._tasks:
                self._tasks.pop()
                self._unfinished -= 1
            if not self._unfinished:
                self._done.set()
        self._done.wait()
