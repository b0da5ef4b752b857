"""What `GET /v2/history` tells."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_metadata_server.http.slow_log import SPAN_SECONDS, Slowest, named
from hicache_metadata_server.http.timeseries import Rings
from hicache_metadata_server.protocol.history import History, SlowCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.http.asgi import Asked
    from hicache_metadata_server.http.metrics import Metrics


class Recorder:
    """Looks at the counters when the clock ticks, and is shown the calls that may be among the
    slowest."""

    def __init__(
        self, service: MetadataService, metrics: Metrics, clock: Callable[[], float]
    ) -> None:
        self._service, self._metrics, self._clock = service, metrics, clock
        self._rings = Rings()
        self.slowest = Slowest()
        self.started = clock()

    def tick(self) -> None:
        """Take the samples that are due."""
        now = self._clock()
        if self._rings.is_due(now):
            self.slowest.turn(now)
            self._rings.see(now, self._metrics.so_far(), self._service.totals())

    def add(self, asked: Asked, status: int, seconds: float, body: bytes) -> None:
        """Keep a call of more than `slowest.floor`."""
        entries, scopes, scope = named(body, asked.content_type)
        call = SlowCall(
            time=self._clock(),
            route=asked.endpoint.name,
            status=status,
            seconds=seconds,
            entries=entries,
            scopes=scopes,
            scope=scope,
            request_id=asked.request_id,
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
