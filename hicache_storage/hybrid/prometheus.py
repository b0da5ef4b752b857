"""Prometheus metrics of a controller and a cache.

Needs `hicache-storage[metrics]`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from hicache_storage.observability import vocabulary as v
from hicache_storage.observability.families import of_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import Metric

    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.radix import HiMambaRadixCache
    from hicache_storage.hybrid.radix.results import CacheUsage


class ControllerCollector(Collector):
    """Exports a controller's counters, read in the thread that collects.

    Args:
        controller: this rank's.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, controller: HybridCacheController, labels: Mapping[str, str] | None = None) -> None:
        self._controller = controller
        self._labels = dict(labels or {})

    def describe(self) -> list[Metric]:
        """Return no metrics in advance."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the families of `vocabulary.CONTROLLER`."""
        return of_fields(v.CONTROLLER, self._controller.stats(), self._labels)


class CacheCollector(Collector):
    """Exports the usage of a cache as of the last `refresh`.

    A cache is used by the scheduler's thread only, so that thread calls `refresh`.

    Args:
        cache: this rank's.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, cache: HiMambaRadixCache, labels: Mapping[str, str] | None = None) -> None:
        self._cache = cache
        self._labels = dict(labels or {})
        self._usage: CacheUsage = cache.usage()

    def refresh(self) -> None:
        """Read the cache's usage.

        Called by the scheduler's thread, such as once for each log line.
        """
        self._usage = self._cache.usage()

    def describe(self) -> list[Metric]:
        """Return no metrics in advance."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Return the families of `vocabulary.CACHE`."""
        return of_fields(v.CACHE, self._usage, self._labels)
