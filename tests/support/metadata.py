"""A metadata server as a process of its own, and a client that sends it any request over HTTP."""

from __future__ import annotations

import http.client
import shlex
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from hicache_conformance.injectors.servers import Servers
from hicache_conformance.model.case import Inconclusive
from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    import ssl
    import subprocess
    from collections.abc import Iterator, Mapping, Sequence


class Unanswered(AssertionError):
    """A request has no answer."""


class Refused(AssertionError):
    """An answer has another status than 200."""


class ServerProcess(Servers):
    """One server of a test's own, whose command has the place {port:server}."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__([command])
        self.port = self.ports["server"]

    @property
    def process(self) -> subprocess.Popen[bytes]:
        return self._processes[0]

    def start(self) -> None:
        """Start it, and wait until it listens."""
        try:
            super().start()
        except Inconclusive as failed:
            # Which pytest takes for a skipped test.
            raise AssertionError(str(failed)) from None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let it answer nothing until the end of a block."""
        self.suspend()
        try:
            yield
        finally:
            self.resume()

    def log(self) -> str:
        """Its output."""
        return self._log(0).read_text("utf-8", "replace")

    def __enter__(self) -> Self:
        try:
            self.start()
        except AssertionError:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self.close()


class Served(ServerProcess):
    """A server, from a command with {port} and, for what it keeps over restarts, {tmp}."""

    def __init__(self, command: str) -> None:
        super().__init__(shlex.split(command.replace("{port}", "{port:server}")))
        self.url = f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Reply:
    """An answer as it came."""

    status: int
    body: bytes


@dataclass(frozen=True)
class HttpClient:
    """Requests of one client, each on a connection of its own.

    A redirection to another server that serves the same route is followed.
    """

    url: str
    token: str = ""
    tls: ssl.SSLContext | None = None
    answer_seconds: float = 60.0

    def get(self, path: str) -> Reply:
        return self.send("GET", path, None)

    def post(
        self, path: str, message: object, *, headers: Mapping[str, str] | None = None
    ) -> Reply:
        return self.send("POST", path, p.encode(message), headers=headers)

    def call(self, path: str, request: p.Request | None, kind: type[Any]) -> Any:
        """Make a request to the native part; returns its answer."""
        body = None if request is None else p.encode(request)
        reply = self.send(p.ROUTES[path].method, path, body)
        if reply.status != 200:
            raise Refused(f"{path} of {request} is answered with {reply}")
        return p.decode(reply.body, kind)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send any bytes."""
        full = {"Content-Type": p.JSON, **(headers or {})}
        if self.token:
            full["Authorization"] = f"Bearer {self.token}"
        address, seconds = urlsplit(self.url).netloc, self.answer_seconds
        connection = (
            http.client.HTTPSConnection(address, timeout=seconds, context=self.tls)
            if self.tls
            else http.client.HTTPConnection(address, timeout=seconds)
        )
        with closing(connection):
            try:
                connection.request(method, path, body, full)
                response = connection.getresponse()
                reply = Reply(response.status, response.read())
            except (OSError, http.client.HTTPException) as error:
                raise Unanswered(f"{method} {path} has no answer: {error!r}") from error
        location = response.headers.get("Location", "")
        if reply.status == 307 and location.endswith(path):
            owner = HttpClient(
                location.removesuffix(path), self.token, self.tls, self.answer_seconds
            )
            return owner.send(method, path, body, headers=headers)
        return reply
