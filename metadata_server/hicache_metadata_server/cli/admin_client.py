"""Client of the commands: few requests, to exactly the server that they name."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final, TypeVar

from msgspec import msgpack

from hicache_metadata_server.client.errors import MetadataError, MovedError, RetryableError
from hicache_metadata_server.client.failover import ServerEndpoint, addresses
from hicache_metadata_server.client.http_transport import HttpTransport, PendingRequest
from hicache_metadata_server.protocol import MSGPACK

if TYPE_CHECKING:
    import ssl

    from hicache_metadata_server.protocol import Answer, Request

A = TypeVar("A", bound="Answer")
# An fsck of a large store is one request, and takes its time.
ANSWER_SECONDS: Final = 60.0
MAX_MOVES: Final = 5
CERTIFICATE: Final = "--certificate FILE, or HICACHE_METADATA_CERTIFICATE"


class AdminClient:
    """Client of one running server; opens a connection for each request.

    Raises:
        ValueError: the address is malformed.
    """

    def __init__(self, url: str, token: str = "", tls: ssl.SSLContext | None = None) -> None:
        [self._url] = addresses(url if "://" in url else f"http://{url}")
        self._tls = tls
        self._headers = {"Content-Type": MSGPACK}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"

    def call(self, path: str, request: Request | None, kind: type[A]) -> A:
        """Send a request to a route of the protocol; return the answer.

        Raises:
            MetadataError: there is no answer, or it is a refusal.
        """
        body = None if request is None else msgpack.encode(request)
        pending = PendingRequest(path, self._headers, body, kind)
        url = self._url
        with closing(HttpTransport(self._tls)) as transport:
            for _ in range(MAX_MOVES):
                try:
                    return transport.send(ServerEndpoint(url), pending, ANSWER_SECONDS)
                except MovedError as moved:
                    # Servers that share a Redis name the owner of a scope.
                    url = moved.url
                except RetryableError as error:
                    # A server that requires a client certificate closes the connection without
                    # saying why.
                    if not url.startswith("https:") or not isinstance(error.__cause__, OSError):
                        raise
                    hint = f"; if the server asks for a client certificate: {CERTIFICATE}"
                    raise MetadataError(f"{error}{hint}") from error
        raise MetadataError(f"no server owns the scopes; the last one that was named is {url}")

    def problem(self) -> str:
        """Ask for the reason that the server is not ready; empty if it is."""
        with closing(HttpTransport(self._tls)) as transport:
            return transport.problem(ServerEndpoint(self._url))
