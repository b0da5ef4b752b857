"""Builders of PromQL from metric definitions, so that no expression names an unknown metric."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.observability.metric import MetricKind

if TYPE_CHECKING:
    from hicache_storage.observability.metric import Metric


def selected(metric: Metric, *matchers: str, suffix: str = "") -> str:
    """Select the series of a metric, such as `name{state="live"}`.

    Raises:
        ValueError: a matcher names a label that the metric does not have.
    """
    for matcher in matchers:
        label = matcher.partition("=")[0].rstrip("!~")
        if label not in (*metric.labels, "job"):
            raise ValueError(f"{metric.name} has no label {label!r}")
    return (
        f"{metric.name}{suffix}{{{','.join(matchers)}}}" if matchers else f"{metric.name}{suffix}"
    )


def summed(expression: str, *by: str) -> str:
    """Sum an expression into one series for each combination of labels."""
    return f"sum by ({', '.join(by)}) ({expression})" if by else f"sum({expression})"


def total(metric: Metric, expression: str, *by: str) -> str:
    """Sum an expression of a metric's series.

    Equal series of several servers of one store count once.
    """
    if not metric.of_store:
        return summed(expression, *by)
    # The servers of one store export equal series; a sum would count the store once for each
    # server.
    once = f"max by ({', '.join(metric.labels)}) ({expression})"
    return once if set(by) == set(metric.labels) else summed(once, *by)


def now(metric: Metric, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """Query a gauge's value."""
    assert metric.kind is MetricKind.GAUGE, metric.name
    return total(metric, selected(metric, *matchers), *by)


def rate(metric: Metric, window: str, *matchers: str, by: tuple[str, ...] = ()) -> str:
    """Query a counter's increase a second."""
    assert metric.kind is MetricKind.COUNTER, metric.name
    return total(metric, f"rate({selected(metric, *matchers)}[{window}])", *by)


def grown(metric: Metric, window: str, by: tuple[str, ...] = ()) -> str:
    """Query a counter's increase in a window."""
    assert metric.kind is MetricKind.COUNTER, metric.name
    return total(metric, f"increase({selected(metric)}[{window}])", *by)


def quantile(
    share: float, metric: Metric, window: str, *matchers: str, by: tuple[str, ...] = ()
) -> str:
    """Query a histogram's quantile."""
    assert metric.kind is MetricKind.HISTOGRAM, metric.name
    buckets = summed(f"rate({selected(metric, *matchers, suffix='_bucket')}[{window}])", "le", *by)
    return f"histogram_quantile({share}, {buckets})"


def share(part: str, *others: str) -> str:
    """Query the fraction of `part` in the sum of itself and all others."""
    return f"{part} / ({' + '.join((part, *others))})"
