"""A controller's and a cache's counters as Prometheus metrics. Needs `hicache-storage[metrics]`."""

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
    """Reads a controller's counters when Prometheus asks, in any thread.

    Args:
        controller: this rank's.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, controller: HybridCacheController, labels: Mapping[str, str] | None = None) -> None:
        self._controller, self._labels = controller, dict(labels or {})

    def describe(self) -> list[Metric]:
        """Nothing in advance."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The families of `vocabulary.CONTROLLER`."""
        return of_fields(v.CONTROLLER, self._controller.stats(), self._labels)


class CacheCollector(Collector):
    """Tells what a cache held when its scheduler last called `look`: a cache belongs to that thread, and may not be asked by another.

    Args:
        cache: this rank's.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, cache: HiMambaRadixCache, labels: Mapping[str, str] | None = None) -> None:
        self._cache, self._labels = cache, dict(labels or {})
        self._usage: CacheUsage = cache.usage()

    def look(self) -> None:
        """Take down what the cache holds; for the scheduler's thread, such as once in each of its reports."""
        self._usage = self._cache.usage()

    def describe(self) -> list[Metric]:
        """Nothing in advance."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The families of `vocabulary.CACHE`."""
        return of_fields(v.CACHE, self._usage, self._labels)
