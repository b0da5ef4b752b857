"""Metrics of storages, controllers and caches for `prometheus_client` (rule OB-1).

Needs `hicache-storage[metrics]`.
"""

from __future__ import annotations

import threading
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
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.core import Metric as Family

    from hicache_storage.spec.stats import Latency


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
    """Collector of a storage's counters, under the same names for every driver.

    Register it with a `CollectorRegistry`.

    Args:
        storage: the result of `create_storage`.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, storage: HasStorageStats, labels: Mapping[str, str] | None = None) -> None:
        super().__init__(labels)
        self._storage = storage

    def collect(self) -> Iterable[Family]:
        """Yield the families of `metric_defs.STORAGE`."""
        # One snapshot for all families: the series of a scrape belong to one moment.
        return storage_families([self._storage.get_stats()], self._labels)


class ProcessCollector(_LabelledCollector):
    """Collector in `prometheus_client`'s default registry, for engines whose `/metrics` serves it.

    Sources of one driver are summed: a process may have several, and their labels are the same.
    Thread-safe.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self._lock = threading.Lock()
        self._sources = list[HasStorageStats]()

    def add(self, source: HasStorageStats) -> None:
        """Publish the counters of a source."""
        with self._lock:
            if not self._sources:
                REGISTRY.register(self)
            self._sources.append(source)

    def remove(self, source: HasStorageStats) -> None:
        """Stop publishing the counters of a source. Idempotent."""
        with self._lock:
            if source in self._sources:
                self._sources.remove(source)
                if not self._sources:
                    REGISTRY.unregister(self)

    def collect(self) -> Iterable[Family]:
        """Return the families of `metric_defs.STORAGE`."""
        with self._lock:
            sources = list(self._sources)
        drivers = dict[str, list[StorageStats]]()
        for source in sources:
            stats = source.get_stats()
            drivers.setdefault(stats.driver, []).append(stats)
        return storage_families(
            [StorageStats.total(name, parts) for name, parts in drivers.items()], self._labels
        )


PROCESS: Final = ProcessCollector()


def storage_families(
    storages: Sequence[StorageStats], constant: Mapping[str, str]
) -> Iterable[Family]:
    """Yield the families of `metric_defs.STORAGE`, each with the samples of all storages.

    `constant` are labels of all samples, after their own.
    """
    families = {
        metric: scalars(metric, constant) for metric in v.STORAGE if metric is not v.CALL_SECONDS
    }
    for stats in storages:
        for metric, labels, value in v.storage_samples(stats):
            families[metric].add_metric([*labels, *constant.values()], value)
    yield from families.values()
    latencies = histogram(v.CALL_SECONDS, constant)
    for stats in storages:
        for pool, pool_stats in stats.pools.items():
            for operation, latency in pool_stats.latency.items():
                names = [stats.driver, pool, operation, *constant.values()]
                add_latency(latencies, v.CALL_SECONDS, names, latency)
    yield latencies


class HasStats(Protocol):
    """A controller, such as `HybridCacheController`."""

    def stats(self) -> object:
        """Return a snapshot with the fields that `metric_defs.CONTROLLER` names."""
        ...


class HasUsage(Protocol):
    """A cache, such as `HiMambaRadixCache`."""

    def usage(self) -> object:
        """Return a snapshot with the fields that `metric_defs.CACHE` names."""
        ...


class ControllerCollector(_LabelledCollector):
    """Collector of a hybrid controller's counters. Prometheus may collect in any thread.

    Args:
        controller: the controller of this rank.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, controller: HasStats, labels: Mapping[str, str] | None = None) -> None:
        super().__init__(labels)
        self._controller = controller

    def collect(self) -> Iterable[Family]:
        """Return the families of `metric_defs.CONTROLLER`."""
        return of_fields(v.CONTROLLER, self._controller.stats(), self._labels)


class CacheCollector(_LabelledCollector):
    """Collector of a radix cache's usage, as of the last `refresh`.

    A cache belongs to its scheduler's thread, and Prometheus collects in another one: `refresh`
    takes the snapshot there.

    Args:
        cache: the cache of this rank.
        labels: constant labels, such as `{"tp_rank": "0"}`.
    """

    def __init__(self, cache: HasUsage, labels: Mapping[str, str] | None = None) -> None:
        super().__init__(labels)
        self._cache = cache
        self._usage = cache.usage()

    def refresh(self) -> None:
        """Take a snapshot of the usage.

        To be called in the scheduler's thread, such as once in each of its reports.
        """
        self._usage = self._cache.usage()

    def collect(self) -> Iterable[Family]:
        """Return the families of `metric_defs.CACHE`."""
        return of_fields(v.CACHE, self._usage, self._labels)


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


def histogram(metric: Metric, constant: Mapping[str, str] | None = None) -> HistogramMetricFamily:
    """Make an empty family of a histogram."""
    return HistogramMetricFamily(
        metric.family, metric.help, labels=[*metric.labels, *(constant or {})]
    )


def add_latency(
    family: HistogramMetricFamily, metric: Metric, labels: Sequence[str], latency: Latency
) -> None:
    """Add the counts of a `Latency`, whose buckets are those of `metric`."""
    bounds = [*map(str, metric.buckets), "+Inf"]
    total, buckets = 0, list[tuple[str, float]]()
    for bound, calls in zip(bounds, latency.buckets, strict=True):
        # Prometheus' buckets are cumulative, `Latency` counts each call in one bucket.
        total += calls
        buckets.append((bound, total))
    family.add_metric(labels, buckets, latency.seconds)


def of_fields(
    metrics: Iterable[Metric], statistics: object, constant: Mapping[str, str] | None = None
) -> Iterable[Family]:
    """Make the families of metrics from the fields of `statistics` that they name.

    Metrics of one name share a family.
    """
    found = dict[str, CounterMetricFamily | GaugeMetricFamily]()
    for metric in metrics:
        # A second family of the same name would repeat its HELP and TYPE lines, which the text
        # format forbids.
        family = found.get(metric.name)
        if family is None:
            family = found[metric.name] = scalars(metric, constant)
        labels = [metric.tag[1]] if metric.tag[0] else []
        family.add_metric([*labels, *(constant or {}).values()], getattr(statistics, metric.source))
    return found.values()
