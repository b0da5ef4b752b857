"""What the server did over time: its counters, looked at once a second, in two rings of samples."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hicache_metadata_server.http.slow_log import SPAN_SECONDS, Slowest, named
from hicache_metadata_server.protocol.history import History, Series, SlowCall

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.core.totals import Totals

SECONDS: Final = 600
MINUTES: Final = 1440
"""Samples of each kind that are kept."""


class Answered(NamedTuple):
    """Requests since the start."""

    requests: int
    refused: int
    failed: int
    bounds: tuple[float, ...]
    """Upper ends of the buckets in seconds, ascending; the last is infinite."""
    by_bucket: tuple[int, ...]
    """How many took no longer, for each bucket."""


class Sample(NamedTuple):
    """A row of `Series`."""

    times: float
    spans: float
    requests: int
    refused: int
    failed: int
    median_seconds: float | None
    p99_seconds: float | None
    hits: int
    misses: int
    evicted: int
    live: int
    leased: int
    quarantined: int
    free: int


class _Seen(NamedTuple):
    """The counters at one time."""

    time: float
    answered: Answered
    totals: Totals


class Ring:
    """The latest samples. Each ends with the first look at the counters in a new step, which is a
    whole second or minute of the clock."""

    def __init__(self, step_seconds: float, size: int) -> None:
        self.step_seconds = step_seconds
        self._samples = deque[Sample](maxlen=size)
        self._last: _Seen | None = None

    def see(self, seen: _Seen) -> None:
        """Take a sample, if it is time."""
        last = self._last
        if last is None:
            self._last = seen
        elif seen.time // self.step_seconds > last.time // self.step_seconds:
            self._samples.append(_sample(last, seen))
            self._last = seen

    def series(self, after: float) -> Series:
        """The samples that ended later."""
        samples = [sample for sample in self._samples if sample.times > after]
        columns: dict[str, Any] = {
            name: [getattr(sample, name) for sample in samples] for name in Sample._fields
        }
        return Series(step_seconds=self.step_seconds, **columns)


class Rings:
    """Every second of ten minutes, and every minute of a day."""

    def __init__(self) -> None:
        self.seconds, self.minutes = Ring(1.0, SECONDS), Ring(60.0, MINUTES)
        self._next = 0.0

    def is_due(self, now: float) -> bool:
        """Whether another second has begun since the last look."""
        return now >= self._next

    def see(self, now: float, answered: Answered, totals: Totals) -> None:
        """Look at the counters."""
        self._next = now // 1.0 + 1.0
        seen = _Seen(now, answered, totals)
        for ring in (self.seconds, self.minutes):
            ring.see(seen)


class HistoryRecorder:
    """Looks at the counters when the clock ticks, and is shown the calls that may be among the
    slowest."""

    def __init__(
        self,
        service: MetadataService,
        request_counts: Callable[[], Answered],
        clock: Callable[[], float],
    ) -> None:
        self._service = service
        self._request_counts = request_counts
        self._clock = clock
        self._rings = Rings()
        self.slowest = Slowest()
        self.started = clock()

    def tick(self) -> None:
        """Take the samples that are due."""
        now = self._clock()
        if self._rings.is_due(now):
            self.slowest.turn(now)
            self._rings.see(now, self._request_counts(), self._service.totals())

    def add(
        self,
        route: str,
        status: int,
        seconds: float,
        request_id: str,
        body: bytes,
        content_type: str,
    ) -> None:
        """Keep a call of more than `slowest.floor`."""
        entries, scopes, scope = named(body, content_type)
        call = SlowCall(
            time=self._clock(),
            route=route,
            status=status,
            seconds=seconds,
            entries=entries,
            scopes=scopes,
            scope=scope,
            request_id=request_id,
        )
        self.slowest.add(call)

    def told(self, after: float) -> History:
        """All that is kept; of the samples only those that ended later."""
        now = self._clock()
        return History(
            instance=self._service.about.instance,
            started=self.started,
            now=now,
            seconds=self._rings.seconds.series(after),
            minutes=self._rings.minutes.series(after),
            slowest=self.slowest.told(now),
            slowest_seconds=SPAN_SECONDS,
        )


def quantile(share: float, bounds: Sequence[float], by_bucket: Sequence[int]) -> float | None:
    """Where that share of a histogram ends: linear within a bucket, and the last finite bound for
    what is beyond; None if it is empty."""
    total = by_bucket[-1] if by_bucket else 0
    if not total:
        return None
    wanted, below, begin = share * total, 0, 0.0
    for end, count in zip(bounds[:-1], by_bucket, strict=False):
        if count >= wanted and count > below:
            return begin + (end - begin) * (wanted - below) / (count - below)
        below, begin = count, end
    return begin


def _sample(first: _Seen, last: _Seen) -> Sample:
    before, after = first.answered, last.answered
    # A bucket that was not there had nothing in it.
    counts = [
        count - was
        for count, was in zip(
            after.by_bucket, before.by_bucket or [0] * len(after.by_bucket), strict=True
        )
    ]
    was, totals = first.totals, last.totals
    return Sample(
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
