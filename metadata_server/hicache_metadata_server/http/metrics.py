"""Metrics of the server: Prometheus series, and their history for `GET /v2/history`.

Counters of requests are kept here; the state of the service is read when it is scraped, so that an
operation on slots never has to update a metric. The history has differences of counters, so that a
reader need not know when the server was started.
"""

from __future__ import annotations

import heapq
import platform
from collections import Counter as Counts
from collections import defaultdict, deque
from itertools import count
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector

from hicache_metadata_server import metric_defs as v
from hicache_metadata_server.protocol import History, Series, SlotState, SlowCall
from hicache_storage.observability.prometheus import scalar, scalars

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from prometheus_client.core import Metric

    from hicache_metadata_server.auth.security import Security
    from hicache_metadata_server.core.scope import Totals
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.http.handlers import Handlers
    from hicache_metadata_server.protocol import ScopeStatus
    from hicache_metadata_server.storage.store import MetadataStore

SCOPE_METRICS: Final = (
    *(v.SCOPE_INFO, v.SCOPE_OWNER, v.SLOTS, v.LOOKED_UP_KEYS),
    *(v.SCOPE_EVICTED_PAGES, v.EXPIRED_LEASES, v.SCOPE_LOG_BYTES),
)
SECONDS: Final = 600
MINUTES: Final = 1440
"""Samples kept of each resolution."""
SLOW_KEPT: Final = 20
"""Calls kept of each minute, and returned of the whole hour."""
SLOW_MINUTES: Final = 60
SLOW_SECONDS: Final = 60.0 * SLOW_MINUTES
COLUMNS: Final = Series.__struct_fields__[1:]
"""Of a sample, in their order."""


class Counters(NamedTuple):
    """All counters at one time; those of requests since the start."""

    time: float
    requests: int
    refused: int
    failed: int
    bounds: tuple[float, ...]
    """Upper ends of the buckets in seconds, ascending; the last is infinite."""
    by_bucket: tuple[int, ...]
    """Cumulative: requests that took no longer than each bound."""
    totals: Totals


class Metrics:
    """Metrics of one server, in a registry of its own."""

    def __init__(self, handlers: Handlers, store: MetadataStore, security: Security) -> None:
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
        self.write_seconds = Histogram(
            v.TRANSACTION_SECONDS.family,
            v.TRANSACTION_SECONDS.help,
            buckets=v.TRANSACTION_SECONDS.buckets,
            registry=None,
        )
        """Of groups of changes; published where there is a durable store."""
        self._children: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self._handlers = handlers
        self._service = handlers.service
        self._store = store
        self._security = security
        self._scopes = set[str]()
        """Scopes with series of their own. They keep them as long as the process lives: if counters
        moved between a scope's name and `OTHER_SCOPES`, both would look like restarts."""
        self._registry.register(self)
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

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """No families in advance: which ones there are depends on store and settings."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Metric families of service, store and security, read at once."""
        yield from self._scope_families()
        build, about = scalars(v.BUILD_INFO), self._service.about
        build.add_metric(
            [about.server.rpartition(" ")[2], about.protocol, platform.python_version()], 1
        )
        yield build
        sizes = scalars(v.STORE_BYTES)
        for part, size in self._store.sizes().items():
            sizes.add_metric([part], size)
        yield sizes
        yield scalar(v.UNOWNED_SCOPES, self._handlers.unowned_scopes())
        yield scalar(v.QUARANTINE_SECONDS, self._service.limits.quarantine_seconds)
        yield scalar(v.READY, not self._handlers.problem())
        yield scalar(v.DRAINING, self._service.draining)
        yield scalar(v.RECOVERY_PROBLEMS, len(self._service.recovery_problems))
        if (group_commit := self._handlers.group_commit) is not None:
            yield scalar(v.TRANSACTIONS, group_commit.groups)
            yield scalar(v.STORE_FAILING, self._handlers.store_fails())
            yield from self.write_seconds.collect()
        yield from self._security.families()

    def _scope_families(self) -> Iterator[Metric]:
        families = {metric: scalars(metric) for metric in SCOPE_METRICS}
        values = defaultdict[tuple[Any, tuple[str, ...]], int](int)
        for status in self._service.list_scopes().scopes:
            scope = self._label(status)
            if scope != v.OTHER_SCOPES:
                values[v.SCOPE_INFO, (scope, status.model)] = 1
                values[v.SCOPE_OWNER, (scope, status.owner)] = 1
            for state in SlotState:
                values[v.SLOTS, (scope, state)] += getattr(status, state)
            values[v.LOOKED_UP_KEYS, (scope, "hit")] += status.hits
            values[v.LOOKED_UP_KEYS, (scope, "miss")] += status.misses
            values[v.SCOPE_EVICTED_PAGES, (scope,)] += status.evicted
            values[v.EXPIRED_LEASES, (scope,)] += status.expired_leases
            if status.owner:
                values[v.SCOPE_LOG_BYTES, (scope,)] += status.log_bytes
        for (metric, labels), value in values.items():
            # No model, or no owner: no series.
            if all(labels):
                families[metric].add_metric(labels, value)
        yield from families.values()

    def _label(self, status: ScopeStatus) -> str:
        # Clients name scopes: without a bound, they could make Prometheus keep any number of series.
        if status.scope not in self._scopes:
            if len(self._scopes) == v.MAX_SCOPE_SERIES:
                return v.OTHER_SCOPES
            self._scopes.add(status.scope)
        return status.scope

    def counters(self, now: float) -> Counters:
        """Sum the request counters over all routes, and the counts of all scopes."""
        # Read back from the counters once a second, instead of a second count in each request.
        by_status, by_bound = Counts[str](), Counts[float]()
        for metric in (self._requests, self._seconds):
            for sample in (sample for family in metric.collect() for sample in family.samples):
                if sample.name.endswith("_total"):
                    by_status[sample.labels["status"]] += int(sample.value)
                elif "le" in sample.labels:
                    by_bound[float(sample.labels["le"])] += int(sample.value)
        refused, failed = (
            sum(requests for status, requests in by_status.items() if status[0] == first)
            for first in "45"
        )
        bounds = tuple(sorted(by_bound))
        by_bucket = tuple(by_bound[bound] for bound in bounds)
        totals = self._service.totals()
        return Counters(now, by_status.total(), refused, failed, bounds, by_bucket, totals)


class HistoryRecorder:
    """Recorder of `GET /v2/history`: time series and slow log."""

    def __init__(
        self, service: MetadataService, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._service = service
        self._metrics = metrics
        self._clock = clock
        self._seconds = SampleRing(1.0, SECONDS)
        self._minutes = SampleRing(60.0, MINUTES)
        self.slow_log = SlowLog()
        self.started = clock()

    def sample(self) -> None:
        """Take the samples that are due; called once a second."""
        now = self._clock()
        counters = self._metrics.counters(now)
        self._seconds.update(counters)
        self._minutes.update(counters)
        self.slow_log.rotate(now)

    def history(self, after: float) -> History:
        """The whole history, with the samples that ended later than `after`."""
        now = self._clock()
        return History(
            instance=self._service.about.instance,
            started=self.started,
            now=now,
            seconds=self._seconds.series(after),
            minutes=self._minutes.series(after),
            slowest=self.slow_log.calls(now),
            slowest_seconds=SLOW_SECONDS,
        )


class SampleRing:
    """Ring buffer of the latest samples of one resolution.

    A sample ends with the first reading of the counters in a new step, which is a whole second or
    minute of the clock.
    """

    def __init__(self, step_seconds: float, size: int) -> None:
        self._step_seconds = step_seconds
        self._samples = deque[tuple[float | None, ...]](maxlen=size)
        self._last: Counters | None = None

    def update(self, counters: Counters) -> None:
        """Append a sample if a new step has begun."""
        last, step = self._last, self._step_seconds
        # By whole steps of the clock and not by elapsed time: a late tick would shift all that
        # follow, and those of two servers would not line up.
        if last is not None and counters.time // step <= last.time // step:
            return
        # The first sample needs a reading to be the difference from.
        if last is not None:
            self._samples.append(_sample(last, counters))
        self._last = counters

    def series(self, after: float) -> Series:
        """Samples that ended later than `after`, in seconds since 1970."""
        samples = [sample for sample in self._samples if (sample[0] or 0.0) > after]
        columns: dict[str, Any] = {
            name: [sample[i] for sample in samples] for i, name in enumerate(COLUMNS)
        }
        return Series(step_seconds=self._step_seconds, **columns)


class SlowLog:
    """The slowest calls of each minute of the last hour, in a bounded heap each.

    Compare with `floor` before calling `add`: most calls are faster.
    """

    def __init__(self) -> None:
        self.floor = 0.0
        """Seconds; faster calls are not among the slowest of this minute."""
        # A heap for each minute, not one for the hour: entries expire by age, and a heap finds only
        # its fastest entry.
        self._heaps = deque[list[tuple[float, int, SlowCall]]]([[]], maxlen=SLOW_MINUTES + 1)
        self._minute = 0.0
        # Breaks ties: calls themselves cannot be compared.
        self._numbers = count(0, -1)

    def rotate(self, now: float) -> None:
        """Start a new heap if a new minute has begun."""
        if now // 60.0 != self._minute:
            self._minute = now // 60.0
            self._heaps.append([])
            self.floor = 0.0

    def add(self, call: SlowCall) -> None:
        """Add a call; replaces the fastest one once the minute has `SLOW_KEPT`."""
        heap = self._heaps[-1]
        heapq.heappush(heap, (call.seconds, next(self._numbers), call))
        if len(heap) > SLOW_KEPT:
            heapq.heappop(heap)
        if len(heap) == SLOW_KEPT:
            self.floor = heap[0][0]

    def calls(self, now: float) -> list[SlowCall]:
        """The slowest calls of the last hour, slowest first."""
        entries = [
            entry for heap in self._heaps for entry in heap if entry[2].time > now - SLOW_SECONDS
        ]
        return [call for _, _, call in heapq.nlargest(SLOW_KEPT, entries)]


def quantile(share: float, bounds: Sequence[float], by_bucket: Sequence[int]) -> float | None:
    """Estimate a quantile of a histogram; None if it is empty.

    Linear within a bucket, as Prometheus' `histogram_quantile`; the last finite bound for values
    beyond it.
    """
    total = by_bucket[-1] if by_bucket else 0
    if not total:
        return None
    wanted, below, begin = share * total, 0, 0.0
    for end, number in zip(bounds[:-1], by_bucket, strict=False):
        if number >= wanted and number > below:
            return begin + (end - begin) * (wanted - below) / (number - below)
        below, begin = number, end
    return begin


def _sample(before: Counters, after: Counters) -> tuple[float | None, ...]:
    # Before the first request there are no buckets.
    was = before.by_bucket or (0,) * len(after.by_bucket)
    in_bucket = [now - then for now, then in zip(after.by_bucket, was, strict=True)]
    totals = after.totals
    return (
        after.time,
        after.time - before.time,
        after.requests - before.requests,
        after.refused - before.refused,
        after.failed - before.failed,
        quantile(0.5, after.bounds, in_bucket),
        quantile(0.99, after.bounds, in_bucket),
        totals.hits - before.totals.hits,
        totals.misses - before.totals.misses,
        totals.evicted - before.totals.evicted,
        totals.live,
        totals.leased,
        totals.quarantined,
        totals.free,
    )
