"""Families of samples for `prometheus_client`, made of declared metrics. Needs `hicache-storage[metrics]`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from hicache_storage.observability.metric import Kind, Metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from prometheus_client.core import Metric as Family

    from hicache_storage.spec.stats import Latency


def scalars(metric: Metric, constant: Mapping[str, str] | None = None) -> CounterMetricFamily | GaugeMetricFamily:
    """An empty family of a counter or a gauge; `constant` are labels of all its samples, behind its own."""
    make = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return make(metric.family, metric.help, labels=[*metric.labels, *(constant or {})])


def scalar(metric: Metric, value: float) -> CounterMetricFamily | GaugeMetricFamily:
    """A family of one sample without labels."""
    family = scalars(metric)
    family.add_metric([], value)
    return family


def histogram(metric: Metric, constant: Mapping[str, str] | None = None) -> HistogramMetricFamily:
    """An empty family of a histogram."""
    return HistogramMetricFamily(metric.family, metric.help, labels=[*metric.labels, *(constant or {})])


def add_latency(family: HistogramMetricFamily, metric: Metric, labels: Sequence[str], latency: Latency) -> None:
    """Add what a `Latency` has counted, whose buckets are those of `metric`."""
    bounds = [*map(str, metric.buckets), "+Inf"]
    total, buckets = 0, list[tuple[str, float]]()
    for bound, calls in zip(bounds, latency.buckets, strict=True):
        total += calls
        buckets.append((bound, total))
    family.add_metric(labels, buckets, latency.seconds)


def of_fields(metrics: Iterable[Metric], statistics: object, constant: Mapping[str, str] | None = None) -> Iterable[Family]:
    """Families of the fields of `statistics` that metrics are declared to come from; those of one name in one family."""
    found = dict[str, CounterMetricFamily | GaugeMetricFamily]()
    for metric in metrics:
        family = found.get(metric.name)
        if family is None:
            family = found[metric.name] = scalars(metric, constant)
        labels = [metric.tag[1]] if metric.tag[0] else []
        family.add_metric([*labels, *(constant or {}).values()], getattr(statistics, metric.source))
    return found.values()
