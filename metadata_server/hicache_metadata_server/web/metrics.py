"""What Prometheus collects."""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector

from hicache_metadata_server.protocol import SlotState
from hicache_metadata_server.web.history import Answered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from hicache_metadata_server.journal import Journal
    from hicache_metadata_server.service.service import MetadataService

BUCKETS: Final = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)


class Metrics:
    """Requests as they are answered, and the state of the service when it is asked for."""

    def __init__(self, service: MetadataService) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter("hicache_metadata_requests", "Requests answered.", ["route", "status"], registry=self._registry)
        self._seconds = Histogram(
            "hicache_metadata_request_seconds", "From the last byte of a request to its answer.", ["route"], buckets=BUCKETS, registry=self._registry
        )  # fmt: skip
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.journal: Journal | None = None
        self._service = service
        self._registry.register(_State(self))
        ProcessCollector(registry=self._registry)

    def answered(self, route: str, status: int, seconds: float) -> None:
        """Count one."""
        child = self._children.get((route, status))
        if child is None:
            child = self._requests.labels(route, str(status)), self._seconds.labels(route)
            self._children[route, status] = child
        child[0].inc()
        child[1].observe(seconds)

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self._registry)

    def state(self) -> Iterator[Metric]:
        """Of the service."""
        slots = GaugeMetricFamily("hicache_metadata_slots", "Slots by state.", labels=["scope", "state"])
        evicted = CounterMetricFamily("hicache_metadata_evicted_pages", "Pages evicted since the start.", labels=["scope"])
        asked = CounterMetricFamily(
            "hicache_metadata_lookups", "Keys asked for since the start, by whether they were live.", labels=["scope", "result"]
        )
        for status in self._service.list_scopes().scopes:
            for state in SlotState:
                slots.add_metric([status.scope, state], getattr(status, state))
            evicted.add_metric([status.scope], status.evicted)
            asked.add_metric([status.scope, "hit"], status.hits)
            asked.add_metric([status.scope, "miss"], status.misses)
        yield slots
        yield evicted
        yield asked
        yield GaugeMetricFamily("hicache_metadata_draining", "1 while no new leases are given.", value=self._service.draining)
        yield GaugeMetricFamily(
            "hicache_metadata_recovery_problems", "Contradictions that the last start left out.", value=len(self._service.recovery_problems)
        )  # fmt: skip
        if self.journal is not None:
            yield CounterMetricFamily("hicache_metadata_transactions", "Groups of changes written.", value=self.journal.groups)
            yield GaugeMetricFamily("hicache_metadata_store_failing", "1 while the store cannot be written.", value=self.journal.error is not None)  # fmt: skip
            recent = sorted(self.journal.recent_seconds)
            if recent:
                yield GaugeMetricFamily("hicache_metadata_transaction_median_seconds", "Of the last thousand.", value=recent[len(recent) // 2])  # fmt: skip
                yield GaugeMetricFamily("hicache_metadata_transaction_longest_seconds", "Of the last thousand.", value=recent[-1])

    def so_far(self) -> Answered:
        """All requests, whatever their route."""
        by_status, by_bound = Counts[str](), Counts[float]()
        for sample in (
            sample for family in self._requests.collect() for sample in family.samples if sample.name.endswith("_total")
        ):
            by_status[sample.labels["status"]] += int(sample.value)
        for sample in (sample for family in self._seconds.collect() for sample in family.samples if "le" in sample.labels):
            by_bound[float(sample.labels["le"])] += int(sample.value)
        refused, failed = (sum(count for status, count in by_status.items() if status[0] == first) for first in "45")
        bounds = sorted(by_bound)
        return Answered(by_status.total(), refused, failed, tuple(bounds), tuple(by_bound[bound] for bound in bounds))


class _State:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.state()

    def describe(self) -> list[Metric]:
        """Nothing in advance: it is told when it is asked for."""
        return []
