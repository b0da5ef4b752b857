"""Requests that are looked at more closely, where the operator wants that: slow ones are logged,
and all are traced."""

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


class Watched:
    """One request on its way."""

    __slots__ = ("message", "request_id", "span")

    def __init__(self, request_id: str, span: ServerSpan | None) -> None:
        self.request_id, self.span = request_id, span
        self.message: Any = None
        """What is asked for, once it was read."""


class Watch:
    """There is one only where something is to be seen: whoever has none pays nothing.

    Args:
        slow_seconds: longer requests are logged and counted; 0 for none.
        spans: begins a span for each request; None for none.
    """

    def __init__(self, metrics: Metrics, slow_seconds: float, spans: Spans | None) -> None:
        self._metrics, self._slow_seconds, self._spans = metrics, slow_seconds, spans

    def begin(
        self, method: str, route: str, request_id: str, headers: Mapping[bytes, bytes]
    ) -> Watched:
        """A request's head has arrived."""
        span = (
            None if self._spans is None else self._spans.answer(method, route, request_id, headers)
        )
        return Watched(request_id, span)

    def end(self, watched: Watched, route: str, status: int, seconds: float) -> None:
        """It is answered; `seconds` since its last byte has arrived."""
        slow = 0 < self._slow_seconds <= seconds
        if not slow and watched.span is None:
            return
        scopes, entries = extent(watched.message)
        if watched.span is not None:
            watched.span.end(status, scopes, entries)
        if slow:
            self._metrics.was_slow(route)
            _log.warning(
                "slow_request",
                route=route,
                status=status,
                scopes=scopes,
                entries=entries,
                seconds=round(seconds, 6),
                request_id=watched.request_id,
            )


def extent(message: object) -> tuple[int, int]:
    """How many scopes a request is about, and how many keys, leases or slots in all of them; 0
    where it could not be read."""
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
    columns = p.COLUMNS.get(type(message))
    return len(parts), sum(len(getattr(part, columns[0])) for part in parts) if columns else len(
        parts
    )
