"""The reference server over HTTP, in memory and a journal.

`python -m tests.conformance.metadata.reference_server --port 18000 --journal FILE` serves it. Every
request that changes anything stands in the journal, with its time, before it is answered; a start
replays the journal, so that all that was answered is as it was.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hicache_metadata_server import protocol as p
from tests.conformance.metadata.reference import Refused

if TYPE_CHECKING:
    from tests.conformance.metadata.reference import Reference


class Handlers:
    """From a path and a body to a status and a message: limits, idempotency keys, the journal."""

    def __init__(self, reference: Reference, journal: Path | None = None) -> None:
        self.reference = reference
        self.lock = threading.Lock()
        self.journal = None
        if journal:
            for line in journal.read_text().splitlines() if journal.exists() else []:
                now, *call = json.loads(line)
                self.execute(now, *call)
            self.journal = journal.open("a", buffering=1)

    def call(self, path: str, body: Any, once: str) -> tuple[int, Any]:
        """Do what a request asks for, and write it down first."""
        with self.lock:
            now = time.time()
            if self.journal:
                self.journal.write(msgspec.json.encode([now, path, body, once]).decode() + "\n")
            return self.execute(now, path, body, once)

    def execute(self, now: float, path: str, body: Any, once: str) -> tuple[int, Any]:
        try:
            run, request = self.meaning(path, body)
            self.reference.check_limits(request)
            if not once:
                return self.perform(run, request, now)
            said = msgspec.json.encode((path, body), order="deterministic")
            until, before, answer = self.reference.kept.get(once, (0.0, b"", None))
            if until <= now:
                answer = self.perform(run, request, now)
                self.remember(once, now + self.reference.limits.idempotency_seconds, said, answer)
            elif before != said:
                raise Refused(
                    422,
                    "key_reused",
                    "this idempotency key belongs to another request",
                    p.IDEMPOTENCY_HEADER,
                )
        except Refused as refused:
            return refused.status, refused.problem
        return answer

    def perform(self, run: Any, request: Any, now: float) -> tuple[int, Any]:
        answer = run(request, now)
        return (204, None) if answer is None else (200, answer)

    def remember(self, once: str, until: float, said: bytes, answer: tuple[int, Any]) -> None:
        self.reference.kept[once] = (until, said, answer)

    def meaning(self, path: str, body: Any) -> tuple[Any, Any]:
        """What to run, and its typed request."""
        reference = self.reference
        if path in p.ROUTES:
            route = p.ROUTES[path]
            if route.method == "GET":
                return (lambda _, now: reference.list_scopes(now)) if path == "/v2/scopes" else (
                    lambda *_: self.about()
                ), None
            return getattr(reference, path.rpartition("/")[2]), convert(body, route.request)
        match = re.fullmatch(r"/([^/]+)/([a-z_]+)", path)
        if not match or match[2] not in p.SGLANG_ROUTES:
            raise Refused(404, "unknown_route", f"there is no {path}")
        if not re.fullmatch(r"[0-9]{1,9}", match[1]):
            raise Refused(422, "invalid", f"a rank is a natural number, not {match[1]!r}", "rank")
        kind = p.SGLANG_ROUTES[match[2]][0]
        return (
            lambda request, now: reference.compatible(int(match[1]), match[2], request, now)
        ), convert(body, kind)

    def about(self) -> p.About:
        reference = self.reference
        return p.About(
            protocol=p.PROTOCOL,
            server="reference 1",
            instance=reference.instance,
            durability=reference.durability,
            limits=reference.limits,
        )


def convert(body: Any, kind: Any) -> Any:
    """A request of that type, or a refusal that names the field."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$")
        missing = re.search(r"(?:field|required field) `(\w+)`", message)
        where = ".".join(
            filter(None, [place.strip("`.").replace("[...]", ""), missing[1] if missing else ""])
        )
        raise Refused(422, "invalid", str(error), where) from error


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: ReferenceServer

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.path in ("/healthz", "/readyz"):
            self.say(
                503 if self.path == "/readyz" and self.server.handlers.reference.draining else 200,
                {"status": "ok"},
            )
        elif self.path == "/metrics":
            self.guarded(lambda: (200, self.metrics()))
        else:
            self.guarded(lambda: self.server.handlers.call(self.path, None, ""))

    def do_POST(self) -> None:
        self.guarded(self.posted)

    def posted(self) -> tuple[int, Any]:
        length = int(self.headers.get("Content-Length") or 0)
        if length > self.server.handlers.reference.limits.body_bytes:
            self.close_connection = True
            raise Refused(413, "too_large", f"a body of {length} bytes", "body")
        raw, native = self.rfile.read(length), self.path.startswith("/v2")
        try:
            if self.content_type() not in ((p.JSON, p.MSGPACK) if native else (p.JSON,)):
                raise Refused(415, "media_type", f"{p.JSON} or {p.MSGPACK}", "Content-Type")
            body = p.decode(raw, Any, self.content_type() if native else p.JSON)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise Refused(400, "malformed", f"the body cannot be read: {error}", "body") from error
        once = self.headers.get(p.IDEMPOTENCY_HEADER, "")
        return self.server.handlers.call(
            self.path, body, once if self.path in p.ROUTES and p.ROUTES[self.path].changes else ""
        )

    def guarded(self, act: Any) -> None:
        try:
            if not self.may():
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                have = self.server.tokens.get(self.bearer())
                raise Refused(
                    *((403, "forbidden") if have else (401, "unauthorized")),
                    "this token does not permit that",
                    "Authorization",
                )
            if not self.server.tokens and (field := self.foreign()):
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                raise Refused(
                    403, "forbidden", "a page of another site has sent this, or may have", field
                )
            self.say(*act())
        except Refused as refused:
            self.say(refused.status, refused.problem)

    def foreign(self) -> str:
        """The header that tells that a page of another site has sent a request, or may have.

        Empty for none.
        """
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        if self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            return "Sec-Fetch-Site"
        if origin is not None and origin.partition("://")[2] != host:
            return "Origin"
        return "" if host.partition(":")[0] in ("127.0.0.1", "localhost", "") else "Host"

    def may(self) -> bool:
        if not self.server.tokens:
            return True
        needed = (
            p.ROUTES[self.path].token
            if self.path in p.ROUTES
            else p.SGLANG_ROUTES.get(self.path.rpartition("/")[2], (None, p.Token.READ))[1]
        )
        order = list(p.Token)
        return order.index(self.server.tokens.get(self.bearer(), p.Token.NONE)) >= order.index(
            needed
        )

    def bearer(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def content_type(self) -> str:
        return self.headers.get("Content-Type", p.JSON).partition(";")[0].strip().lower()

    def metrics(self) -> str:
        lines = ["# TYPE hicache_metadata_slots gauge"]
        for scope in self.server.handlers.call("/v2/scopes", None, "")[1].scopes:
            lines += [
                f'hicache_metadata_slots{{scope="{scope.scope}",state="{state}"}} '
                f"{getattr(scope, state)}"
                for state in p.SlotState
            ]
        return "\n".join(lines) + "\n"

    def say(self, status: int, message: Any) -> None:
        kind = (
            p.MSGPACK
            if self.content_type() == p.MSGPACK and self.path.startswith("/v2")
            else p.JSON
        )
        text = isinstance(message, str)
        body = b"" if message is None else message.encode() if text else p.encode(message, kind)
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; version=0.0.4" if text else kind)
        self.send_header("Content-Length", str(len(body)))
        self._headers_buffer.append(b"\r\n" + body)
        self.flush_headers()


class ReferenceServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        handlers: Handlers,
        port: int = 0,
        tokens: dict[str, p.Token] | None = None,
        handler: type[Handler] = Handler,
    ) -> None:
        self.handlers = handlers
        self.tokens = tokens or {}
        super().__init__(("127.0.0.1", port), handler)

    def handle_error(self, *_: Any) -> None:
        """A client that goes away is no error."""


def serve(arguments: list[str]) -> None:
    """Run one until it is killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--journal", type=Path)
    parser.add_argument("--fault", default="", help="one of those in faulty.py")
    options = parser.parse_args(arguments)
    from tests.conformance.metadata.faulty import server

    durability = p.StoreDurability.PROCESS if options.journal else p.StoreDurability.NONE
    server(
        options.fault, port=options.port, journal=options.journal, durability=durability
    ).serve_forever()


if __name__ == "__main__":
    serve(sys.argv[1:])
