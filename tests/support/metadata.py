"""A metadata server as a process of its own, and a client that sends it any request over HTTP."""

from __future__ import annotations

import http.client
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from hicache_conformance.harness.ports import accepts, free_ports
from hicache_conformance.injectors.servers import stand_still
from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    import random
    import ssl
    from collections.abc import Iterator, Mapping, Sequence

START_SECONDS = 180.0
IDLE_SECONDS = 1.0
"""A connection that has rested longer is not used again: the server may be closing it just now."""
MOVING_SECONDS = 0.2
"""Interval in which a request for scopes without an owner is sent again."""


class CannotStartError(AssertionError):
    """The server does not come up."""


class Unanswered(AssertionError):
    """A request has no answer."""


class Refused(AssertionError):
    """An answer has another status than 200."""


class Served:
    """A server, from a command with {port} and, for what it keeps over restarts, {tmp}."""

    def __init__(self, command: str) -> None:
        self.command = command
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._home = Path(tempfile.mkdtemp(prefix="hicache-metadata-"))
        self.state = self._home / "state"
        self.state.mkdir()
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        """Start it, and wait until it listens."""
        words = [
            word.replace("{port}", str(self.port)).replace("{tmp}", str(self.state))
            for word in shlex.split(self.command)
        ]
        with (self._home / "log").open("ab") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        until = time.monotonic() + START_SECONDS
        while not accepts(self.port):
            if self.process.poll() is not None or time.monotonic() > until:
                self.kill()
                raise CannotStartError(f"the server does not come up: {self.log()[-1000:]}")
            time.sleep(0.02)

    def kill(self) -> None:
        """Kill -9, whatever it is doing."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                # The group: the command may be a shell.
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let it answer nothing until the end of a block."""
        os.killpg(self.process.pid, signal.SIGSTOP)
        stand_still(self.process.pid)
        try:
            yield
        finally:
            os.killpg(self.process.pid, signal.SIGCONT)

    def log(self) -> str:
        """Its output."""
        return (self._home / "log").read_text("utf-8", "replace")

    def __enter__(self) -> Self:
        try:
            self.start()
        except CannotStartError:
            shutil.rmtree(self._home)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        shutil.rmtree(self._home)


@dataclass(frozen=True)
class Reply:
    """An answer as it came."""

    status: int
    content_type: str
    body: bytes


class HttpClient:
    """Requests of one client; each thread has a connection of its own.

    A redirection to another server that serves the same route is followed.
    """

    def __init__(
        self,
        url: str,
        token: str = "",
        answer_seconds: float = 20.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._address, self._tls = urlsplit(url).netloc, tls
        self.token = token
        self.answer_seconds = answer_seconds
        self._local = threading.local()
        self._open = list[http.client.HTTPConnection]()

    def get(self, path: str) -> Reply:
        return self.send("GET", path, None)

    def post(
        self, path: str, message: object, *, headers: Mapping[str, str] | None = None
    ) -> Reply:
        return self.send("POST", path, p.encode(message), headers=headers)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        content_type: str = p.JSON,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send any bytes."""
        full = {"Content-Type": content_type, **(headers or {})}
        if self.token:
            full.setdefault("Authorization", f"Bearer {self.token}")
        connection = self._connection()
        try:
            connection.request(method, path, body, full)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.drop()
            raise Unanswered(f"{method} {path} has no answer: {error!r}") from error
        self._local.used = time.monotonic()
        if response.will_close or response.status >= 500 or response.status == 413:
            self.drop()
        location = response.headers.get("Location", "")
        if response.status == 307 and location.endswith(path):
            with self.other(location.removesuffix(path)) as owner:
                return owner.send(method, path, body, content_type=content_type, headers=headers)
        return Reply(response.status, response.headers.get_content_type(), content)

    @contextmanager
    def other(self, url: str) -> Iterator[HttpClient]:
        """The same client, at another server."""
        client = HttpClient(url, self.token, self.answer_seconds, self._tls)
        try:
            yield client
        finally:
            client.close()

    def drop(self) -> None:
        """Close this thread's connection; the next request opens another."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection.close()
            self._open.remove(connection)
            self._local.connection = None

    def close(self) -> None:
        """Close the connections of all threads, none of which is sending any more."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._local = threading.local()

    def _connection(self) -> http.client.HTTPConnection:
        if time.monotonic() - getattr(self._local, "used", 0.0) > IDLE_SECONDS:
            self.drop()
        if getattr(self._local, "connection", None) is None:
            seconds = self.answer_seconds
            connection = (
                http.client.HTTPSConnection(self._address, timeout=seconds, context=self._tls)
                if self._tls
                else http.client.HTTPConnection(self._address, timeout=seconds)
            )
            self._local.connection = connection
            self._open.append(connection)
        return self._local.connection


@dataclass(frozen=True)
class V2Client:
    """Typed calls of the native part.

    A request is sent again while one of several servers answers that its scopes have no owner at
    the moment, for as long as an answer may take.
    """

    http: HttpClient

    def send(self, path: str, request: p.Request | None = None) -> Reply:
        body = None if request is None else p.encode(request)
        until = time.monotonic() + self.http.answer_seconds
        while True:
            reply = self.http.send(p.ROUTES[path].method, path, body)
            moving = reply.status == 503 and b"moving" in reply.body
            if not moving or time.monotonic() >= until:
                return reply
            time.sleep(MOVING_SECONDS)

    def call(self, path: str, request: p.Request | None, kind: type[Any]) -> Any:
        reply = self.send(path, request)
        if reply.status != 200:
            raise Refused(f"{path} of {request} is answered with {reply}")
        return p.decode(reply.body, kind)


@dataclass(frozen=True)
class Written:
    """A page as it was committed."""

    key: str
    slot: int
    generation: int
    lease: int
    length: int
    checksum: int


@dataclass
class V2Scope:
    """One scope, by the native part."""

    client: V2Client
    name: str
    slots: int
    slot_bytes: int
    chance: random.Random

    def initialize(self) -> bool:
        """Make the scope; returns whether it is new."""
        part = p.ScopeGeometry(
            scope=self.name,
            slots=self.slots,
            slot_bytes=self.slot_bytes,
            geometry="page_first",
            identity="cf-identity",
        )
        request = p.Initialize(scopes=[part])
        return self.client.call("/v2/initialize", request, p.Initialized).created[0]

    def lookup(self, keys: Sequence[str]) -> p.FoundPages:
        part = p.LookupScope(scope=self.name, keys=list(keys))
        return self.client.call("/v2/lookup", p.Lookup(scopes=[part]), p.LookedUp).scopes[0]

    def reserve(self, keys: Sequence[str], prefixes: Sequence[str] = ()) -> p.Leased:
        part = p.ReserveScope(scope=self.name, keys=list(keys), prefixes=list(prefixes))
        request = p.Reserve(scopes=[part], owner="conformance")
        return self.client.call("/v2/reserve", request, p.Leases).scopes[0]

    def commit(
        self, leases: Sequence[int], lengths: Sequence[int] = (), checksums: Sequence[int] = ()
    ) -> list[bool]:
        part = p.CommitScope(
            scope=self.name,
            leases=list(leases),
            lengths=list(lengths) or [self.slot_bytes] * len(leases),
            checksums=list(checksums) or [1] * len(leases),
        )
        answer = self.client.call("/v2/commit", p.Commit(scopes=[part]), p.SettledLeases)
        return [state is p.Settled.DONE for state in answer.scopes[0].states]

    def delete(self, keys: Sequence[str]) -> list[bool]:
        part = p.DeleteScope(scope=self.name, keys=list(keys))
        return self.client.call("/v2/delete", p.Delete(scopes=[part]), p.Marked).scopes[0].done

    def store(self, keys: Sequence[str], prefixes: Sequence[str] = ()) -> list[Written]:
        """Lease and commit new keys, with lengths and checksums of their own."""
        leased = self.reserve(keys, prefixes)
        assert set(leased.states) <= {p.Reserved.LEASED}, leased
        pages = [
            Written(*columns, self.chance.randint(1, self.slot_bytes), self.chance.getrandbits(64))
            for columns in zip(keys, leased.slots, leased.generations, leased.leases, strict=True)
        ]
        assert all(
            self.commit(
                leased.leases, [page.length for page in pages], [page.checksum for page in pages]
            )
        )
        return pages
