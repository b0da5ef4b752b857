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

    Raises:
        ValueError: the name does not follow OpenMetrics: `_total` for counters, and for them only;
            the unit before it.
    """

    name: str
    """Name of the series; those of a histogram append `_bucket`, `_count` and `_sum`."""
    kind: MetricKind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    """`seconds` or `bytes`, with which the name ends; empty for a count."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""
    source: str = ""
    """Field of the statistics that the metric exports."""
    tag: tuple[str, str] = ("", "")
    """Label and value that stand for `source`, where several fields share a metric."""

    def __post_init__(self) -> None:
        # Checked at import, as `prometheus_client` would append the suffix to a counter by itself,
        # and queries would name a series that does not exist.
        if self.name.endswith("_total") != (self.kind is MetricKind.COUNTER):
            raise ValueError(
                f"{self.name} is a {self.kind}: counters end with _total, and nothing else does"
            )
        if not self.family.endswith(self.unit):
            raise ValueError(f"{self.name} is in {self.unit} and does not say so")
        if bool(self.buckets) != (self.kind is MetricKind.HISTOGRAM) or list(
            self.buckets
        ) != sorted(set(self.buckets)):
            raise ValueError(
                f"{self.name}: histograms have ascending buckets, and nothing else has"
            )

    @property
    def family(self) -> str:
        """The name without `_total`, which `prometheus_client` appends to counters."""
        return self.name.removesuffix("_total")

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series on a Prometheus server."""
        if self.kind is MetricKind.HISTOGRAM:
            return tuple(self.name + suffix for suffix in ("_bucket", "_count", "_sum"))
        return (self.name,)
