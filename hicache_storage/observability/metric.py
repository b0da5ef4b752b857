"""What a declared metric is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """As Prometheus calls them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as it is exposed.

    Raises:
        ValueError: the name does not follow OpenMetrics: `_total` for counters, and for them only; the unit before it.
    """

    name: str
    """Of the series; those of a histogram have `_bucket`, `_count` and `_sum` behind it."""
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    """`seconds` or `bytes`, which the name ends with; empty for a number of things."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, without infinity."""
    source: str = ""
    """Field of the statistics that this one exports."""
    tag: tuple[str, str] = ("", "")
    """A label with the value that is meant for `source`, where several fields share a metric."""
    of_store: bool = False
    """Kept in the store: several servers of one store export the same series, which are to be counted once."""

    def __post_init__(self) -> None:
        if self.name.endswith("_total") != (self.kind is Kind.COUNTER):
            raise ValueError(f"{self.name} is a {self.kind}: counters end with _total, and nothing else does")
        if not self.family.endswith(self.unit):
            raise ValueError(f"{self.name} is in {self.unit} and does not say so")
        if bool(self.buckets) != (self.kind is Kind.HISTOGRAM) or list(self.buckets) != sorted(set(self.buckets)):
            raise ValueError(f"{self.name}: histograms have ascending buckets, and nothing else has")

    @property
    def family(self) -> str:
        """The name without `_total`, as Prometheus' libraries want it."""
        return self.name.removesuffix("_total")

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a server has of it."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(self.name + suffix for suffix in ("_bucket", "_count", "_sum"))
        return (self.name,)
