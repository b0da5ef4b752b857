"""What tells the server which call of which engine a request belongs to."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from hicache_storage.observability import tracing
from hicache_storage.observability.request_ids import HEADER, RequestScope, call_request_id

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, MutableMapping

    from hicache_storage.observability.otel import Spans

S = TypeVar("S")
T = TypeVar("T")
P = ParamSpec("P")


def name(headers: MutableMapping[str, str]) -> None:
    """Add the id of the call that this request is made for, and its span where calls are traced."""
    headers[HEADER] = call_request_id(None)
    if tracing.spans() is not None:
        from hicache_storage.observability.otel import inject

        inject(headers)


def traced(
    request: Callable[Concatenate[S, str, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, str, P], Coroutine[Any, Any, T]]:
    """Put a span around a request, whose first argument is its path, where calls are traced."""

    @functools.wraps(request)
    def asked(self: S, path: str, /, *args: P.args, **named: P.kwargs) -> Coroutine[Any, Any, T]:
        spans = tracing.spans()
        if spans is None:
            return request(self, path, *args, **named)
        return _within(spans, path, lambda: request(self, path, *args, **named))

    return asked


async def _within(spans: Spans, path: str, begin: Callable[[], Coroutine[Any, Any, T]]) -> T:
    with RequestScope(call_request_id(None)) as request_id, spans.request(path, request_id):
        return await begin()
