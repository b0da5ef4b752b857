"""Log of slow requests and traces of all, where the operator enables them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import structlog
from msgspec import Struct, structs

from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_metadata_server.http.metrics import Metrics
    from hicache_storage.observability.otel import ServerSpan, Spans

_log = structlog.get_logger()


class LoggedRequest:
    """One request in progress."""

    __slots__ = ("message", "request_id", "span")

    def __init__(self, request_id: str, span: ServerSpan | None) -> None:
        self.request_id = request_id
        self.span = span
        self.message: Any = None
        """The decoded body; None before it is decoded, and for a route without one."""


class RequestLog:
    """Log of slow requests, and their spans.

    Args:
        slow_seconds: requests that take this long are logged and counted; 0 for none.
        spans: begins a span for each request; None for none.
    """

    def __init__(self, metrics: Metrics, slow_seconds: float, spans: Spans | None) -> None:
        self._metrics = metrics
        self._slow_seconds = slow_seconds
        self._spans = spans

    def begin(
        self, method: str, route: str, request_id: str, headers: Mapping[bytes, bytes]
    ) -> LoggedRequest:
        """Begin the span of a request whose head has arrived."""
        span = (
            None if self._spans is None else self._spans.answer(method, route, request_id, headers)
        )
        return LoggedRequest(request_id, span)

    def end(self, logged: LoggedRequest, route: str, status: int, seconds: float) -> None:
        """End the span, and log a slow request.

        `seconds` count from the last byte of its body.
        """
        slow = 0 < self._slow_seconds <= seconds
        # Sizes are counted here and not in `begin`: most requests are neither slow nor traced.
        if not slow and logged.span is None:
            return
        scopes, entries = message_size(logged.message)
        if logged.span is not None:
            logged.span.end(status, scopes, entries)
        if slow:
            self._metrics.count_slow(route)
            _log.warning(
                "slow_request",
                route=route,
                status=status,
                scopes=scopes,
                entries=entries,
                seconds=round(seconds, 6),
                request_id=logged.request_id,
            )


def message_size(message: object) -> tuple[int, int]:
    """Count the scopes of a message, and its entries: keys, leases or slots.

    Both are 0 where the body could not be decoded.
    """
    if not isinstance(message, Struct):
        return 0, 0
    parts: list[Any] | None = getattr(message, "scopes", None)
    if parts is None:
        columns_of_one = (
            cast("list[object]", value)
            for value in structs.astuple(message)
            if isinstance(value, list)
        )
        return 1, sum(map(len, columns_of_one))
    # All columns of a part have the same length, so that the first one is enough.
    columns = p.COLUMNS.get(type(message))
    if not columns:
        return len(parts), len(parts)
    return len(parts), sum(len(getattr(part, columns[0])) for part in parts)
