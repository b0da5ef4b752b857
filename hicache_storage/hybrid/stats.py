"""What the controller counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(slots=True)
class ControllerStats:
    """Counters since the controller was made; a snapshot where `HybridCacheController.stats` returns it."""

    tokens_written_back: int = 0
    tokens_loaded: int = 0
    writes_without_room: int = 0
    loads_without_room: int = 0
    prefetches: int = 0
    """Begun; those declined are counted beside."""
    prefetches_below_threshold: int = 0
    """Declined, as the span is too short."""
    prefetches_rate_limited: int = 0
    tokens_prefetched: int = 0
    """Delivered to the caller."""
    tokens_hit: int = 0
    """Of the longest prefixes that all ranks could restore."""
    tokens_without_room: int = 0
    """Of those, cut off for want of host memory."""
    pages_backed_up: int = 0
    """Of all pools: stored by this rank, found in storage, or another rank's to write."""
    pages_dropped: int = 0
    """Given up after the last attempt, of all pools."""
    backup_retries: int = 0
    storage_errors: int = 0
    """Calls of the storage that raised."""
    invalid_answers: int = 0
    """Answers of the storage that are none."""
    abandoned_calls: int = 0
    """Calls of the storage that did not come back in time."""
    stuck_calls: int = 0
    """Of those, the ones that have not come back yet; their pages rest."""


class StatsCounter:
    """Counts from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = ControllerStats()

    def count(self, **amounts: int) -> None:
        """Add to counters, by their names."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)

    def snapshot(self) -> ControllerStats:
        """The counters now."""
        with self._lock:
            return replace(self._stats)
