"""Requests to several stores: one that fails or hangs delays no pages of the others."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from hicache_storage.spec import CancellationToken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from hicache_backends.posix.buffers import Buffers
    from hicache_storage.objects import Call
    from hicache_storage.objects.thread_pool import Task, ThreadPool

POOL_THREADS: Final = 16
"""Threads of one storage, for all calls together."""
MAX_HUNG: Final = 64
"""Threads of requests that hang, beside these. They end by the library's timeouts."""
MAX_THREADS: Final = 4
"""Threads for one call: while some prepare, verify or copy, the transfers of others keep the
library's connections busy."""
PATIENCE_SECONDS: Final = 3.0
"""A request that takes longer hangs. On a machine with ten processes for a core, one took 2.1 s."""
MIN_BYTES_PER_SECOND: Final = 16 << 20
"""Rate below which a transfer hangs."""
RETRY_SECONDS: Final = 2.0
"""Pause after a failed request, before the store is tried again."""
LOST_SECONDS: Final = 5.0
TRIAL_SECONDS: Final = 30.0
"""Limit of such a trial; the library's timeout of a transfer is 10 s."""
FORGET_SECONDS: Final = 600.0
POLL_SECONDS: Final = 0.1
"""Interval in which a call that waits checks for stores that hang, and for its deadline."""
UNKNOWN: Final = ""
"""Endpoint of objects of which it is not known; never left out."""
MAX_MARGIN_SECONDS: Final = 0.1
"""Time before the deadline at which a call returns what has arrived."""

ItemT = TypeVar("ItemT")


class Stores:
    """Health of the stores, by endpoint. Safe for many threads.

    A store is left out from a request that fails or hangs until one succeeds; one request at a time
    tries it again.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, dict[object, tuple[float, float]]] = {}
        """Running requests of each store: when they have begun, and from when on they hang."""
        self._retry_at: dict[str, float] = {}
        """Stores that are left out, and when they are tried again."""
        self._out_since: dict[str, float] = {}

    def begin(self, store: str, size: int) -> object:
        """Note a request for `size` bytes that begins. Returns a token for `end`."""
        token, now = object(), time.monotonic()
        with self._lock:
            self._running.setdefault(store, {})[token] = (
                now,
                now + PATIENCE_SECONDS + size / MIN_BYTES_PER_SECOND,
            )
        return token

    def end(self, store: str, token: object, *, failed: bool | None) -> None:
        """Note the end of a request.

        Args:
            failed: None for one that says nothing about the store.
        """
        now = time.monotonic()
        with self._lock:
            running = self._running.pop(store, {})
            began, _ = running.pop(token, (None, None))
            if failed is False:
                self._retry_at.pop(store, None)
                self._out_since.pop(store, None)
                # The store has answered since the others began, which may be for another one: the
                # library has chosen it before the master dropped that.
                running = {
                    other: times for other, times in running.items() if times[0] > (began or 0.0)
                }
            elif failed and began is not None and store != UNKNOWN:
                self._retry_at[store] = now + RETRY_SECONDS
                self._out_since.setdefault(store, now)
            if running:
                self._running[store] = running

    def is_out(self, store: str) -> bool:
        """Return whether a store is left out."""
        if store in self._retry_at:
            return True
        now = time.monotonic()
        if store == UNKNOWN:
            return False
        with self._lock:
            running = self._running.get(store, {}).values()
            if min((due for _, due in running), default=math.inf) > now:
                return False
            self._retry_at.setdefault(store, now + RETRY_SECONDS)
            self._out_since.setdefault(store, now)
        return True

    def any_out(self, seconds: float = FORGET_SECONDS) -> bool:
        """Return whether any store is left out, and was tried within so many seconds."""
        now = time.monotonic()
        # One that has gone for good keeps no objects, by which it could be tried.
        return any(now - at < seconds for at in list(self._retry_at.values())) or any(
            map(self.is_out, list(self._running))
        )

    def is_lost(self, store: str) -> bool:
        """Return whether a store has been left out for so long that it does not just stall."""
        return self._out_since.get(store, math.inf) < time.monotonic() - LOST_SECONDS

    def try_again(self, store: str) -> bool:
        """Return True if the caller is to try a store that is left out, and to note the end."""
        now = time.monotonic()
        with self._lock:
            if self._retry_at.get(store, math.inf) > now:
                return False
            self._retry_at[store] = now + TRIAL_SECONDS
            return True


@dataclass(slots=True, eq=False)
class _Worker:
    """A thread that makes requests for a call."""

    store: str | None = None
    """The store of its running request."""
    task: Task[None] | None = None


class Requests(Generic[ItemT]):
    """The requests of one call, in threads of a pool. The call leaves those that hang.

    Threads take requests to the store with the fewest running requests, so that a store that hangs
    holds as few of them as there are others.

    Args:
        hold: keeps the connection open, for a thread whose call may have left.
        buffers: one for each thread.
        send: makes a request for some objects of one store, and returns whether the store has
            failed; None if it does not say.
        size_of: an object, in bytes.
    """

    def __init__(
        self,
        thread_pool: ThreadPool,
        stores: Stores,
        call: Call,
        *,
        hold: AbstractContextManager[object],
        buffers: Buffers,
        send: Callable[[list[ItemT], memoryview], bool | None],
        size_of: Callable[[ItemT], int],
    ) -> None:
        self._thread_pool = thread_pool
        self._stores = stores
        self._call = call
        self._hold = hold
        self._buffers = buffers
        self._send = send
        self._size_of = size_of
        self.token = CancellationToken()
        """Cancelled when the call leaves."""
        self.late = False
        """The call has left requests: their store hangs, or the deadline is near."""
        self._changed = threading.Condition()
        # The lock guards all that follows.
        self._queues: dict[str, deque[list[ItemT]]] = {}
        self._workers = set[_Worker]()
        self._error: BaseException | None = None

    def add(self, store: str, lists: Iterable[list[ItemT]]) -> None:
        """Queue a request for each list of objects of a store, before `run`."""
        self._queues.setdefault(store, deque()).extend(lists)

    def run(self) -> None:
        """Make the requests, until all have ended or are left.

        Raises:
            BaseException: the error of one of the requests.
        """
        seconds, until = self._call.remaining(), math.inf
        if seconds is not None:
            until = time.monotonic() + seconds - min(MAX_MARGIN_SECONDS, 0.1 * seconds)
        # A single request delays no others, and a thread for it takes longer.
        in_threads = sum(map(len, self._queues.values())) != 1
        try:
            with self._changed:
                begun = in_threads and self._start_workers()
                while begun and not self._is_over(until):
                    left = until - time.monotonic()
                    self._changed.wait(min(POLL_SECONDS, left) if left > 0 else POLL_SECONDS)
                    self._leave_out()
                    begun = self._start_workers()
            if not begun and not (in_threads and self._thread_pool.hung):
                alone = _Worker()
                self._workers.add(alone)
                self._work(alone)
        finally:
            # Waits for bytes that are being copied.
            self.token.cancel()
            with self._changed:
                workers = [worker for worker in self._workers if worker.task]
                busy = any(worker.store is not None for worker in workers)
                self.late |= busy or any(self._queues.values())
            for task in [worker.task for worker in workers if worker.task]:
                if not self._thread_pool.withdraw(task):
                    self._thread_pool.abandon(task)
        if self._error is not None:
            error = self._error
            self._error = None
            try:
                raise error
            finally:
                # Its traceback refers to this frame: a cycle would keep the buffers.
                del error

    def _start_workers(self) -> bool:
        """Start threads for the queued requests. False if there is none, and none can be started."""
        queued = sum(map(len, self._queues.values()))
        while len(self._workers) < min(MAX_THREADS, queued):
            worker = _Worker()
            worker.task = self._thread_pool.submit(partial(self._work, worker))
            if worker.task is None:
                break
            self._workers.add(worker)
        return bool(self._workers) or not queued

    def _is_over(self, until: float) -> bool:
        if self._error or self._call.expired() or time.monotonic() >= until:
            return True
        busy = any(worker.store is not None for worker in self._workers)
        return not busy and not any(self._queues.values())

    def _leave_out(self) -> None:
        """Leave the requests to stores that are left out."""
        for store in {*self._queues, *(worker.store for worker in self._workers)}:
            if store is None or not self._stores.is_out(store):
                continue
            self._queues.pop(store, None)
            for worker in [worker for worker in self._workers if worker.store == store]:
                self.late = True
                if worker.task:
                    self._workers.discard(worker)
                    self._thread_pool.abandon(worker.task)

    def _work(self, worker: _Worker) -> None:
        try:
            with self._hold, self._buffers.lend(self._call) as memory:
                while (taken := self._take(worker)) is not None:
                    self._make(*taken, memory)
        except TimeoutError:
            # No memory was lent before the deadline. What other threads have read has arrived.
            self.late = True
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self._error = self._error or error
        finally:
            with self._changed:
                self._workers.discard(worker)
                self._changed.notify()

    def _make(self, store: str, items: list[ItemT], memory: memoryview) -> None:
        token, failed = self._stores.begin(store, sum(map(self._size_of, items))), None
        try:
            failed = self._send(items, memory)
        finally:
            self._stores.end(store, token, failed=failed)

    def _take(self, worker: _Worker) -> tuple[str, list[ItemT]] | None:
        """Return the next objects of the store with the fewest running requests."""
        with self._changed:
            worker.store = None
            left = self.token.cancelled or worker not in self._workers
            if left or self._error or self._call.expired():
                return None
            self._leave_out()
            stores = [store for store, queue in self._queues.items() if queue]
            if not stores:
                return None
            busy = Counter(other.store for other in self._workers)
            store = worker.store = min(stores, key=busy.__getitem__)
            return store, self._queues[store].popleft()
