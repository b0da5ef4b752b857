"""HTTP connections of one event loop; sends one request to one metadata server."""

from __future__ import annotations

import asyncio
import time
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import aiohttp
import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import (
    MovedError,
    NoResponseError,
    RetryableError,
    error_of_response,
)
from hicache_storage.observability import tracing
from hicache_storage.observability.request_ids import HEADER, RequestScope, call_request_id

if TYPE_CHECKING:
    from collections.abc import Generator, MutableMapping
    from contextlib import AbstractContextManager
    from ssl import SSLContext

    from multidict import CIMultiDict

    from hicache_metadata_server.client.failover import ServerEndpoint
    from hicache_storage.observability.otel import Spans

T = TypeVar("T")

MAX_CONNECTIONS: Final = 32
"""To one server."""
PROBE_SECONDS: Final = 1.0
"""Timeout of a readiness probe."""
MAX_RESPONSE_BYTES: Final = 256 << 20
READY: Final = "/readyz"
EMPTY: Final = msgspec.msgpack.encode({})


class PendingRequest(Generic[T]):
    """A request as it is sent to each server in turn, with the type of its response."""

    __slots__ = ("body", "headers", "path", "response_type", "scope")

    def __init__(
        self,
        path: str,
        headers: CIMultiDict[str],
        body: bytes | None,
        response_type: type[T],
        scope: str = "",
    ) -> None:
        self.path = path
        self.scope = scope
        """The first scope that it names; empty for none."""
        self.headers = headers
        self.body = body
        self.response_type = response_type


class HttpTransport:
    """A connection pool, opened at the first request. Only the thread of its event loop uses it.

    Args:
        tls: TLS context for `https://` servers; None for the system's authorities and no client
            certificate.
    """

    def __init__(self, tls: SSLContext | None) -> None:
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def send(self, server: ServerEndpoint, pending: PendingRequest[T], seconds: float) -> T:
        """Send a request to a server and return its response.

        Raises:
            NoResponseError: no response within `seconds`.
            MovedError: another server owns the scopes.
            RetryableError: the connection failed, or the response is malformed.
            MetadataError: the server refuses.
        """
        session = self._session or self._open()
        method, url = server.routes[pending.path]
        if server.silent_since is None:
            server.silent_since = time.monotonic()
        try:
            async with (
                asyncio.timeout(seconds),
                session.request(
                    method, url, data=pending.body, headers=pending.headers, allow_redirects=False
                ) as response,
            ):
                server.silent_since = None
                return _decoded(response, await _body(response), pending.response_type)
        except TimeoutError as error:
            message = f"the metadata server {server.url} has not answered within {seconds:.3g} s"
            raise NoResponseError(message) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # A ValueError is a malformed response.
            message = (
                f"the metadata server {server.url} does not answer: {type(error).__name__}: {error}"
            )
            raise RetryableError(message) from error

    async def problem(self, server: ServerEndpoint) -> str:
        """Ask a server for the reason that it is not ready; empty if it is."""
        session = self._session or self._open()
        try:
            async with (
                asyncio.timeout(PROBE_SECONDS),
                session.get(server.url + READY, allow_redirects=False) as response,
            ):
                if response.status == 200:
                    return ""
                body = await _body(response)
                return p.decode(body, p.Problem, response.content_type).message
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            # TLS connections send their close notification in the next turn of the loop.
            await asyncio.sleep(0)

    def _open(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=MAX_CONNECTIONS, ssl=self._tls or True
            ),
            timeout=aiohttp.ClientTimeout(total=None),
            # Cookies and compression would cost time at each request; servers use neither.
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self._session


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if response.content_length is not None:
        # Bounded, because the address may be that of another program.
        if response.content_length > MAX_RESPONSE_BYTES:
            raise ValueError(f"a response of {response.content_length} bytes")
        return await response.read()
    chunks, length = list[bytes](), 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        length += len(chunk)
        if length > MAX_RESPONSE_BYTES:
            raise ValueError(f"a response of more than {MAX_RESPONSE_BYTES} bytes")
    return b"".join(chunks)


def _decoded(response: aiohttp.ClientResponse, body: bytes, response_type: type[T]) -> T:
    """Decode a response.

    Raises:
        MetadataError: the server refuses.
        ValueError: the response is malformed.
    """
    if response.status == 307:
        location = response.headers.get("Location", "")
        # The same path: a request must not be sent to another route.
        if not location.endswith(response.url.raw_path):
            raise ValueError(f"a redirection to {location!r}")
        message = f"another metadata server owns the scopes: {location}"
        raise MovedError(message, location.removesuffix(response.url.raw_path))
    if response.status >= 400:
        try:
            problem = p.decode(body, p.Problem, response.content_type)
        except ValueError:
            message = f"a response of {len(body)} bytes that is no metadata server's"
            problem = p.Problem(code="unreadable", message=message)
        raise error_of_response(response.status, problem.code, problem.message)
    if response.status == 204:
        # Callers of routes without a response body do not use the decoded value.
        body = EMPTY
    elif response.status != 200:
        raise ValueError(f"status {response.status}")
    return p.decode(
        body, response_type, p.MSGPACK if response.status == 204 else response.content_type
    )


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
