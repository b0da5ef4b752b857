"""Counters of a storage, the source of `get_stats()`."""

from __future__ import annotations

import copy
import time
from typing import TYPE_CHECKING

from hicache_storage.objects.lifecycle import ForkAware
from hicache_storage.spec import PoolStats, StorageStats, note_fault

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping

    from hicache_storage.spec import MissReason, PoolName


class StatsRecorder(ForkAware):
    """Thread-safe counters; a forked child continues its parent's."""

    def __init__(self, driver: str, *, verifies_checksums: bool = True) -> None:
        self.enabled = True
        """Pages and latencies are counted; faults always are (rule OB-2)."""
        self.faults = 0
        """Number of failed calls of the driver."""
        self.failovers = 0
        """Number of failovers to other servers."""
        self._stats = StorageStats(driver, verifies_checksums=verifies_checksums)
        super().__init__()

    def count(self, pool: PoolName, **increments: int | Counter[MissReason]) -> None:
        """Add to counters of `PoolStats`, by their names."""
        if not self.enabled:
            return
        with self._lock:
            stats = self._pool(pool)
            for name, increment in increments.items():
                setattr(stats, name, getattr(stats, name) + increment)

    def count_fault(self, *, partial: bool = False) -> None:
        """Count a failed call of the driver, also without metrics.

        Faults are misses for the engine, so nothing else shows them.

        Args:
            partial: other pages of the call were served, so that it does not count as failed for a
                circuit breaker.
        """
        if not partial:
            note_fault()
        with self._lock:
            self.faults += 1

    def count_failover(self) -> None:
        """Count a failover to another server; counted also without metrics."""
        with self._lock:
            self.failovers += 1

    def observe(self, operation: str, pools: Iterable[PoolName], started: float) -> None:
        """Record the latency of a call that began at `started` on `time.perf_counter()`."""
        if not self.enabled:
            return
        # Before the lock: waiting for it is not part of the call.
        seconds = time.perf_counter() - started
        with self._lock:
            for pool in pools:
                self._pool(pool).latency[operation].observe(seconds)

    def observe_lookup(
        self,
        present: Mapping[PoolName, list[bool]],
        started: float,
        reasons: Callable[[PoolName], Counter[MissReason]],
    ) -> None:
        """Record a lookup: its latency, and the pages of each pool that were there and were not.

        Args:
            present: for each pool, for each page, True if it was found.
            started: on `time.perf_counter()`.
            reasons: returns why pages of a pool were not found; it is not called where all were.
        """
        if not self.enabled:
            return
        seconds = time.perf_counter() - started
        with self._lock:
            for pool, pages in present.items():
                stats, hits = self._pool(pool), pages.count(True)
                stats.pages_hit += hits
                if hits < len(pages):
                    stats.absent += reasons(pool)
                stats.latency["exists"].observe(seconds)

    def snapshot(self) -> StorageStats:
        """Return a copy of the counters."""
        with self._lock:
            # Copied under the lock: otherwise a snapshot could have the pages of a call without its
            # bytes.
            self._stats.faults = self.faults
            self._stats.failovers = self.failovers
            return copy.deepcopy(self._stats)

    def _pool(self, pool: PoolName) -> PoolStats:
        stats = self._stats.pools.get(pool)
        if stats is None:
            stats = self._stats.pools[pool] = PoolStats()
        return stats
