"""Prometheus metrics of the server.

Counters of requests are kept here; the state of the service is read when it is scraped, so that an
operation on slots never has to update a metric.
"""

from __future__ import annotations

import platform
from collections import Counter as Counts
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector

from hicache_metadata_server.http.timeseries import RequestCounts
from hicache_metadata_server.protocol import SlotState
from hicache_storage.observability import metric_defs as v
from hicache_storage.observability.prometheus import add_latency, histogram, scalar, scalars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from prometheus_client.core import Metric

    from hicache_metadata_server.auth.security import Security
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.protocol import ScopeStatus
    from hicache_metadata_server.storage.group_commit import GroupCommit

RESULTS: Final = ("hit", "miss")


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, service: MetadataService, problem: Callable[[], str] = str) -> None:
        # Not the global registry: tests and embedded servers have several in one process.
        self._registry = CollectorRegistry()
        self._requests = Counter(
            v.REQUESTS.family, v.REQUESTS.help, v.REQUESTS.labels, registry=self._registry
        )
        self._seconds = Histogram(
            v.REQUEST_SECONDS.family,
            v.REQUEST_SECONDS.help,
            v.REQUEST_SECONDS.labels,
            buckets=v.REQUEST_SECONDS.buckets,
            registry=self._registry,
        )
        self._slow = Counter(
            v.SLOW_REQUESTS.family,
            v.SLOW_REQUESTS.help,
            v.SLOW_REQUESTS.labels,
            registry=self._registry,
        )
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.group_commit: GroupCommit | None = None
        self.security: Security | None = None
        self.store_sizes: Callable[[], dict[str, int]] = dict
        self.unowned_scopes: Callable[[], int] = int
        self.store_fails: Callable[[], bool] = bool
        self._service = service
        self._problem = problem
        self._scopes = set[str]()
        """Scopes with series of their own. They keep them as long as the process lives: if counters
        moved between a scope's name and `OTHER_SCOPES`, both would look like restarts."""
        self._registry.register(_StateCollector(self))
        ProcessCollector(registry=self._registry)

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count a request and its duration."""
        # `labels` takes a lock and builds strings, more than the rest of this method: children are
        # kept. Their number is bounded, because unknown paths are one route.
        child = self._children.get((route, status))
        if child is None:
            child = self._requests.labels(route, str(status)), self._seconds.labels(route)
            self._children[route, status] = child
        child[0].inc()
        child[1].observe(seconds)

    def count_slow(self, route: str) -> None:
        """Count a request slower than the setting `slow_seconds`."""
        self._slow.labels(route).inc()

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def state_families(self) -> Iterator[Metric]:
        """Metric families of service, store and security, read at once."""
        yield from self._scope_families()
        build, about = scalars(v.BUILD_INFO), self._service.about
        build.add_metric(
            [about.server.rpartition(" ")[2], about.protocol, platform.python_version()], 1
        )
        yield build
        sizes = scalars(v.STORE_BYTES)
        for part, size in self.store_sizes().items():
            sizes.add_metric([part], size)
        yield sizes
        yield scalar(v.UNOWNED_SCOPES, self.unowned_scopes())
        yield scalar(v.QUARANTINE_SECONDS, self._service.limits.quarantine_seconds)
        yield scalar(v.READY, not self._problem())
        yield scalar(v.DRAINING, self._service.draining)
        yield scalar(v.RECOVERY_PROBLEMS, len(self._service.recovery_problems))
        if self.group_commit is not None:
            yield scalar(v.TRANSACTIONS, self.group_commit.groups)
            yield scalar(v.STORE_FAILING, self.store_fails())
            durations = histogram(v.TRANSACTION_SECONDS)
            add_latency(durations, v.TRANSACTION_SECONDS, [], self.group_commit.durations)
            yield durations
        if self.security is not None:
            yield from self.security.families()

    def _scope_families(self) -> Iterator[Metric]:
        slots, evicted = defaultdict[tuple[str, str], int](int), defaultdict[str, int](int)
        asked, expired = defaultdict[tuple[str, str], int](int), defaultdict[str, int](int)
        info, owners = scalars(v.SCOPE_INFO), scalars(v.SCOPE_OWNER)
        logs = defaultdict[str, int](int)
        for status in self._service.list_scopes().scopes:
            scope = self._label(status)
            if status.model and scope != v.OTHER_SCOPES:
                info.add_metric([scope, status.model], 1)
            if status.owner:
                logs[scope] += status.log_bytes
                if scope != v.OTHER_SCOPES:
                    owners.add_metric([scope, status.owner], 1)
            for state in SlotState:
                slots[scope, state] += getattr(status, state)
            for result, keys in zip(RESULTS, (status.hits, status.misses), strict=True):
                asked[scope, result] += keys
            evicted[scope] += status.evicted
            expired[scope] += status.expired_leases
        yield info
        yield owners
        for metric, by_labels in ((v.SLOTS, slots), (v.LOOKED_UP_KEYS, asked)):
            family = scalars(metric)
            for labels, value in by_labels.items():
                family.add_metric(labels, value)
            yield family
        for metric, by_scope in (
            (v.SCOPE_EVICTED_PAGES, evicted),
            (v.EXPIRED_LEASES, expired),
            (v.SCOPE_LOG_BYTES, logs),
        ):
            family = scalars(metric)
            for scope, value in by_scope.items():
                family.add_metric([scope], value)
            yield family

    def _label(self, status: ScopeStatus) -> str:
        # Clients name scopes: without a bound, they could make Prometheus keep any number of series.
        if status.scope not in self._scopes:
            if len(self._scopes) == v.MAX_SCOPE_SERIES:
                return v.OTHER_SCOPES
            self._scopes.add(status.scope)
        return status.scope

    def request_counts(self) -> RequestCounts:
        """Sum the request counters over all routes."""
        # Read back from the counters once a second, instead of a second count in each request.
        by_status, by_bound = Counts[str](), Counts[float]()
        for sample in (
            sample
            for family in self._requests.collect()
            for sample in family.samples
            if sample.name.endswith("_total")
        ):
            by_status[sample.labels["status"]] += int(sample.value)
        for sample in (
            sample
            for family in self._seconds.collect()
            for sample in family.samples
            if "le" in sample.labels
        ):
            by_bound[float(sample.labels["le"])] += int(sample.value)
        refused, failed = (
            sum(count for status, count in by_status.items() if status[0] == first)
            for first in "45"
        )
        bounds = sorted(by_bound)
        return RequestCounts(
            by_status.total(),
            refused,
            failed,
            tuple(bounds),
            tuple(by_bound[bound] for bound in bounds),
        )


class _StateCollector:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.state_families()

    def describe(self) -> list[Metric]:
        """No families in advance: which ones there are depends on store and settings."""
        return []
