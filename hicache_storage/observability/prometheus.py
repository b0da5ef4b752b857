"""Metrics of storages, controllers and caches for `prometheus_client` (rule OB-1).

Needs `hicache-storage[metrics]`.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client.core import (
    REGISTRY,
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.registry import Collector

from hicache_storage.observability import metric_defs as v
from hicache_storage.observability.metric_defs import Metric, MetricKind
from hicache_storage.spec import StorageStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client.core import Metric as Family


class HasStorageStats(Protocol):
    """A storage, or several whose counters are summed."""

    def get_stats(self) -> StorageStats:
        """Return a snapshot."""
        ...


class _LabelledCollector(Collector):
    """A collector of samples that have constant labels."""

    def __init__(self, labels: Mapping[str, str] | None) -> None:
        self._labels = dict(labels or {})

    def describe(self) -> list[Family]:
        """Return no families: a storage has no statistics before it is open."""
        return []


class StorageCollector(_LabelledCollector):
    """Collector of storages' counters, under the same names for every driver.

    Storages of one driver are summed: a process may have several, and their labels are the same.
    Register it with a `CollectorRegistry`. Thread-safe: each operation on the list is atomic.

    Args:
        storage: the result of `create_storage`; further ones are added.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(
        self, storage: HasStorageStats | None = None, labels: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(labels)
        self._storages = [] if storage is None else [storage]

    def add(self, storage: HasStorageStats) -> None:
        """Publish the counters of a storage."""
        self._storages.append(storage)

    def remove(self, storage: HasStorageStats) -> None:
        """Stop publishing the counters of a storage. Idempotent."""
        with suppress(ValueError):
            self._storages.remove(storage)

    def collect(self) -> Iterable[Family]:
        """Yield the families of `metric_defs.STORAGE`."""
        drivers = dict[str, list[StorageStats]]()
        # One snapshot for all families: the series of a scrape belong to one moment.
        for storage in list(self._storages):
            stats = storage.get_stats()
            drivers.setdefault(stats.driver, []).append(stats)
        totals = [StorageStats.total(name, parts) for name, parts in drivers.items()]
        constant = self._labels.values()
        families = {
            metric: scalars(metric, self._labels)
            for metric in v.STORAGE
            if metric is not v.CALL_SECONDS
        }
        for stats in totals:
            for metric, labels, value in v.storage_samples(stats):
                families[metric].add_metric([*labels, *constant], value)
        yield from families.values()
        latencies = HistogramMetricFamily(
            v.CALL_SECONDS.family,
            v.CALL_SECONDS.help,
            labels=[*v.CALL_SECONDS.labels, *self._labels],
        )
        bounds = [*map(str, v.CALL_SECONDS.buckets), "+Inf"]
        for stats in totals:
            for pool, pool_stats in stats.pools.items():
                for operation, latency in pool_stats.latency.items():
                    # Prometheus' buckets are cumulative, `Latency` counts each call in one bucket.
                    buckets = list(zip(bounds, accumulate(latency.buckets), strict=True))
                    names = [stats.driver, pool, operation, *constant]
                    latencies.add_metric(names, buckets, latency.seconds)
        yield latencies


_PROCESS: Final = StorageCollector()


def process_collector() -> StorageCollector:
    """Return the collector in the default registry, for engines whose `/metrics` serves that."""
    # The registry keeps a collector once, however often it is registered.
    REGISTRY.register(_PROCESS)
    return _PROCESS


class SnapshotCollector(_LabelledCollector):
    """Collector of a hybrid controller's counters, or of a radix cache's usage.

    Args:
        metrics: `metric_defs.CONTROLLER` or `metric_defs.CACHE`.
        snapshot: the controller's `stats`, or the cache's `usage`; called in any thread.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(
        self,
        metrics: Iterable[Metric],
        snapshot: Callable[[], object],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(labels)
        self._metrics = metrics
        self._snapshot = snapshot

    def collect(self) -> Iterable[Family]:
        """Return the families of the metrics; those of one name share a family."""
        snapshot, found = self._snapshot(), dict[str, CounterMetricFamily | GaugeMetricFamily]()
        for metric in self._metrics:
            # A second family of the same name would repeat its HELP and TYPE lines, which the text
            # format forbids.
            family = found.get(metric.name)
            if family is None:
                family = found[metric.name] = scalars(metric, self._labels)
            labels = [metric.tag[1]] if metric.tag[0] else []
            family.add_metric([*labels, *self._labels.values()], getattr(snapshot, metric.source))
        return found.values()


def scalars(
    metric: Metric, constant: Mapping[str, str] | None = None
) -> CounterMetricFamily | GaugeMetricFamily:
    """Make an empty family of a counter or a gauge.

    `constant` are labels of all its samples, after its own.
    """
    make = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    return make(metric.family, metric.help, labels=[*metric.labels, *(constant or {})])


def scalar(metric: Metric, value: float) -> CounterMetricFamily | GaugeMetricFamily:
    """Make a family of one sample without labels."""
    family = scalars(metric)
    family.add_metric([], value)
    return family
