"""A thread pool for calls that may hang."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from hicache_storage.objects.lifecycle import ForkAware

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Task(Generic[ResultT_co]):
    """A call in a thread of a pool, and its result."""

    __slots__ = ("_calls", "_done", "_error", "_result", "abandoned", "ended", "worker")

    def __init__(self, call: Callable[[], ResultT_co]) -> None:
        # At most one call: the thread that takes it and the caller that withdraws it both `pop`,
        # which is atomic.
        self._calls = [call]
        self._result: ResultT_co
        self._error: BaseException | None = None
        # A lock takes a fifth of the time of an `Event`, and a task is made for every call.
        self._done = threading.Lock()
        self._done.acquire()
        # Guarded by the lock of the pool.
        self.worker: _Worker | None = None
        """Thread that makes the call; None before and afterwards."""
        self.ended = False
        self.abandoned = False

    @property
    def begun(self) -> bool:
        """Whether a thread has taken the call, or it was withdrawn."""
        return not self._calls

    def wait(self, seconds: float = -1) -> bool:
        """Wait for the end of the call, without limit by default; returns whether it has ended.

        Its thread is free for another call by then.
        """
        if self._done.acquire(timeout=seconds):
            self._done.release()
            return True
        return False

    def result(self) -> ResultT_co:
        """Return the result of a call that has ended, or raise its error; to be called once."""
        error = self._error
        if error is not None:
            # The error's traceback refers to this frame and to those of the callers, which have
            # the task: a cycle would keep the call's buffers until the next garbage collection.
            self._error = None
            try:
                raise error
            finally:
                del error
        return self._result

    def withdraw(self) -> bool:
        """Drop the call; False if it has begun."""
        try:
            self._calls.pop()
        except IndexError:
            return False
        return True

    def run(self) -> None:
        """Make the call in this thread, unless it was withdrawn."""
        try:
            call = self._calls.pop()
        except IndexError:
            return
        try:
            self._result = call()
        except BaseException as error:  # noqa: BLE001 - raised by `result`
            self._error = error
            # A cycle otherwise, as in `result`.
            del self

    def release(self) -> None:
        """Let `wait` return."""
        self._done.release()


class ThreadPool(ForkAware):
    """A thread pool for calls that may hang. Thread-safe; a forked child starts without threads.

    A thread is started where none is idle. A call that is given up (`abandon`) keeps its thread
    until it returns, and another thread takes the place of that one. Neither `close` nor the end
    of the process waits for such a thread.

    Used by the deadline layer, the hybrid controller, the bridges and all drivers. The conformance
    suite has threads of its own: it judges storages that may use this class, so that a defect here
    must not hide in both.

    Args:
        name: of the threads.
        max_threads: threads that are not abandoned; a further call waits for one, as it does where
            there are fewer and no other can be started. With 0, `run` leaves all calls to its
            caller, and one thread runs the calls of others, whose callers must not wait. None: no
            limit, and no call waits.
        max_hung: abandoned calls from which on no thread is started.
    """

    def __init__(
        self, name: str, max_threads: int | None = None, max_hung: int | None = None
    ) -> None:
        self._name = name
        self._max_helpers = max_threads
        self._max_threads = None if max_threads is None else max(1, max_threads)
        self._max_hung = max_hung
        self.closed = False
        super().__init__()

    def begin_in_child(self) -> None:
        """Start with a new lock and without threads: a fork copies none of them."""
        super().begin_in_child()
        # Guarded by the lock, which is never held during a call.
        self._idle: list[_Worker] = []
        self._threads: set[_Worker] = set()
        """All threads except those of abandoned calls."""
        self._queue: deque[Task[object]] = deque()
        """Calls that wait for a thread; empty while one is idle."""
        self.hung = 0
        """Threads of abandoned calls."""

    @property
    def has_threads(self) -> bool:
        """Whether a thread is idle, or will be after its call, as far as is known."""
        return bool(self._threads)

    def submit(self, call: Callable[[], ResultT]) -> Task[ResultT] | None:
        """Run a call in a thread, or queue it until one is free where their number is limited.

        Returns:
            None if the pool is closed, or has no thread and can start none: the call is not made.
        """
        task = Task(call)
        return task if self._submit(task) else None

    def _submit(self, task: Task[object]) -> bool:
        with self._lock:
            if self.closed:
                return False
            if not self._assign(task):
                if self._max_threads is None or not self._threads:
                    return False
                self._queue.append(task)
        return True

    def run_in_background(self, call: Callable[[], object]) -> bool:
        """Run a call that nobody waits for; its errors are logged.

        Returns:
            `False` if it is dropped: the pool is closed, or no thread can be started.
        """
        return self.submit(partial(_log_errors, call)) is not None

    def run(self, calls: Sequence[Callable[[], object]]) -> None:
        """Make all calls, in the caller's thread and in others, and return when all have ended.

        The caller makes every call that no thread has begun, so that hung threads do not delay it.

        Raises:
            BaseException: the error of one of the calls. Those that had not begun are dropped.
        """
        if len(calls) < 2 or not self._max_helpers:
            for call in calls:
                call()
            return
        left = deque(calls)
        begin = partial(_make_calls, left)
        tasks = [Task(begin) for _ in calls[1 : self._max_helpers + 1]]
        try:
            for task in tasks:
                self._submit(task)
            _make_calls(left)
        finally:
            # Also after an interrupt: the others use buffers that the caller gets back.
            left.clear()
            begun = [task for task in tasks if not self.withdraw(task)]
            for task in begun:
                task.wait()
        for task in begun:
            task.result()

    def withdraw(self, task: Task[object]) -> bool:
        """Drop a call; False if it has begun."""
        if not task.withdraw():
            return False
        # Behind hung calls the empty task would stay in the queue.
        if self._queue:
            with self._lock, suppress(ValueError):
                self._queue.remove(task)
        return True

    def abandon(self, task: Task[object]) -> bool:
        """Give up a running call: its thread does not count until the call returns.

        Returns:
            False if it has ended.
        """
        with self._lock:
            if task.worker is None:
                return False
            task.abandoned = True
            self._threads.discard(task.worker)
            self.hung += 1
            while self._queue and self._assign(self._queue[0]):
                self._queue.popleft()
        return True

    def close(self, seconds: float) -> None:
        """Refuse further calls, and end the threads after those that are running or queued.

        Args:
            seconds: limit for all threads together; one whose call hangs ends when that returns.
        """
        with self._lock:
            self.closed = True
            threads = list(self._threads)
            self._threads.difference_update(self._idle)
            self._idle.clear()
            for thread in threads:
                thread.inbox.put(None)
        until = time.monotonic() + seconds
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _assign(self, task: Task[object]) -> bool:
        """Hand a call to an idle or new thread, if there is one."""
        # Without a call between the removal and `put`: an interrupt there would lose the thread.
        if self._idle:
            # It was idle for the shortest time, and still has its stack in the CPU cache.
            worker = self._idle[-1]
            del self._idle[-1]
        elif (started := self._start_worker()) is not None:
            worker = started
        else:
            return False
        task.worker = worker
        worker.inbox.put(task)
        return True

    def _start_worker(self) -> _Worker | None:
        if self._max_hung is not None and self.hung >= self._max_hung:
            return None
        if self._max_threads is not None and len(self._threads) >= self._max_threads:
            return None
        worker = _Worker(self._name, self._finish)
        # Within the lock, so that `close` joins every thread that was started.
        try:
            worker.start()
            self._threads.add(worker)
        except BaseException as error:
            # Interrupted, it may have begun, and ends.
            self._threads.discard(worker)
            worker.inbox.put(None)
            if not isinstance(error, RuntimeError):
                raise
            # The process may have no more threads: a fault like any other.
            logger.debug("%s: cannot start a thread: %s", self._name, error)
            return None
        return worker

    def _finish(self, worker: _Worker, task: Task[object]) -> None:
        """Give a thread its next call, None if it is to exit, or let it be idle."""
        with self._lock:
            task.ended = True
            task.worker = None
            if task.abandoned:
                self.hung -= 1
                # Another thread may have taken its place.
                if len(self._threads) != self._max_threads:
                    self._threads.add(worker)
            if worker not in self._threads:
                worker.inbox.put(None)
            elif self._queue:
                following = self._queue.popleft()
                following.worker = worker
                worker.inbox.put(following)
            elif self.closed:
                self._threads.discard(worker)
                worker.inbox.put(None)
            else:
                self._idle.append(worker)
        # Last, so that the caller's next call finds this thread idle and starts no other.
        task.release()


class _Worker(threading.Thread):
    """A thread of a pool."""

    def __init__(self, name: str, finish: Callable[[_Worker, Task[object]], None]) -> None:
        # A daemon: a call that hangs for ever must not keep the process from exiting.
        super().__init__(name=name, daemon=True)
        # One for each thread: of several threads that wait at one `SimpleQueue`, each item wakes
        # two.
        self.inbox: SimpleQueue[Task[object] | None] = SimpleQueue()
        self._finish = finish

    def run(self) -> None:
        # At `close` None may come before the call that follows this one.
        while (task := self.inbox.get()) is not None or not self.inbox.empty():
            if task is not None:
                task.run()
                self._finish(self, task)
            # A reference kept while waiting would keep the call's files and buffers.
            del task


def _make_calls(left: deque[Callable[[], object]]) -> None:
    """Make calls of a common queue until it is empty or one fails."""
    while True:
        try:
            call = left.popleft()
        except IndexError:
            return
        try:
            call()
        except BaseException:
            left.clear()
            raise


def _log_errors(call: Callable[[], object]) -> None:
    try:
        call()
    except BaseException:
        logger.exception("a background task failed")
