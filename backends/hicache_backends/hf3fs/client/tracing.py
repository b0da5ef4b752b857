"""Request ids and trace contexts in the headers of requests to the metadata server."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from hicache_storage.observability import tracing
from hicache_storage.observability.request_ids import HEADER, RequestScope, call_request_id

if TYPE_CHECKING:
    from collections.abc import Generator, MutableMapping
    from contextlib import AbstractContextManager

    from hicache_storage.observability.otel import Spans


def add_trace_headers(headers: MutableMapping[str, str]) -> None:
    """Add the id of the running call, and its span if tracing is on."""
    headers[HEADER] = call_request_id(None)
    if tracing.spans() is not None:
        from hicache_storage.observability.otel import inject

        inject(headers)


def request_span(path: str) -> AbstractContextManager[None]:
    """A span around a request; does nothing if tracing is off."""
    spans = tracing.spans()
    return nullcontext() if spans is None else _span(spans, path)


@contextmanager
def _span(spans: Spans, path: str) -> Generator[None]:
    with RequestScope(call_request_id(None)) as request_id, spans.request(path, request_id):
        yield
