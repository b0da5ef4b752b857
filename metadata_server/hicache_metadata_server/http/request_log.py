"""What requests cost: metrics, the slowest of the last hour, log of slow ones, traces."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from hicache_metadata_server.core.chunking import request_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_metadata_server.http.metrics import Metrics
    from hicache_metadata_server.http.timeseries import HistoryRecorder
    from hicache_storage.observability.otel import ServerSpan, Spans

_log = structlog.get_logger()


class RequestLog:
    """Log of all requests that are answered.

    Args:
        slow_seconds: requests that take this long are logged and counted; 0 for none.
        spans: begins a span for each request; None for none.
    """

    def __init__(
        self,
        metrics: Metrics,
        recorder: HistoryRecorder,
        slow_seconds: float,
        spans: Spans | None,
    ) -> None:
        self._metrics = metrics
        self._recorder = recorder
        self._slowest = recorder.slow_log
        self._slow_seconds = slow_seconds or float("inf")
        self._spans = spans

    def begin(
        self, method: str, route: str, request_id: str, headers: Mapping[bytes, bytes]
    ) -> ServerSpan | None:
        """Begin the span of a request whose head has arrived."""
        return (
            None if self._spans is None else self._spans.answer(method, route, request_id, headers)
        )

    def record(
        self,
        route: str,
        status: int,
        seconds: float,
        request_id: str,
        message: object,
        span: ServerSpan | None,
    ) -> None:
        """Record a request that is answered.

        Args:
            seconds: from the last byte of its body.
            message: the decoded body; None for a route without one, and if it cannot be decoded.
        """
        self._metrics.observe(route, status, seconds)
        is_slow = seconds >= self._slow_seconds
        is_among_slowest = seconds > self._slowest.floor
        # Entries are counted here and not before: most requests are neither slow nor traced.
        if not (is_slow or is_among_slowest or span is not None):
            return
        size = request_size(message)
        if is_among_slowest:
            self._recorder.add(route, status, seconds, request_id, size)
        if span is not None:
            span.end(status, size.scopes, size.entries)
        if is_slow:
            self._metrics.count_slow(route)
            _log.warning(
                "slow_request",
                route=route,
                status=status,
                scopes=size.scopes,
                entries=size.entries,
                seconds=round(seconds, 6),
                request_id=request_id,
            )
