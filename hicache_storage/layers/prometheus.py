"""`get_stats()` as Prometheus metrics, under the same names for every driver (rule OB-1). Needs `hicache-storage[metrics]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.registry import Collector

from hicache_storage.observability import vocabulary as v
from hicache_storage.observability.families import add_latency, histogram, scalars

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import Metric

    from hicache_storage.spec import HiCacheStorage, StorageStats

POOL_COUNTERS = tuple(metric for metric in v.STORAGE if metric.source and "pool" in metric.labels)
CONDITIONS = tuple(metric for metric in v.STORAGE if metric.source and "pool" not in metric.labels)


class StorageCollector(Collector):
    """Reads a storage's counters when Prometheus asks; register it with a `CollectorRegistry`.

    Args:
        storage: what `create_storage` returned.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, storage: HiCacheStorage, labels: Mapping[str, str] | None = None) -> None:
        self._storage = storage
        self._labels = dict(labels or {})

    def describe(self) -> list[Metric]:
        """Nothing in advance: a storage is not asked before it is open."""
        return []

    def collect(self) -> Iterable[Metric]:
        """The families of `vocabulary.STORAGE`."""
        stats = self._storage.get_stats()
        yield from self._counters(stats)
        yield from self._conditions(stats)
        yield self._latencies(stats)

    def _counters(self, stats: StorageStats) -> Iterable[Metric]:
        for metric in POOL_COUNTERS:
            family = scalars(metric, self._labels)
            for pool, pool_stats in stats.pools.items():
                family.add_metric([stats.driver, pool, *self._labels.values()], getattr(pool_stats, metric.source))
            yield family

    def _conditions(self, stats: StorageStats) -> Iterable[Metric]:
        values = [(metric, float(getattr(stats, metric.source))) for metric in CONDITIONS]
        values.append((v.BREAKER_OPEN, float(stats.breaker_state != "closed")))
        values.append((v.CHECKSUMS_OFF, float(not stats.verifies_checksums)))
        for metric, value in values:
            family = scalars(metric, self._labels)
            family.add_metric([stats.driver, *self._labels.values()], value)
            yield family

    def _latencies(self, stats: StorageStats) -> Metric:
        family = histogram(v.CALL_SECONDS, self._labels)
        for pool, pool_stats in stats.pools.items():
            for operation, latency in pool_stats.latency.items():
                add_latency(family, v.CALL_SECONDS, [stats.driver, pool, operation, *self._labels.values()], latency)
        return family
