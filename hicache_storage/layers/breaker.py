"""Circuit breakers: after consecutive faults, calls are misses for a while (rule FT-4).

Then one trial call passes. Each kind of operation has a breaker of its own: a store that cannot be
written may still be read.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from hicache_storage.layers.base import StorageLayer
from hicache_storage.objects.lifecycle import ForkAware
from hicache_storage.spec import (
    FaultScope,
    MissReason,
    StorageClosedError,
    StorageUnavailableError,
)
from hicache_storage.spec.calls import check_info
from hicache_storage.spec.stats import BREAKERS

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.spec import HiCacheStorage, HiCacheStorageExtraInfo, StorageStats

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


class BreakerState(StrEnum):
    """State of a circuit breaker.

    `closed`: calls pass. `open`: calls are misses at once. `half_open`: one trial call at a time
    passes.
    """

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class CircuitBreaker(ForkAware):
    """State machine of a circuit breaker, without a storage.

    Thread-safe; the lock is never held during a call. A forked child begins in its parent's state.
    The log has the `kind` of the operations.
    """

    def __init__(
        self,
        threshold: int,
        cooldown_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        kind: str = "call",
    ) -> None:
        self._kind = kind
        self._threshold = threshold
        self._cooldown = cooldown_seconds
        self._clock = clock
        self._failures = 0
        self._open_until = 0.0
        self.state = BreakerState.CLOSED
        """State after the last call."""
        self.refusals = 0
        super().__init__()

    def admits(self) -> bool:
        """Return True if a call may pass now.

        In half-open, one trial call passes at a time. A trial that has not ended after another
        cooldown may hang for ever, so that the next one passes.
        """
        if not self._failures:  # certainly closed; avoids the lock in the common case
            return True
        with self._lock:
            if self.state is BreakerState.CLOSED:
                return True
            now = self._clock()
            if now >= self._open_until:
                self.state = BreakerState.HALF_OPEN
                self._open_until = now + self._cooldown
                return True
            self.refusals += 1
            return False

    def succeeded(self) -> None:
        """Record a call without a fault."""
        if not self._failures:
            return
        with self._lock:
            if self.state is not BreakerState.CLOSED:
                logger.info("circuit breaker closed: the store answers again (%s)", self._kind)
            self._failures = 0
            self.state = BreakerState.CLOSED

    def undecided(self) -> None:
        """Record a call that has not reached the store.

        In half-open, the next call is the trial.
        """
        if not self._failures:
            return
        with self._lock:
            if self.state is BreakerState.HALF_OPEN:
                self.state = BreakerState.OPEN
                self._open_until = self._clock()

    def failed(self) -> None:
        """Record a call with a fault."""
        with self._lock:
            # Counted in every state, as `admits` takes a count of 0 for a closed breaker without
            # the lock.
            self._failures += 1
            if self.state is BreakerState.OPEN:
                # A call that began before the breaker opened does not postpone the trial.
                return
            if self.state is BreakerState.HALF_OPEN or self._failures >= self._threshold:
                if self.state is BreakerState.CLOSED:
                    logger.warning(
                        "circuit breaker open after %d faults in a row (%s)",
                        self._failures,
                        self._kind,
                    )
                self.state = BreakerState.OPEN
                self._open_until = self._clock() + self._cooldown


class CircuitBreakerLayer(StorageLayer):
    """A layer that answers misses while a breaker is open, without calling the store.

    A clear raises then (rule LC-7). Misuse raises always.
    """

    miss_reason = MissReason.BREAKER

    def __init__(
        self,
        inner: HiCacheStorage,
        threshold: int,
        cooldown_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self.breakers = {
            kind: CircuitBreaker(threshold, cooldown_seconds, clock, kind) for kind in BREAKERS
        }
        """By kind of operation."""
        self._notes_faults = inner.notes_faults
        self._closed = False

    def get_stats(self) -> StorageStats:
        return replace(
            super().get_stats(),
            breaker_states={kind: str(each.state) for kind, each in self.breakers.items()},
            breaker_refusals=sum(each.refusals for each in self.breakers.values()),
        )

    def close(self) -> None:
        self._closed = True
        super().close()

    def guard(
        self,
        operation: str,
        ask: Callable[[HiCacheStorageExtraInfo | None], AnswerT],
        miss: Callable[[StorageUnavailableError], AnswerT],
        info: HiCacheStorageExtraInfo | None = None,
    ) -> AnswerT:
        if self._closed:
            raise StorageClosedError(f"{type(self.inner).__name__}: the storage is closed")
        check_info(info)
        kind = "read" if operation == "lookup" else operation
        breaker = self.breakers[kind]
        if not breaker.admits():
            return miss(
                StorageUnavailableError(
                    f"{type(self.inner).__name__}: not asked: several calls in a row have failed, "
                    f"and the circuit breaker of {kind}s is open"
                )
            )
        # A storage that does not report faults to the call has a counter, which calls of other
        # threads increase as well.
        before = None if self._notes_faults else self.inner.fault_count()
        faults, raised = FaultScope(), True
        try:
            with faults:
                answer = ask(info)
            raised = False
        finally:
            if faults.count or (before is not None and self.inner.fault_count() != before):
                breaker.failed()
            elif raised or not faults.store_asked:
                # Neither misuse nor an answer without the store shows that it works.
                breaker.undecided()
            else:
                breaker.succeeded()
        return answer
