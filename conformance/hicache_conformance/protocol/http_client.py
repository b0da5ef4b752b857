"""HTTP to the server under test: any body, any header, and a deadline for each answer."""

from __future__ import annotations

import http.client
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from hicache_conformance.model.violation import Violation
from hicache_metadata_server.protocol import JSON, encode

if TYPE_CHECKING:
    from collections.abc import Mapping

ANSWER_SECONDS: Final = 20.0
IDLE_SECONDS: Final = 1.0
"""A connection that has rested longer is not used again: the server may be closing it just now."""
MOVED: Final = 307
MAX_REDIRECTS: Final = 5
SHOWN: Final = 200


class Unanswered(Violation):
    """The server took a request and gave no answer, or cannot be reached any more."""

    def __init__(self, message: str) -> None:
        super().__init__("MD-HTTP-1", message)


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came."""

    asked: str
    """Method, path and the beginning of the body that it answers."""
    status: int
    content_type: str
    body: bytes

    @property
    def is_json(self) -> bool:
        """Return whether it calls itself JSON and is."""
        try:
            msgspec.json.decode(self.body)
        except (msgspec.DecodeError, UnicodeError):
            return False
        return self.content_type == JSON

    def __str__(self) -> str:
        return f"{self.asked} -> {self.status} {_shown(self.body)}".rstrip()


class HttpClient:
    """Requests of one client; each thread has a connection of its own.

    A redirection to another server that serves the same route is followed.
    """

    def __init__(self, url: str, token: str = "", answer_seconds: float = ANSWER_SECONDS) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no http or https address")
        self._secure = parts.scheme == "https"
        self._host = parts.hostname
        self._port = parts.port
        self._base = parts.path.rstrip("/")
        self.token = token
        self.answer_seconds = answer_seconds
        # `http.client` connections serve one request at a time. One for each thread lets the
        # threads of a case overlap, as several engines do.
        self._local = threading.local()
        self._open: list[http.client.HTTPConnection] = []
        self._owners: dict[str, HttpClient] = {}
        """Clients of the servers to which this one has sent requests, by address."""

    def get(self, path: str) -> Reply:
        """Fetch something."""
        return self.send("GET", path, None)

    def post(
        self, path: str, message: object, *, headers: Mapping[str, str] | None = None
    ) -> Reply:
        """Send a message as JSON."""
        return self.send("POST", path, encode(message), headers=headers)

    def send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        *,
        content_type: str = JSON,
        headers: Mapping[str, str] | None = None,
        redirects: int = MAX_REDIRECTS,
    ) -> Reply:
        """Send any bytes.

        Raises:
            Unanswered: no answer came within the deadline.
        """
        asked = f"{method} {path} {_shown(body or b'')}".rstrip()
        full = {"Content-Type": content_type, **(headers or {})}
        if self.token:
            # Set only if the case gives none, because the cases of tokens send wrong ones.
            full.setdefault("Authorization", f"Bearer {self.token}")
        connection = self._connection()
        try:
            # Not retried: a case that repeats a request does so to see what the second one does.
            connection.request(method, self._base + path, body, full)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            self.drop()
            raise Unanswered(f"{asked} has no answer: {type(error).__name__} {error}") from error
        self._local.used = time.monotonic()
        if response.will_close or response.status >= 500 or response.status == 413:
            # After these servers close the connection, and not all of them say so.
            self.drop()
        location = response.headers.get("Location", "")
        if response.status == MOVED and redirects and location.endswith(path):
            owner = self._owner(location.removesuffix(path))
            return owner.send(
                method,
                path,
                body,
                content_type=content_type,
                headers=headers,
                redirects=redirects - 1,
            )
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return Reply(asked, response.status, kind, content)

    def drop(self) -> None:
        """Close this thread's connection; the next request opens another."""
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
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
        for owner in self._owners.values():
            owner.close()

    def _owner(self, url: str) -> HttpClient:
        if url not in self._owners:
            self._owners[url] = HttpClient(url, self.token, self.answer_seconds)
        return self._owners[url]

    def _connection(self) -> http.client.HTTPConnection:
        if time.monotonic() - getattr(self._local, "used", 0.0) > IDLE_SECONDS:
            self.drop()
        connection: http.client.HTTPConnection | None = getattr(self._local, "connection", None)
        if connection is None:
            kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
            connection = kind(self._host, self._port, timeout=self.answer_seconds)
            self._local.connection = connection
            self._open.append(connection)
        return connection


def expect(reply: Reply, rule: str, *statuses: int, because: str = "") -> Reply:
    """Take a reply of one of these statuses.

    Raises:
        Violation: it has another.
    """
    if reply.status not in statuses:
        wanted = " or ".join(map(str, statuses))
        raise Violation(rule, f"{because + ': ' if because else ''}{reply}; expected {wanted}")
    return reply


def refused(reply: Reply, rule: str, because: str, *, names: str = "") -> None:
    """Check that a request was refused as the client's mistake, in JSON.

    The answer names the field where one is given.

    Raises:
        Violation: it was accepted, broke the server, or was refused without saying why.
    """
    # A status of 5xx is told apart from an acceptance: clients take it for a passing fault and try
    # again (MD-REQ-1).
    if not 400 <= reply.status < 500:
        what = "accepted" if reply.status < 400 else "taken for a fault of the server"
        raise Violation(rule, f"{because} is {what}: {reply}")
    if not reply.is_json:
        raise Violation(
            rule,
            f"{because} is refused without a body of {JSON}: {reply} "
            f"({reply.content_type or 'no content type'})",
        )
    # Anywhere in the body, because the compatible part prescribes no field for it.
    if names and names not in reply.body.decode("utf-8", "replace"):
        raise Violation(rule, f"{because} is refused without naming {names!r}: {reply}")


def record(reply: Reply, rule: str) -> dict[str, Any]:
    """The body of a reply as a JSON object.

    Raises:
        Violation: it is none.
    """
    try:
        return msgspec.json.decode(reply.body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError) as error:
        raise Violation(rule, f"{reply} is no JSON object: {error}") from error


def _shown(body: bytes) -> str:
    text = body[: SHOWN + 1].decode("utf-8", "replace")
    return text if len(body) <= SHOWN else f"{text[:SHOWN]}... ({len(body)} bytes)"
