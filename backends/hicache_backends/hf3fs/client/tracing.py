"""What tells the server which call of which engine a request belongs to."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from hicache_storage.observability import tracing
from hicache_storage.observability.request_ids import HEADER, RequestScope, call_request_id

if TYPE_CHECKING:
    from collections.abc import Generator, MutableMapping
    from contextlib import AbstractContextManager

    from hicache_storage.observability.otel import Spans


def name(headers: MutableMapping[str, str]) -> None:
    """Add the id of the call that this request is made for, and its span where calls are traced."""
    headers[HEADER] = call_request_id(None)
    if tracing.spans() is not None:
        from hicache_storage.observability.otel import inject

        inject(headers)


def spanned(path: str) -> AbstractContextManager[None]:
    """A span around a request to a path, where calls are traced."""
    spans = tracing.spans()
    return nullcontext() if spans is None else _span(spans, path)


@contextmanager
def _span(spans: Spans, path: str) -> Generator[None]:
    with RequestScope(call_request_id(None)) as request_id, spans.request(path, request_id):
        yield
