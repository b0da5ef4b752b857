"""Time series of counters and the slowest requests, for `GET /v2/history`.

Samples are differences of counters, so that a reader need not know when the server was started.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hicache_metadata_server.protocol import History, Series, SlowCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_metadata_server.core.limits import RequestSize
    from hicache_metadata_server.core.scope import Totals
    from hicache_metadata_server.core.service import MetadataService

SECONDS: Final = 600
MINUTES: Final = 1440
"""Samples kept of each resolution."""
SLOW_KEPT: Final = 20
"""Calls kept of each minute, and returned of the whole hour."""
SLOW_MINUTES: Final = 60
SLOW_SECONDS: Final = 60.0 * SLOW_MINUTES


class RequestCounts(NamedTuple):
    """Counters of requests since the start."""

    requests: int
    refused: int
    failed: int
    bounds: tuple[float, ...]
    """Upper ends of the buckets in seconds, ascending; the last is infinite."""
    by_bucket: tuple[int, ...]
    """Cumulative: requests that took no longer than each bound."""


COLUMNS: Final = Series.__struct_fields__[1:]
"""Of a sample, in their order."""


class _Counters(NamedTuple):
    """All counters at one time."""

    time: float
    requests: RequestCounts
    totals: Totals


class SampleRing:
    """Ring buffer of the latest samples of one resolution.

    A sample ends with the first reading of the counters in a new step, which is a whole second or
    minute of the clock.
    """

    def __init__(self, step_seconds: float, size: int) -> None:
        self.step_seconds = step_seconds
        self._samples = deque[tuple[float | None, ...]](maxlen=size)
        self._last: _Counters | None = None

    def update(self, counters: _Counters) -> None:
        """Append a sample if a new step has begun."""
        last = self._last
        if last is None:
            # The first sample needs a reading to be the difference from.
            self._last = counters
        # By whole steps of the clock and not by elapsed time: a late tick would shift all that
        # follow, and those of two servers would not line up.
        elif counters.time // self.step_seconds > last.time // self.step_seconds:
            self._samples.append(_sample(last, counters))
            self._last = counters

    def series(self, after: float) -> Series:
        """Samples that ended later than `after`, in seconds since 1970."""
        samples = [sample for sample in self._samples if (sample[0] or 0.0) > after]
        columns: dict[str, Any] = {
            name: [sample[i] for sample in samples] for i, name in enumerate(COLUMNS)
        }
        return Series(step_seconds=self.step_seconds, **columns)


class TimeSeries:
    """Samples of every second of ten minutes, and of every minute of a day."""

    def __init__(self) -> None:
        self.seconds = SampleRing(1.0, SECONDS)
        self.minutes = SampleRing(60.0, MINUTES)
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """Return True if a new second has begun since the last update."""
        return now >= self._next

    def update(self, now: float, requests: RequestCounts, totals: Totals) -> None:
        """Add a reading of the counters."""
        self._next = now // 1.0 + 1.0
        counters = _Counters(now, requests, totals)
        for ring in (self.seconds, self.minutes):
            ring.update(counters)


class HistoryRecorder:
    """Recorder of `GET /v2/history`: time series and slow log.

    Args:
        request_counts: reads the request counters.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        service: MetadataService,
        request_counts: Callable[[], RequestCounts],
        clock: Callable[[], float],
    ) -> None:
        self._service = service
        self._request_counts = request_counts
        self._clock = clock
        self._series = TimeSeries()
        self.slow_log = SlowLog()
        self.started = clock()

    def tick(self) -> None:
        """Take the samples that are due."""
        now = self._clock()
        # Ticks come ten times a second, and more often under load: summing all scopes each time
        # would be work for nothing.
        if self._series.is_due(now):
            self.slow_log.rotate(now)
            self._series.update(now, self._request_counts(), self._service.totals())

    def add(
        self, route: str, status: int, seconds: float, request_id: str, size: RequestSize
    ) -> None:
        """Add a call slower than `slow_log.floor`."""
        call = SlowCall(
            time=self._clock(),
            route=route,
            status=status,
            seconds=seconds,
            entries=size.entries,
            scopes=size.scopes,
            scope=size.scope,
            request_id=request_id,
        )
        self.slow_log.add(call)

    def history(self, after: float) -> History:
        """The whole history, with the samples that ended later than `after`."""
        now = self._clock()
        return History(
            instance=self._service.about.instance,
            started=self.started,
            now=now,
            seconds=self._series.seconds.series(after),
            minutes=self._series.minutes.series(after),
            slowest=self.slow_log.calls(now),
            slowest_seconds=SLOW_SECONDS,
        )


def quantile(share: float, bounds: Sequence[float], by_bucket: Sequence[int]) -> float | None:
    """Estimate a quantile of a histogram; None if it is empty.

    Linear within a bucket, as Prometheus' `histogram_quantile`; the last finite bound for values
    beyond it.
    """
    total = by_bucket[-1] if by_bucket else 0
    if not total:
        return None
    wanted, below, begin = share * total, 0, 0.0
    for end, count in zip(bounds[:-1], by_bucket, strict=False):
        if count >= wanted and count > below:
            return begin + (end - begin) * (wanted - below) / (count - below)
        below, begin = count, end
    return begin


def _sample(first: _Counters, last: _Counters) -> tuple[float | None, ...]:
    before, after = first.requests, last.requests
    # Before the first request there are no buckets.
    counts = [
        count - was
        for count, was in zip(
            after.by_bucket, before.by_bucket or [0] * len(after.by_bucket), strict=True
        )
    ]
    was, totals = first.totals, last.totals
    return (
        last.time,
        last.time - first.time,
        after.requests - before.requests,
        after.refused - before.refused,
        after.failed - before.failed,
        quantile(0.5, after.bounds, counts),
        quantile(0.99, after.bounds, counts),
        totals.hits - was.hits,
        totals.misses - was.misses,
        totals.evicted - was.evicted,
        totals.live,
        totals.leased,
        totals.quarantined,
        totals.free,
    )


class SlowLog:
    """The slowest calls of each minute, in a bounded heap each.

    Compare with `floor` before calling `add`: most calls are faster.
    """

    def __init__(self) -> None:
        self.floor = 0.0
        """Seconds; faster calls are not among the slowest of this minute."""
        self._heap: list[tuple[float, int, SlowCall]] = []
        # A heap for each minute, not one for the hour: entries expire by age, and a heap finds only
        # its fastest entry.
        self._earlier = deque[list[tuple[float, int, SlowCall]]](maxlen=SLOW_MINUTES)
        self._number = 0
        self._minute = 0.0

    def rotate(self, now: float) -> None:
        """Start a new heap if a new minute has begun; called once a second."""
        minute = now // 60.0
        if minute == self._minute:
            return
        if self._heap:
            self._earlier.append(self._heap)
        self._heap = []
        self.floor = 0.0
        self._minute = minute

    def add(self, call: SlowCall) -> None:
        """Add a call; replaces the fastest one once the minute has `SLOW_KEPT`."""
        self._number += 1
        # The number breaks ties: calls themselves cannot be compared.
        entry = (call.seconds, -self._number, call)
        if len(self._heap) < SLOW_KEPT:
            heapq.heappush(self._heap, entry)
        else:
            heapq.heapreplace(self._heap, entry)
        if len(self._heap) == SLOW_KEPT:
            self.floor = self._heap[0][0]

    def calls(self, now: float) -> list[SlowCall]:
        """The slowest calls of the last hour, slowest first."""
        entries = [
            entry
            for heap in (*self._earlier, self._heap)
            for entry in heap
            if entry[2].time > now - SLOW_SECONDS
        ]
        return [call for _, _, call in heapq.nlargest(SLOW_KEPT, entries)]
