"""`get_stats()` as Prometheus metrics, under the same names for every driver (rule OB-1). Needs `hicache-storage[metrics]`."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from hicache_storage.spec.stats import LATENCY_BOUNDS_SECONDS, PoolStats

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from prometheus_client import Metric

    from hicache_storage.spec import HiCacheStorage, StorageStats

COUNTERS = tuple(field.name for field in fields(PoolStats) if field.name != "latency")
"""`hicache_storage_<name>_total`, with the labels `driver` and `pool` and those given to the collector."""


class StorageCollector(Collector):
    """Reads a storage's counters when Prometheus asks; register it with a `CollectorRegistry`.

    Args:
        storage: what `create_storage` returned.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, storage: HiCacheStorage, labels: Mapping[str, str] | None = None) -> None:
        self._storage = storage
        self._labels = dict(labels or {})

    def collect(self) -> Iterable[Metric]:
        """One family for each counter, for faults, deadlines and breaker, and for latencies."""
        stats = self._storage.get_stats()
        yield from self._counters(stats)
        yield from self._conditions(stats)
        yield self._latencies(stats)

    def _counters(self, stats: StorageStats) -> Iterable[Metric]:
        names, values = ["driver", "pool", *self._labels], self._labels.values()
        for counter in COUNTERS:
            family = CounterMetricFamily(f"hicache_storage_{counter}", counter.replace("_", " "), labels=names)
            for pool, pool_stats in stats.pools.items():
                family.add_metric([stats.driver, pool, *values], getattr(pool_stats, counter))
            yield family

    def _conditions(self, stats: StorageStats) -> Iterable[Metric]:
        names, values = ["driver", *self._labels], [stats.driver, *self._labels.values()]
        for counter in ("faults", "deadlines_missed", "breaker_refusals", "failovers"):
            family = CounterMetricFamily(f"hicache_storage_{counter}", counter.replace("_", " "), labels=names)
            family.add_metric(values, getattr(stats, counter))
            yield family
        open_breaker = GaugeMetricFamily("hicache_storage_breaker_open", "1 while calls are refused", labels=names)
        open_breaker.add_metric(values, float(stats.breaker_state != "closed"))
        yield open_breaker

    def _latencies(self, stats: StorageStats) -> Metric:
        names, values = ["driver", "pool", "operation", *self._labels], self._labels.values()
        family = HistogramMetricFamily("hicache_storage_call_seconds", "duration of calls", labels=names)
        bounds = [*map(str, LATENCY_BOUNDS_SECONDS), "+Inf"]
        for pool, pool_stats in stats.pools.items():
            for operation, latency in pool_stats.latency.items():
                total, buckets = 0, list[tuple[str, float]]()
                for bound, calls in zip(bounds, latency.buckets, strict=True):
                    total += calls
                    buckets.append((bound, total))
                family.add_metric([stats.driver, pool, operation, *values], buckets, latency.seconds)
        return family
