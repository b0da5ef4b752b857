"""Synchronous client of the commands, on `http.client`.

The client of the driver needs aiohttp, an event loop and failover; a command sends few requests, to
exactly the server that it names.
"""

from __future__ import annotations

import http.client
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec

from hicache_metadata_server.protocol import JSON, ROUTES, Problem, decode, encode

if TYPE_CHECKING:
    import ssl

    from hicache_metadata_server.protocol import Answer, Request

A = TypeVar("A", bound="Answer")
# An fsck of a large store is one request, and takes its time.
ANSWER_SECONDS: Final = 60.0
MOVED: Final = 307
MAX_MOVES: Final = 5
TOKEN: Final = "--token-file FILE, or HICACHE_METADATA_TOKEN"
CERTIFICATE: Final = "--certificate FILE, or HICACHE_METADATA_CERTIFICATE"


class RemoteError(Exception):
    """The server is not reached, or refuses a request."""


class RefusalError(RemoteError):
    """The server refuses a request."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code
        """Error code of the protocol; "" if the answer is not one of a metadata server."""


class AdminClient:
    """Client of one running server; opens a connection for each request."""

    def __init__(self, url: str, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise RemoteError(f"{url!r} is no http or https address")
        self._is_secure = parts.scheme == "https"
        self._tls = tls
        self._url = url
        self._token = token
        self._host = parts.hostname
        self._port = parts.port

    def call(self, path: str, request: Request | None, kind: type[A]) -> A:
        """Send a request to a route of the protocol; return the answer.

        Raises:
            RemoteError: there is no answer, or it is a refusal.
        """
        method, sent = ROUTES[path].method, None if request is None else encode(request)
        status, body, location = self._send(method, path, sent)
        # Servers that share a Redis name the owner of a scope.
        for _ in range(MAX_MOVES):
            if status != MOVED:
                break
            owner = AdminClient(location.removesuffix(path), self._token, self._tls)
            status, body, location = owner._send(method, path, sent)
        if status != 200:
            raise self._refused(status, body)
        try:
            return decode(body, kind)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise RemoteError(
                f"{self._url} answers what a metadata server does not: {error}"
            ) from error

    def is_ready(self) -> tuple[bool, str]:
        """Return True if the server is ready, else False and the reason."""
        status, body, _ = self._send("GET", "/readyz", None)
        return status == 200, "" if status == 200 else str(self._refused(status, body))

    def _send(self, method: str, path: str, body: bytes | None) -> tuple[int, bytes, str]:
        """Return status, body and the header `Location`."""
        # JSON rather than MessagePack: speed does not matter here, and a proxy's log is readable.
        headers = {"Content-Type": JSON}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            with closing(self._connection()) as connection:
                connection.request(method, path, body, headers)
                response = connection.getresponse()
                return response.status, response.read(), response.getheader("Location", "")
        except (OSError, http.client.HTTPException) as error:
            # A server that requires a client certificate closes the connection without saying
            # why.
            ended = isinstance(
                error, (http.client.RemoteDisconnected, ConnectionError)
            ) or "CERTIFICATE_REQUIRED" in str(error)
            hint = (
                f"; if the server asks for a client certificate: {CERTIFICATE}"
                if self._is_secure and ended
                else ""
            )
            raise RemoteError(f"{self._url} does not answer: {error}{hint}") from error

    def _connection(self) -> http.client.HTTPConnection:
        if self._is_secure:
            return http.client.HTTPSConnection(
                self._host, self._port, timeout=ANSWER_SECONDS, context=self._tls
            )
        return http.client.HTTPConnection(self._host, self._port, timeout=ANSWER_SECONDS)

    def _refused(self, status: int, body: bytes) -> RefusalError:
        try:
            problem: Any = decode(body, Problem)
        except (msgspec.DecodeError, UnicodeError):
            # The page of a proxy, or another service on that port.
            return RefusalError(f"{self._url} answers {status}", "")
        hint = f"; {TOKEN}" if problem.code == "unauthorized" else ""
        return RefusalError(f"{problem.message} ({status} {problem.code}){hint}", problem.code)
