"""The storage's counters under the names that every driver has, for vLLM's `/metrics`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    OffloadingMetricMetadata,
)

from hicache_storage.observability import metric_defs
from hicache_storage.observability.metric_defs import MetricKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.spec import StorageStats


def definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics of `metric_defs.STORAGE`, as vLLM declares its own."""
    found = dict[str, OffloadingMetricMetadata]()
    for metric in metric_defs.STORAGE:
        match metric.kind:
            case MetricKind.COUNTER:
                found[metric.name] = OffloadingCounterMetadata(metric.help, metric.labels)
            case MetricKind.GAUGE:
                found[metric.name] = OffloadingGaugeMetadata(metric.help, metric.labels)
            case MetricKind.HISTOGRAM:
                found[metric.name] = OffloadingHistogramMetadata(
                    metric.help, metric.labels, metric.buckets
                )
    return found


class TierMetrics:
    """What has changed since the last report. Calls are noted in any thread."""

    def __init__(self) -> None:
        self._reported = dict[tuple[str, tuple[str, ...]], float]()
        self._lock = threading.Lock()
        self._durations = list[tuple[tuple[str, ...], float]]()

    def note(self, pools: Iterable[str], operation: str, seconds: float) -> None:
        """Note a call of some pools, as `exists`, `get` or `set`."""
        with self._lock:
            # Plain texts: vLLM refuses to send subclasses to its API server.
            self._durations += [((str(pool), operation), seconds) for pool in pools]

    def take(self, stats: StorageStats) -> OffloadingConnectorStats:
        """Return the increase of each counter, the gauges, and the durations of calls."""
        taken = OffloadingConnectorStats()
        for metric, labels, value in metric_defs.storage_samples(stats):
            key = metric.name, labels
            if metric.kind is MetricKind.GAUGE:
                taken.set_gauge(metric.name, value, labels)
            # A counter that is 0 is reported once, so that Prometheus knows the series.
            elif key not in self._reported or value > self._reported[key]:
                increase = value - self._reported.get(key, 0.0)
                taken.increase_counter(metric.name, increase, labels)
                self._reported[key] = value
        with self._lock:
            durations = self._durations
            self._durations = []
        for of_call, seconds in durations:
            taken.observe_histogram(
                metric_defs.CALL_SECONDS.name, seconds, (stats.driver, *of_call)
            )
        return taken
