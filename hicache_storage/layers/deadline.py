"""Deadlines of calls, kept also while the store hangs (rule FT-3)."""

from __future__ import annotations

import logging
import threading
import time
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.layers.base import StorageLayer
from hicache_storage.objects.lifecycle import ForkAware
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.observability.request_ids import call_request_id
from hicache_storage.spec import (
    CancellationToken,
    Health,
    HiCacheStorageExtraInfo,
    HungReads,
    MayHangError,
    MissReason,
    StorageClosedError,
    StorageTimeoutError,
    StorageUnavailableError,
    from_memory,
    note_answer_from_memory,
    note_fault,
    seconds_since_asked,
)
from hicache_storage.spec.calls import check_info

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.spec import HiCacheStorage, StorageStats

logger = logging.getLogger(__name__)

MAX_HUNG_CALLS = 32
"""Limit of threads that hang in the store at a time; beyond it calls are misses at once until some
return."""

JOIN_SECONDS = 0.5
"""Time that `close` waits for all workers together: those that do not hang are already ending."""

AnswerT = TypeVar("AnswerT")


class DeadlineLayer(StorageLayer, ForkAware):
    """Deadline for every call: runs calls that may hang in worker threads, and answers a miss when
    one is late.

    The wrapped storage is passed the deadline too, so that it publishes nothing after the caller
    has been answered (rule SET-8). A get of a storage that reads straight into the host pool is
    waited for, because it could still write there (rule GET-9).
    """

    miss_reason = MissReason.DEADLINE

    def __init__(self, inner: HiCacheStorage, seconds: float) -> None:
        StorageLayer.__init__(self, inner)
        self._seconds = seconds
        self._default = HiCacheStorageExtraInfo(deadline_seconds=seconds)
        self._thread_name = f"hicache-call-{type(inner).__name__}"
        self._thread_pool = ThreadPool(self._thread_name, max_hung=MAX_HUNG_CALLS)
        self._deadlines_missed = 0
        self._answers = True
        self._closes = False
        ForkAware.__init__(self)

    def begin_in_child(self) -> None:
        """Replace the locks: a thread of the parent that holds one does not exist in the child."""
        self._closing = threading.Lock()
        self._closed = threading.Event()

    def guard(
        self,
        operation: str,
        ask: Callable[[HiCacheStorageExtraInfo | None], AnswerT],
        miss: Callable[[StorageUnavailableError], AnswerT],
        info: HiCacheStorageExtraInfo | None = None,
    ) -> AnswerT:
        within, capabilities = self._limited(info), self.inner.capabilities
        if (
            capabilities.may_hang
            and self.inner.answers_from_memory(operation)
            and (operation == "lookup" or capabilities.hung_reads is not HungReads.WAIT)
            and self._limit(within) > 0
        ):
            # Handing a call to a thread takes longer than a whole lookup in memory, and a read out
            # of the page cache takes up to a third longer there.
            started = time.monotonic()
            token = from_memory.set(True)
            try:
                answer = ask(within)
            except MayHangError:
                left = self._limit(within) - (time.monotonic() - started)
                within = replace(within, deadline_seconds=max(0.0, left))
            else:
                note_answer_from_memory()
                return answer
            finally:
                from_memory.reset(token)
        longest = capabilities.lookup_seconds
        # A read into the pool must not be abandoned; a lookup may end in time by itself.
        waits = (operation == "read" and capabilities.hung_reads is HungReads.WAIT) or (
            operation == "lookup" and longest is not None and longest <= self._limit(within)
        )
        return self._bounded(ask, miss, within, waits=waits)

    def health(self) -> Health:
        return self._bounded(
            lambda _: self.inner.health(),
            lambda error: Health(ok=False, detail=str(error)),
            self._limited(None),
        )

    def open(self) -> None:
        def refuse(error: StorageUnavailableError) -> None:
            raise type(error)(f"{error}; the storage did not open")

        self._bounded(lambda _: self.inner.open(), refuse, self._limited(None))

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

    def _limited(self, extra_info: HiCacheStorageExtraInfo | None) -> HiCacheStorageExtraInfo:
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
            info: of the call, with its deadline.
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
        # In the caller's context: its request id.
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
