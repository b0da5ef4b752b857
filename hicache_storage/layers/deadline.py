"""Deadlines of calls, kept also while the store hangs (rule FT-3)."""

from __future__ import annotations

import logging
import threading
import time
from contextvars import copy_context
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

from hicache_storage.layers.miss import MissAnsweringLayer
from hicache_storage.objects.namespace import check_keys
from hicache_storage.observability.request_ids import call_request_id
from hicache_storage.spec import (
    CallInfoScope,
    CancellationToken,
    Health,
    HiCacheStorageExtraInfo,
    HungReads,
    PoolName,
    StorageClosedError,
    StorageTimeoutError,
    note_answer_from_memory,
    note_fault,
)
from hicache_storage.spec.forks import begin_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.spec import HiCacheStorage, PoolTransfer, PoolTransferResult, StorageStats

logger = logging.getLogger(__name__)

MAX_HUNG_CALLS = 32
"""Limit of threads that hang in the store at a time; beyond it calls are misses at once until some
return."""

JOIN_SECONDS = 0.5
"""Time that `close` waits for all workers together: those that do not hang are already ending."""

AnswerT = TypeVar("AnswerT")


class DeadlineLayer(MissAnsweringLayer):
    """Deadline for every call: runs calls that may hang in worker threads, and answers a miss when
    one is late.

    The wrapped storage is passed the deadline too, so that it publishes nothing after the caller
    has been answered (rule SET-8). A get of a storage that reads straight into the host pool is
    waited for, because it could still write there (rule GET-9).
    """

    def __init__(self, inner: HiCacheStorage, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds
        self._default = HiCacheStorageExtraInfo(deadline_seconds=seconds)
        self._workers = _Workers(type(inner).__name__)
        self._deadlines_missed = 0
        self._answers = True
        self._closes = False
        self.begin_in_child()
        begin_in_children(self)

    def begin_in_child(self) -> None:
        """Replace the locks: a thread of the parent that holds one does not exist in the child."""
        self._closing = threading.Lock()
        self._closed = threading.Event()

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        info, longest = self._within(extra_info), self.capabilities.lookup_seconds
        if self.capabilities.may_hang and self._limit(info) > 0:
            # Handing the call to a thread takes longer than the whole answer.
            found = self.inner.batch_exists_cached(keys, pool_transfers, info)
            if found is not None:
                note_answer_from_memory()
                return found
        return self._bounded(
            lambda info: self.inner.batch_exists_v2(keys, pool_transfers, info),
            lambda: self._misses.exists(keys, pool_transfers),
            info,
            waits=longest is not None and longest <= self._limit(info),
        )

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        info, waits = self._within(extra_info), self.capabilities.hung_reads is HungReads.WAIT
        if self.capabilities.may_hang and not waits and self._limit(info) > 0:
            # From a worker thread, a read out of the page cache takes up to a third longer.
            started = time.monotonic()
            delivered = self.inner.batch_get_cached(transfers, info)
            if delivered is not None:
                note_answer_from_memory()
                return delivered
            left = max(0.0, self._limit(info) - (time.monotonic() - started))
            info = replace(info, deadline_seconds=left)
        return self._bounded(
            lambda info: self.inner.batch_get_v2(transfers, info),
            lambda: self._misses.pages(transfers, reads=True),
            info,
            waits=waits,
        )

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self._bounded(
            lambda info: self.inner.batch_set_v2(transfers, info),
            lambda: self._misses.pages(transfers, reads=False),
            self._within(extra_info),
        )

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        check_keys(keys)

        def delete(info: HiCacheStorageExtraInfo) -> list[bool]:
            with CallInfoScope(info):
                return self.inner.delete(keys, pool=pool)

        return self._bounded(delete, lambda: [False] * len(keys), self._default)

    def clear(self) -> None:
        def clear(info: HiCacheStorageExtraInfo) -> None:
            with CallInfoScope(info):
                self.inner.clear()

        def refuse() -> None:
            raise StorageTimeoutError(
                f"{type(self.inner).__name__}: the clear was not over within {self._seconds} s; it "
                f"may have happened, or may "
                "still happen: repeat it before relying on it"
            )

        self._bounded(clear, refuse, self._default)

    def health(self) -> Health:
        late = Health(ok=False, detail=f"no answer within {self._seconds} s")
        return self._bounded(lambda _: self.inner.health(), lambda: late, self._default)

    def open(self) -> None:
        def refuse() -> None:
            raise StorageTimeoutError(
                f"{type(self.inner).__name__}: did not open within {self._seconds} s"
            )

        self._bounded(lambda _: self.inner.open(), refuse, self._default)

    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        return replace(
            stats,
            faults=stats.faults + self._deadlines_missed,
            deadlines_missed=stats.deadlines_missed + self._deadlines_missed,
        )

    def fault_count(self) -> int:
        return self.inner.fault_count() + self._deadlines_missed

    def close(self) -> None:
        """Close the wrapped storage, and abandon it at the deadline if a call in it hangs.

        Other threads that call `close` meanwhile wait for the first, at most as long.
        """
        with self._closing:
            first = not self._closes
            self._closes = True
        if not self.capabilities.may_hang:
            super().close()
        elif first:
            job = _Job(self._close_inner)
            if self._workers.run(job, self._seconds, last=True):
                job.result()
            else:
                logger.warning(
                    "%s: a call hangs; the storage is closed when it returns",
                    type(self.inner).__name__,
                )
        else:
            self._closed.wait(self._seconds)
        self._workers.close()

    def _close_inner(self) -> None:
        try:
            self.inner.close()
        finally:
            self._closed.set()

    def _within(self, extra_info: HiCacheStorageExtraInfo | None) -> HiCacheStorageExtraInfo:
        if extra_info is None:
            return self._default
        asked = extra_info.deadline_seconds
        return replace(
            extra_info,
            deadline_seconds=self._seconds if asked is None else min(asked, self._seconds),
        )

    def _limit(self, info: HiCacheStorageExtraInfo) -> float:
        return self._seconds if info.deadline_seconds is None else info.deadline_seconds

    def _bounded(
        self,
        ask: Callable[[HiCacheStorageExtraInfo], AnswerT],
        miss: Callable[[], AnswerT],
        info: HiCacheStorageExtraInfo,
        *,
        waits: bool = False,
    ) -> AnswerT:
        """Run a call, and answer a miss at the deadline.

        Args:
            waits: the call runs in the caller's thread: it ends in time by itself, or must not be
                abandoned.
        """
        seconds = self._limit(info)
        if seconds <= 0:
            # The caller has set the deadline that has passed: no fault of the store.
            if self._closes:
                raise StorageClosedError(f"{type(self.inner).__name__}: the storage is closed")
            return miss()
        if waits or not self.capabilities.may_hang:
            return ask(info)
        token = CancellationToken()
        # The request id is drawn here at the latest, because the log line about a late call names
        # it.
        bounded = replace(info, cancellation=token, request_id=call_request_id(info.request_id))
        job = _Job(lambda: ask(bounded))
        try:
            in_time = self._workers.run(job, seconds)
        except BaseException:
            # Interrupted, as by Ctrl-C: the memory is the caller's again, as after the deadline.
            token.cancel()
            raise
        if in_time:
            self._answers = True
            return job.result()
        # From here on nothing is written to the caller's memory, and nothing of it is published.
        token.cancel()
        self._deadlines_missed += 1
        note_fault()
        level = logging.WARNING if self._answers else logging.DEBUG
        self._answers = False
        logger.log(
            level,
            "%s: no answer within %s s; answering a miss",
            type(self.inner).__name__,
            seconds,
            extra={"request_id": bounded.request_id, "seconds": seconds},
        )
        return miss()


class _Job(Generic[AnswerT]):
    """A call and its result. `done` is released when the call has returned and its worker is idle
    again."""

    __slots__ = ("_answer", "_ask", "_context", "_error", "abandoned", "done", "finished")

    def __init__(self, ask: Callable[[], AnswerT]) -> None:
        self._ask = ask
        # The caller's context: its request id and its span.
        self._context = copy_context()
        self._answer: list[AnswerT] = []
        self._error: BaseException | None = None
        self.finished = False
        self.abandoned = False
        self.done = threading.Lock()
        self.done.acquire()

    def run(self) -> None:
        try:
            self._answer.append(self._context.run(self._ask))
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._error = error

    def result(self) -> AnswerT:
        if self._error is not None:
            raise self._error
        return self._answer[0]


class _Workers:
    """A thread pool that abandons hung threads; a hung thread ends when its call returns.

    The lock guards the lists, the count and the flags of the jobs; it is never held during a job.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._closed = False
        self.begin_in_child()
        begin_in_children(self)

    def begin_in_child(self) -> None:
        """Start with a new lock and without threads: a fork copies none of them."""
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Job[object] | None]] = []
        self._threads: dict[SimpleQueue[_Job[object] | None], threading.Thread] = {}
        self._hung = 0

    def run(self, job: _Job[AnswerT], seconds: float, *, last: bool = False) -> bool:
        """Run a job in a worker.

        Args:
            last: take a worker also where `MAX_HUNG_CALLS` hang, as `close` does.

        Returns:
            False if the job has not returned in time.
        """
        if self._closed:
            # A closed storage refuses at once, so the call needs no worker.
            job.run()
            return True
        inbox = self._acquire(last)
        if inbox is None:
            return False
        inbox.put(job)  # type: ignore[arg-type]  # an inbox takes jobs of any answer type
        if job.done.acquire(timeout=seconds):
            return True
        with self._lock:
            if not job.finished:
                job.abandoned = True
                self._hung += 1
            return job.finished

    def close(self) -> None:
        """End the workers; a hung one ends by itself when its call returns."""
        with self._lock:
            self._closed = True
            idle = self._idle
            self._idle = []
            threads = list(self._threads.values())
        for inbox in idle:
            inbox.put(None)
        until = time.monotonic() + JOIN_SECONDS
        for thread in threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def _acquire(self, last: bool) -> SimpleQueue[_Job[object] | None] | None:
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if self._hung >= MAX_HUNG_CALLS and not last:
                return None
            inbox: SimpleQueue[_Job[object] | None] = SimpleQueue()
            thread = threading.Thread(
                target=self._serve, args=(inbox,), name=f"hicache-call-{self._name}", daemon=True
            )
            # Within the lock, so that `close` joins every thread that was started.
            try:
                thread.start()
            except RuntimeError as error:
                # The process may have no more threads: a fault like any other.
                logger.debug("cannot start a thread: %s", error)
                return None
            self._threads[inbox] = thread
        return inbox

    def _serve(self, inbox: SimpleQueue[_Job[object] | None]) -> None:
        while (job := inbox.get()) is not None:
            job.run()
            with self._lock:
                job.finished = True
                self._hung -= job.abandoned
                closed = self._closed
                if not closed:
                    self._idle.append(inbox)
            job.done.release()
            if closed:
                break
        with self._lock:
            self._threads.pop(inbox, None)
