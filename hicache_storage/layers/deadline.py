"""Deadlines of calls, kept also while the store hangs (rule FT-3)."""

from __future__ import annotations

import logging
import threading
import time
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.layers.miss import MissAnsweringLayer
from hicache_storage.objects.lifecycle import begin_in_children
from hicache_storage.objects.thread_pool import ThreadPool
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
    StorageUnavailableError,
    note_answer_from_memory,
    note_fault,
    seconds_since_asked,
)
from hicache_storage.spec.arguments import check_keys
from hicache_storage.spec.calls import check_info

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
        self._thread_name = f"hicache-call-{type(inner).__name__}"
        self._thread_pool = ThreadPool(self._thread_name, max_hung=MAX_HUNG_CALLS)
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
        info, capabilities = self._within(extra_info), self.inner.capabilities
        longest = capabilities.lookup_seconds
        if capabilities.may_hang and self._limit(info) > 0:
            # Handing the call to a thread takes longer than the whole answer.
            found = self.inner.batch_exists_cached(keys, pool_transfers, info)
            if found is not None:
                note_answer_from_memory()
                return found
        return self._bounded(
            lambda info: self.inner.batch_exists_v2(keys, pool_transfers, info),
            lambda _: self._misses.exists(keys, pool_transfers),
            info,
            waits=longest is not None and longest <= self._limit(info),
        )

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        info, longest = self._within(extra_info), self.inner.capabilities.lookup_seconds
        if self.inner.capabilities.may_hang and self._limit(info) > 0:
            found = self.inner.batch_present_cached(keys, pool=pool, extra_info=info)
            if found is not None:
                note_answer_from_memory()
                return found
        return self._bounded(
            lambda info: self.inner.batch_present(keys, pool=pool, extra_info=info),
            lambda _: self._misses.presence(keys, pool),
            info,
            waits=longest is not None and longest <= self._limit(info),
        )

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        info, waits = self._within(extra_info), self.inner.capabilities.hung_reads is HungReads.WAIT
        if self.inner.capabilities.may_hang and not waits and self._limit(info) > 0:
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
            lambda _: self._misses.pages(transfers, reads=True),
            info,
            waits=waits,
        )

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self._bounded(
            lambda info: self.inner.batch_set_v2(transfers, info),
            lambda _: self._misses.pages(transfers, reads=False),
            self._within(extra_info),
        )

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        check_keys(keys)

        def delete(info: HiCacheStorageExtraInfo) -> list[bool]:
            with CallInfoScope(info):
                return self.inner.delete(keys, pool=pool)

        return self._bounded(delete, lambda _: [False] * len(keys), self._within(None))

    def clear(self) -> None:
        def clear(info: HiCacheStorageExtraInfo) -> None:
            with CallInfoScope(info):
                self.inner.clear()

        def refuse(error: StorageUnavailableError) -> None:
            raise type(error)(
                f"{error}; the clear may have happened, or may still happen: repeat it before "
                "relying on it"
            )

        self._bounded(clear, refuse, self._within(None))

    def health(self) -> Health:
        return self._bounded(
            lambda _: self.inner.health(),
            lambda error: Health(ok=False, detail=str(error)),
            self._within(None),
        )

    def open(self) -> None:
        def refuse(error: StorageUnavailableError) -> None:
            raise type(error)(f"{error}; the storage did not open")

        self._bounded(lambda _: self.inner.open(), refuse, self._within(None))

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
        if not self.inner.capabilities.may_hang:
            super().close()
        elif first:
            # A thread of its own: `MAX_HUNG_CALLS` others may hang, and nobody else would ever
            # close the storage.
            closer = ThreadPool(self._thread_name)
            close = partial(copy_context().run, self._close_inner)
            # Where none can be started, as when the interpreter ends, one that is idle.
            task = closer.submit(close) or self._thread_pool.submit(close)
            ended = task is not None and task.wait(self._seconds)
            closer.close(JOIN_SECONDS if ended else 0)
            if task is None and not self._thread_pool.hung:
                # No thread can watch over it; but the store answers, as far as is known.
                self._close_inner()
            elif task is None:
                logger.error(
                    "%s: a call hangs, and no thread can be started; the storage stays open",
                    type(self.inner).__name__,
                )
            elif ended:
                task.result()
            else:
                logger.warning(
                    "%s: a call hangs; the storage is closed when it returns",
                    type(self.inner).__name__,
                )
        else:
            self._closed.wait(self._seconds)
        self._thread_pool.close(JOIN_SECONDS)

    def _close_inner(self) -> None:
        try:
            self.inner.close()
        finally:
            self._closed.set()

    def _within(self, extra_info: HiCacheStorageExtraInfo | None) -> HiCacheStorageExtraInfo:
        check_info(extra_info)
        waited = seconds_since_asked()
        if extra_info is None and not waited:
            return self._default
        info = extra_info or self._default
        return replace(info, deadline_seconds=min(self._limit(info), self._seconds) - waited)

    def _limit(self, info: HiCacheStorageExtraInfo) -> float:
        return self._seconds if info.deadline_seconds is None else info.deadline_seconds

    def _bounded(
        self,
        ask: Callable[[HiCacheStorageExtraInfo], AnswerT],
        miss: Callable[[StorageUnavailableError], AnswerT],
        info: HiCacheStorageExtraInfo,
        *,
        waits: bool = False,
    ) -> AnswerT:
        """Run a call, and answer a miss at the deadline.

        Args:
            ask: the call.
            miss: answers in its place, and is told why.
            info: of the call.
            waits: the call runs in the caller's thread: it ends in time by itself, or must not be
                abandoned.
        """
        seconds, name = self._limit(info), type(self.inner).__name__
        if seconds <= 0:
            # The caller has set the deadline that has passed, or has waited in a queue for longer:
            # no fault of the store.
            note_answer_from_memory()
            if self._closes:
                raise StorageClosedError(f"{name}: the storage is closed")
            return miss(StorageTimeoutError(f"{name}: the deadline has passed before the call"))
        if waits or not self.inner.capabilities.may_hang:
            return ask(info)
        token = CancellationToken()
        # The request id is drawn here at the latest, because the log line about a late call names
        # it.
        bounded = replace(info, cancellation=token, request_id=call_request_id(info.request_id))
        # In the caller's context: its request id and its span.
        context = copy_context()
        try:
            task = self._thread_pool.submit(lambda: context.run(ask, bounded))
            if task is None and self._thread_pool.closed:
                # A closed storage refuses at once, so the call needs no thread.
                return ask(bounded)
            late = task is None or (not task.wait(seconds) and self._thread_pool.abandon(task))
        except BaseException:
            # Interrupted, as by Ctrl-C: the memory is the caller's again, as after the deadline.
            token.cancel()
            raise
        if task is not None and not late:
            self._answers = True
            return task.result()
        # From here on nothing is written to the caller's memory, and nothing of it is published.
        token.cancel()
        self._deadlines_missed += 1
        note_fault()
        error: StorageUnavailableError = StorageTimeoutError(
            f"{name}: no answer within {seconds} s"
        )
        if task is None:
            hung = self._thread_pool.hung
            why = f"{hung} calls hang" if hung >= MAX_HUNG_CALLS else "can't start new thread"
            error = StorageUnavailableError(f"{name}: no thread for the call: {why}")
        level = logging.WARNING if self._answers else logging.DEBUG
        self._answers = False
        logger.log(
            level,
            "%s; answering a miss",
            error,
            extra={"request_id": bounded.request_id, "seconds": seconds},
        )
        return miss(error)
