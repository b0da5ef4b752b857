"""HTTP connections to metadata servers; sends one request to one of them, within a time."""

from __future__ import annotations

import contextlib
import errno
import http.client
import io
import select
import socket
import ssl
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast
from urllib.parse import urlsplit

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import (
    MetadataError,
    MovedError,
    NoResponseError,
    RetryableError,
    error_of_response,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_metadata_server.client.failover import ServerEndpoint

T = TypeVar("T")

MAX_IDLE: Final = 32
"""Idle connections to one server."""
PROBE_SECONDS: Final = 1.0
"""Timeout of a readiness probe."""
MAX_RESPONSE_BYTES: Final = 256 << 20
READY: Final = "/readyz"
EMPTY: Final = msgspec.msgpack.encode({})


class PendingRequest(NamedTuple, Generic[T]):
    """A request as it is sent to each server in turn, with the type of its response."""

    path: str
    headers: Mapping[str, str]
    body: bytes | None
    response_type: type[T]
    scope: str = ""
    """The first scope that it names; empty for none."""


class HttpTransport:
    """Connection pool. Each request has a connection, and the thread of its caller.

    Without a context, `https://` servers are verified by the system's authorities.
    """

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._state = threading.Condition()
        self._idle: dict[str, list[_Connection]] = {}
        self._busy = set[_Connection]()
        self._closed = False

    def send(self, server: ServerEndpoint, pending: PendingRequest[T], seconds: float) -> T:
        """Send a request to a server and return its response.

        Raises:
            NoResponseError: no response within `seconds`.
            MovedError: another server owns the scopes.
            RetryableError: the connection failed, or the response is malformed.
            MetadataError: the server refuses, or the transport is closed.
        """
        if server.silent_since is None:
            server.silent_since = time.monotonic()
        try:
            response = self._exchange(server.url, p.ROUTES[pending.path].method, pending, seconds)
            server.silent_since = None
            return _decoded(pending, response)
        except TimeoutError as error:
            message = f"the metadata server {server.url} has not answered within {seconds:.3g} s"
            raise NoResponseError(message) from error
        except (http.client.HTTPException, OSError, ValueError) as error:
            # A ValueError is a malformed response.
            message = (
                f"the metadata server {server.url} does not answer: {type(error).__name__}: {error}"
            )
            raise RetryableError(message) from error

    def problem(self, server: ServerEndpoint) -> str:
        """Ask a server for the reason that it is not ready; empty if it is."""
        asked = PendingRequest(READY, {}, None, p.Problem)
        try:
            response = self._exchange(server.url, "GET", asked, PROBE_SECONDS)
            if response.status == 200:
                return ""
            return p.decode(response.body, p.Problem, response.content_type).message
        except (MetadataError, http.client.HTTPException, OSError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def close(self, seconds: float = 0.0) -> None:
        """Wait up to `seconds` for requests under way, and close all other connections.

        A request that is left ends with its attempt, and its connection with it.
        """
        with self._state:
            self._closed = True
            self._state.wait_for(lambda: not self._busy, seconds)
            for connections in self._idle.values():
                for connection in connections:
                    connection.end()
            self._idle.clear()

    def _exchange(
        self, url: str, method: str, pending: PendingRequest[Any], seconds: float
    ) -> _Response:
        connection, keep = self._take(url), False
        try:
            connection.until = time.monotonic() + seconds
            response, keep = connection.exchange(method, pending)
            return response
        finally:
            # Not kept after an interrupt either: the next request would get the rest of this
            # response.
            self._release(url, connection, keep=keep)

    def _take(self, url: str) -> _Connection:
        with self._state:
            if self._closed:
                raise MetadataError("the client of the metadata server is closed")
            idle = self._idle.setdefault(url, [])
            while idle:
                connection = idle.pop()
                if connection.is_quiet():
                    break
                # The server has closed it meanwhile.
                connection.end()
            else:
                if url.startswith("https:") and self._tls is None:
                    self._tls = ssl.create_default_context()
                connection = _Connection(url, self._tls)
            self._busy.add(connection)
        return connection

    def _release(self, url: str, connection: _Connection, *, keep: bool) -> None:
        with self._state:
            self._busy.remove(connection)
            if keep and not self._closed and len(self._idle[url]) < MAX_IDLE:
                self._idle[url].append(connection)
            else:
                connection.end()
            if self._closed:
                self._state.notify_all()


class _Response(NamedTuple):
    status: int
    content_type: str
    location: str
    body: bytes


class _Connection(http.client.HTTPConnection):
    """A connection all of whose waits end at one time, `until`.

    `http.client` bounds each wait for itself: a server that sends a byte now and then would keep
    a caller for ever.
    """

    def __init__(self, url: str, tls: ssl.SSLContext | None) -> None:
        parts = urlsplit(url)
        self._is_secure = parts.scheme == "https"
        port = parts.port or (443 if self._is_secure else 80)
        super().__init__(parts.hostname or "", port)
        self.until = 0.0
        self._prefix = parts.path
        self._tls = tls
        self._socket: socket.socket | None = None
        self._unsent = b""

    def exchange(self, method: str, pending: PendingRequest[Any]) -> tuple[_Response, bool]:
        """Send a request; return its response, and whether the connection can be used again.

        Raises:
            TimeoutError: there is none by `until`.
            OSError: the connection failed.
            http.client.HTTPException: what comes is no HTTP.
            ValueError: the response is too long.
        """
        if self._socket is None:
            self.connect()
        self.request(method, self._prefix + pending.path, pending.body, pending.headers)
        response = self.getresponse()
        # Bounded, because the address may be that of another program.
        if (response.length or 0) > MAX_RESPONSE_BYTES:
            raise ValueError(f"a response of {response.length} bytes")
        content = response.read(MAX_RESPONSE_BYTES)
        if response.length:
            raise http.client.IncompleteRead(content, response.length)
        if not response.isclosed() and response.read(1):
            raise ValueError(f"a response of more than {MAX_RESPONSE_BYTES} bytes")
        content_type = response.headers.get("Content-Type", "").partition(";")[0].strip()
        location = response.headers.get("Location", "")
        answer = _Response(response.status, content_type, location, content)
        return answer, not response.will_close

    def is_quiet(self) -> bool:
        """True if the server has neither sent anything nor closed the connection."""
        assert self._socket is not None, "it was used before"
        quiet = select.poll()
        quiet.register(self._socket, select.POLLIN)
        return not quiet.poll(0)

    def end(self) -> None:
        """Close the connection, whatever state it is in."""
        if self._socket is not None:
            self._socket.close()

    # Called by `http.client`.

    def connect(self) -> None:
        """Try each address of the server, with an equal part of the time."""
        opened = self._opened()
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._is_secure and self._tls is not None:
            opened.settimeout(self.left())
            self._socket = self._tls.wrap_socket(opened, server_hostname=self.host)
        self.sock = cast("socket.socket", self)

    def send(self, data: Any) -> None:
        """Keep what is to be sent: head and body go in one packet, which wakes the server once."""
        self._unsent += data

    def getresponse(self) -> http.client.HTTPResponse:
        """Send the request, and read the head of its response."""
        assert self._socket is not None, "it is connected"
        self._socket.settimeout(self.left())
        self._socket.sendall(self._unsent)
        self._unsent = b""
        return super().getresponse()

    def makefile(self, mode: str) -> io.BufferedReader:
        """A reader of one response."""
        return io.BufferedReader(_Reader(self))

    def close(self) -> None:
        """Nothing: `http.client` would close before the body of a last response is read."""

    def left(self) -> float:
        """Seconds until `until`.

        Raises:
            TimeoutError: there are none.
        """
        left = self.until - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def _opened(self) -> socket.socket:
        found = _addresses_of(self.host, self.port, self.left())
        for number, (family, kind, protocol, _, address) in enumerate(found, 1):
            self._socket = opened = socket.socket(family, kind, protocol)
            try:
                opened.settimeout(self.left() / (len(found) - number + 1))
                opened.connect(address)
                return opened
            except OSError:
                opened.close()
                if number == len(found):
                    raise
        raise OSError(errno.EADDRNOTAVAIL, f"{self.host} has no address")

    def receive(self, buffer: Any) -> int:
        """Receive some bytes into a buffer; 0 at the end."""
        assert self._socket is not None, "it is connected"
        self._socket.settimeout(self.left())
        return self._socket.recv_into(buffer)


class _Reader(io.RawIOBase):
    def __init__(self, connection: _Connection) -> None:
        self._connection = connection

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._connection.receive(buffer)


def _addresses_of(host: str, port: int, seconds: float) -> list[Any]:
    """Look up a name, in a daemon thread: a lookup can neither be bounded nor be cancelled."""
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    with contextlib.suppress(socket.gaierror):
        return lookup(flags=socket.AI_NUMERICHOST)
    found = Future[list[Any]]()

    def run() -> None:
        try:
            found.set_result(lookup())
        except Exception as error:  # noqa: BLE001 - raised in the waiting thread
            found.set_exception(error)

    try:
        threading.Thread(target=run, name="hicache-name-lookup", daemon=True).start()
    except RuntimeError as error:
        raise OSError(errno.EAGAIN, str(error)) from error
    return found.result(seconds)


def _decoded(pending: PendingRequest[T], response: _Response) -> T:
    """Decode a response, or raise its refusal; ValueError if it is malformed."""
    status, content_type, location, body = response
    if status == 307:
        # The same path: a request must not be sent to another route.
        if not location.endswith(pending.path):
            raise ValueError(f"a redirection to {location!r}")
        message = f"another metadata server owns the scopes: {location}"
        raise MovedError(message, location.removesuffix(pending.path))
    if status >= 400:
        try:
            problem = p.decode(body, p.Problem, content_type)
        except ValueError:
            message = f"a response of {len(body)} bytes that is no metadata server's"
            problem = p.Problem(code="unreadable", message=message)
        raise error_of_response(status, problem.code, problem.message)
    if status == 204:
        # Callers of routes without a response body do not use the decoded value.
        return p.decode(EMPTY, pending.response_type, p.MSGPACK)
    if status != 200:
        raise ValueError(f"status {status}")
    return p.decode(body, pending.response_type, content_type)


def client_context(*, ca: str = "", certificate: str = "", key: str = "") -> ssl.SSLContext:
    """Create the TLS context of a client: TLS 1.2 at least, and a verified server name.

    All are PEM files: of the trusted authorities, "" for the system's; of the client's own
    certificate; and of its key, "" if the certificate's file has that.

    Raises:
        ValueError: a file cannot be read, or has other contents; the message names it.
    """
    if key and not certificate:
        raise ValueError("a key needs its certificate")
    file = ca
    try:
        context = ssl.create_default_context(cafile=ca or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        if certificate:
            file = certificate
            # Without a callback, OpenSSL asks for the password of an encrypted key on the terminal.
            context.load_cert_chain(certificate, key or None, _no_password)
    except ssl.SSLError as error:
        raise ValueError(f"{file} cannot be used for TLS: {error.reason or error}") from error
    except OSError as error:
        raise ValueError(
            f"{file or 'the key'} cannot be read: {error.strerror or error}"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")
