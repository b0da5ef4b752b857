"""Declaration of one metric."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricKind(StrEnum):
    """Types of metrics, as Prometheus names them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric as it is exported.

    Names follow OpenMetrics: base units, and `_total` at the end of counters alone.
    """

    name: str
    """Name of the series; those of a histogram append `_bucket`, `_count` and `_sum`."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""
    source: str = ""
    """Field of the statistics that the metric exports."""
    tag: tuple[str, str] = ("", "")
    """Label and value that stand for `source`, where several fields share a metric."""

    @property
    def family(self) -> str:
        """The name without `_total`, which `prometheus_client` appends to counters."""
        return self.name.removesuffix("_total")
