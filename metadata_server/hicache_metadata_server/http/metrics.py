"""What Prometheus collects."""

from __future__ import annotations

import platform
from collections import Counter as Counts
from collections import defaultdict
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector

from hicache_metadata_server.http.timeseries import Answered
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
    """Requests as they are answered, and the state of the service when it is asked for."""

    def __init__(self, service: MetadataService, problem: Callable[[], str] = str) -> None:
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
        self.store_problem: Callable[[], str] | None = None
        """Of a store without group commit: the error of the last try, or ""."""
        self.store_sizes: Callable[[], dict[str, int]] = dict
        self._service, self._problem = service, problem
        self._scopes = set[str]()
        """Those that have series of their own, for as long as this process lives: a counter must
        not change its name."""
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

    def was_slow(self, route: str) -> None:
        """Count one that took longer than the operator wants to see."""
        self._slow.labels(route).inc()

    def text(self) -> bytes:
        """In the format of Prometheus."""
        return generate_latest(self._registry)

    def state(self) -> Iterator[Metric]:
        """Of the service."""
        yield from self._of_scopes()
        build, about = scalars(v.BUILD_INFO), self._service.about
        build.add_metric(
            [about.server.rpartition(" ")[2], about.protocol, platform.python_version()], 1
        )
        yield build
        sizes = scalars(v.STORE_BYTES)
        for part, size in self.store_sizes().items():
            sizes.add_metric([part], size)
        yield sizes
        yield scalar(v.QUARANTINE_SECONDS, self._service.limits.quarantine_seconds)
        yield scalar(v.READY, not self._problem())
        yield scalar(v.DRAINING, self._service.draining)
        yield scalar(v.RECOVERY_PROBLEMS, len(self._service.recovery_problems))
        if self.group_commit is not None:
            yield scalar(v.TRANSACTIONS, self.group_commit.groups)
            yield scalar(v.STORE_FAILING, self.group_commit.error is not None)
            durations = histogram(v.TRANSACTION_SECONDS)
            add_latency(durations, v.TRANSACTION_SECONDS, [], self.group_commit.durations)
            yield durations
        if self.store_problem is not None:
            yield scalar(v.STORE_FAILING, bool(self.store_problem()))
        if self.security is not None:
            yield from self.security.families()

    def _of_scopes(self) -> Iterator[Metric]:
        slots, evicted = defaultdict[tuple[str, str], int](int), defaultdict[str, int](int)
        asked, expired = defaultdict[tuple[str, str], int](int), defaultdict[str, int](int)
        info = scalars(v.SCOPE_INFO)
        for status in self._service.list_scopes().scopes:
            scope = self._label(status)
            if status.model and scope != v.OTHER_SCOPES:
                info.add_metric([scope, status.model], 1)
            for state in SlotState:
                slots[scope, state] += getattr(status, state)
            for result, keys in zip(RESULTS, (status.hits, status.misses), strict=True):
                asked[scope, result] += keys
            evicted[scope] += status.evicted
            expired[scope] += status.expired_leases
        yield info
        for metric, by_labels in ((v.SLOTS, slots), (v.LOOKED_UP_KEYS, asked)):
            family = scalars(metric)
            for labels, value in by_labels.items():
                family.add_metric(labels, value)
            yield family
        for metric, by_scope in ((v.SCOPE_EVICTED_PAGES, evicted), (v.EXPIRED_LEASES, expired)):
            family = scalars(metric)
            for scope, value in by_scope.items():
                family.add_metric([scope], value)
            yield family

    def _label(self, status: ScopeStatus) -> str:
        if status.scope not in self._scopes:
            if len(self._scopes) == v.MAX_SCOPE_SERIES:
                return v.OTHER_SCOPES
            self._scopes.add(status.scope)
        return status.scope

    def so_far(self) -> Answered:
        """All requests, whatever their route."""
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
        return Answered(
            by_status.total(),
            refused,
            failed,
            tuple(bounds),
            tuple(by_bound[bound] for bound in bounds),
        )


class _State:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.state()

    def describe(self) -> list[Metric]:
        """Nothing in advance: it is told when it is asked for."""
        return []
