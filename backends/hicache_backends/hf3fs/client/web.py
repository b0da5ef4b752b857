"""One request to one metadata server, on the connections of one event loop."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import aiohttp
import msgspec

from hicache_backends.hf3fs.client.failures import PassingError, SilentError, refusal
from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    from ssl import SSLContext

    from multidict import CIMultiDict

    from hicache_backends.hf3fs.client.servers import Server

T = TypeVar("T")

CONNECTIONS: Final = 32
"""To one server."""
PROBE_SECONDS: Final = 1.0
"""How long a server that has failed may take to say that it is ready."""
ANSWER_BYTES: Final = 256 << 20
"""What a longer body holds is no answer."""
READY: Final = "/readyz"
EMPTY: Final = msgspec.msgpack.encode({})


class Errand(Generic[T]):
    """What is asked, as it is sent to each server in turn, and what the answer is to be."""

    __slots__ = ("body", "headers", "kind", "path")

    def __init__(self, path: str, headers: CIMultiDict[str], body: bytes | None, kind: type[T]) -> None:
        self.path, self.headers, self.body, self.kind = path, headers, body, kind


class Web:
    """Connections, opened when they are first needed. For the thread that runs their event loop.

    Args:
        tls: what is asked of a server at `https://`, and shown to it; None for the system's authorities, and nothing.
    """

    def __init__(self, tls: SSLContext | None) -> None:
        self._tls = tls
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, server: Server, errand: Errand[T], seconds: float) -> T:
        """The server's answer.

        Raises:
            SilentError: it has not come within `seconds`.
            PassingError: none has come that is one.
            MetadataError: it is a refusal.
        """
        session, (method, url) = self._session or self._open(), server.routes[errand.path]
        if server.silent_since is None:
            server.silent_since = time.monotonic()
        try:
            async with (
                asyncio.timeout(seconds),
                session.request(method, url, data=errand.body, headers=errand.headers, allow_redirects=False) as response,
            ):
                server.silent_since = None
                return _decoded(response, await _body(response), errand.kind)
        except TimeoutError as error:
            raise SilentError(f"the metadata server {server.url} has not answered within {seconds:.3g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            # A ValueError is an answer that is none.
            raise PassingError(f"the metadata server {server.url} does not answer: {type(error).__name__}: {error}") from error

    async def is_ready(self, server: Server) -> bool:
        """Whether a server says that it serves; false for whatever goes wrong."""
        session = self._session or self._open()
        try:
            async with asyncio.timeout(PROBE_SECONDS), session.get(server.url + READY, allow_redirects=False) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, ValueError):
            return False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            # TLS connections say goodbye in the next turn.
            await asyncio.sleep(0)

    def _open(self) -> aiohttp.ClientSession:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, limit_per_host=CONNECTIONS, ssl=self._tls or True),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
        )
        return self._session


async def _body(response: aiohttp.ClientResponse) -> bytes:
    if response.content_length is not None:
        if response.content_length > ANSWER_BYTES:
            raise ValueError(f"an answer of {response.content_length} bytes")
        return await response.read()
    chunks, length = list[bytes](), 0
    async for chunk in response.content.iter_any():
        chunks.append(chunk)
        length += len(chunk)
        if length > ANSWER_BYTES:
            raise ValueError(f"an answer of more than {ANSWER_BYTES} bytes")
    return b"".join(chunks)


def _decoded(response: aiohttp.ClientResponse, body: bytes, kind: type[T]) -> T:
    """The answer.

    Raises:
        MetadataError: it is a refusal.
        ValueError: it is none.
    """
    if response.status >= 400:
        try:
            problem = p.decode(body, p.Problem, response.content_type)
        except ValueError:
            problem = p.Problem(code="unreadable", message=f"an answer of {len(body)} bytes that is no metadata server's")
        raise refusal(response.status, problem.code, problem.message)
    if response.status == 204:
        # Of those routes that answer nothing, nobody looks at the answer.
        body = EMPTY
    elif response.status != 200:
        raise ValueError(f"status {response.status}")
    return p.decode(body, kind, p.MSGPACK if response.status == 204 else response.content_type)
