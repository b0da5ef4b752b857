"""A circuit breaker: after a row of faults a store is left alone for a while, then tried with one call (rule FT-4)."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.layers.miss import MissAnsweringLayer
from hicache_storage.spec import FaultScope, StorageClosedError
from hicache_storage.spec.forks import begin_in_children

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.spec import (
        HiCacheStorage,
        HiCacheStorageExtraInfo,
        PoolName,
        PoolTransfer,
        PoolTransferResult,
        StorageStats,
    )

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


class BreakerState(StrEnum):
    """`closed`: calls pass. `open`: calls are misses at once. `half_open`: one call at a time is on its way to find out."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker:
    """The states and the counting, without a storage. Thread-safe; the lock is never held during a call."""

    def __init__(self, threshold: int, cooldown_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._threshold, self._cooldown, self._clock = threshold, cooldown_seconds, clock
        self._failures = 0
        self._open_until = 0.0
        self._state = BreakerState.CLOSED
        self.refusals = 0
        self.begin_in_child()
        begin_in_children(self)

    def begin_in_child(self) -> None:
        """A new lock; the state is the parent's."""
        self._lock = threading.Lock()

    @property
    def state(self) -> BreakerState:
        """The state that the last call left."""
        return self._state

    def admits(self) -> bool:
        """Whether a call may pass now.

        In half-open, one caller at a time is told yes, until it has reported back; one that has not for as long as the cooldown
        may hang for ever, and another may try.
        """
        if not self._failures:  # closed for sure, without taking the lock
            return True
        with self._lock:
            if self._state is BreakerState.CLOSED:
                return True
            now = self._clock()
            if now >= self._open_until:
                self._state = BreakerState.HALF_OPEN
                self._open_until = now + self._cooldown
                return True
            self.refusals += 1
            return False

    def succeeded(self) -> None:
        """A call passed without a fault."""
        if not self._failures:
            return
        with self._lock:
            if self._state is not BreakerState.CLOSED:
                logger.info("circuit breaker closed: the store answers again")
            self._failures, self._state = 0, BreakerState.CLOSED

    def undecided(self) -> None:
        """A call ended without having asked the store: in half-open, the next one tries."""
        if not self._failures:
            return
        with self._lock:
            if self._state is BreakerState.HALF_OPEN:
                self._state, self._open_until = BreakerState.OPEN, self._clock()

    def failed(self) -> None:
        """A call met a fault."""
        with self._lock:
            self._failures += 1
            if self._state is BreakerState.OPEN:
                # Of a call that began before: the store is tried again when it was to be.
                return
            if self._state is BreakerState.HALF_OPEN or self._failures >= self._threshold:
                if self._state is BreakerState.CLOSED:
                    logger.warning("circuit breaker open after %d faults in a row", self._failures)
                self._state = BreakerState.OPEN
                self._open_until = self._clock() + self._cooldown


class CircuitBreakerLayer(MissAnsweringLayer):
    """Answers misses without asking, while the breaker is open. Misuse is told all the same."""

    def __init__(self, inner: HiCacheStorage, breaker: CircuitBreaker) -> None:
        super().__init__(inner)
        self.breaker = breaker
        self._closed = False

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return self._guard(
            lambda: self.inner.batch_exists_v2(keys, pool_transfers, extra_info),
            lambda: self._misses.exists(keys, pool_transfers),
            extra_info,
        )

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self._guard(
            lambda: self.inner.batch_get_v2(transfers, extra_info),
            lambda: self._misses.pages(transfers, reads=True),
            extra_info,
        )

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self._guard(
            lambda: self.inner.batch_set_v2(transfers, extra_info),
            lambda: self._misses.pages(transfers, reads=False),
            extra_info,
        )

    def get_stats(self) -> StorageStats:
        return replace(super().get_stats(), breaker_state=str(self.breaker.state), breaker_refusals=self.breaker.refusals)

    def close(self) -> None:
        self._closed = True
        super().close()

    def _guard(self, ask: Callable[[], AnswerT], miss: Callable[[], AnswerT], info: HiCacheStorageExtraInfo | None) -> AnswerT:
        if self._closed:
            raise StorageClosedError(f"{type(self.inner).__name__}: the storage is closed")
        if info is not None and info.deadline_seconds is not None and info.deadline_seconds <= 0:
            # A miss that asks nobody, and finds nothing out about the store.
            return ask()
        if not self.breaker.admits():
            return miss()
        # A storage that does not tell each call of its faults has a count, which other threads' calls raise as well.
        before = None if self.inner.notes_faults else self.inner.fault_count()
        faults, raised = FaultScope(), True
        try:
            with faults:
                answer = ask()
            raised = False
        finally:
            if faults.count or (before is not None and self.inner.fault_count() != before):
                self.breaker.failed()
            elif raised or not faults.store_asked:
                # Neither misuse nor an answer from memory shows that the store works.
                self.breaker.undecided()
            else:
                self.breaker.succeeded()
        return answer
