"""Counters of the controller."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace


@dataclass(slots=True)
class ControllerStats:
    """Counters since the controller was made.

    A snapshot where `HybridCacheController.stats` returns it.
    """

    tokens_written_back: int = 0
    tokens_loaded: int = 0
    writes_without_room: int = 0
    loads_without_room: int = 0
    prefetches: int = 0
    """Started; declined ones are counted by the next two fields."""
    prefetches_below_threshold: int = 0
    """Declined because the span is too short."""
    prefetches_rate_limited: int = 0
    tokens_prefetched: int = 0
    """Delivered to the caller."""
    tokens_hit: int = 0
    """Tokens of the longest prefixes that all ranks could restore."""
    tokens_without_room: int = 0
    """Tokens of `tokens_hit` that were cut off for lack of host memory."""
    pages_backed_up: int = 0
    """Pages of all pools: stored by this rank, found in storage, or written by another rank."""
    pages_dropped: int = 0
    """Pages of all pools that were not stored in the last attempt."""
    backup_retries: int = 0
    storage_errors: int = 0
    """Calls of the storage that raised."""
    invalid_answers: int = 0
    """Answers of the storage with a wrong type or length."""
    abandoned_calls: int = 0
    """Calls of the storage that did not return in time."""
    stuck_calls: int = 0
    """Abandoned calls that have not returned yet; their pages stay reserved."""


class StatsCounter:
    """Thread-safe `ControllerStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = ControllerStats()

    def count(self, **amounts: int) -> None:
        """Add amounts to counters, by their names."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)

    def snapshot(self) -> ControllerStats:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._stats)
