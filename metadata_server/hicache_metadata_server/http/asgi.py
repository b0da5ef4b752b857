"""The protocol's routes as one ASGI application in front of the pages: no routing table, no models,
no middleware on the way."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.audit_log import Entry, about, peer_of
from hicache_metadata_server.core.errors import RefusedError, too_large
from hicache_metadata_server.dashboard.assets import is_page
from hicache_metadata_server.http.handlers import Endpoint, Request, Said, Started, refusal
from hicache_metadata_server.protocol.history import PATH as PATH_OF_HISTORY
from hicache_metadata_server.storage.store import StoreError
from hicache_storage.observability.request_ids import HEADER, adopt

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from hicache_metadata_server.core.tenants import Caller
    from hicache_metadata_server.http.request_log import Watched
    from hicache_metadata_server.http.runtime import Server

REQUEST_ID: Final = HEADER.lower().encode()
HEALTH: Final = ("/healthz", "/readyz")
PAGES: Final = ("/openapi.json", "/metrics", PATH_OF_HISTORY)
"""The other paths of the application behind; they take a read token."""
OPEN_PAGES: Final = ("/openapi.json",)
"""Those that say nothing about scopes. The others tell of those of all tenants, so that a token of
one does not open them."""
LOOKS: Final = ("GET", "HEAD")

UNAUTHORIZED: Final = (401, 403)
TOO_LARGE: Final = 413
READ_AT_ONCE: Final = 256 << 10
"""Longer bodies are read in turn; this one takes a few milliseconds at most, whatever is in it."""
OTHER: Final = "other"
"""What unknown paths are called in metrics and logs."""

_log = structlog.get_logger()


class _GoneError(Exception):
    """The client closed the connection before its request was whole."""


class Asked(NamedTuple):
    """What a request's head says."""

    endpoint: Endpoint
    content_type: str
    answer_type: str
    once: str
    """Its idempotency key, or empty."""
    caller: Caller
    entry: Entry | None
    """For the audit log, of a request that is written there."""
    request_id: str
    """The client's, or a new one; answers and log lines have it."""
    watched: Watched | None


class Front:
    """Answers the protocol's requests; health and pages go on to the application behind."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self.server = app, server
        self._desk, self._metrics, self._watch = server.desk, server.metrics, server.watch
        self._tokens, self._rates, self._audit = (
            server.security.tokens,
            server.security.rates,
            server.security.audit,
        )
        self._check_browser = server.security.check_browser
        self._recorder, self._slowest = server.recorder, server.recorder.slowest
        self._reading = asyncio.Lock()
        self.max_body = server.service.limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if (
            scope["type"] != "http"
            or scope["path"] in HEALTH
            or (is_page(scope["path"]) and scope["method"] in LOOKS)
        ):
            await self._app(scope, receive, send)
            return
        headers = dict[bytes, bytes](scope["headers"])
        request_id = adopt(headers.get(REQUEST_ID))
        headers[REQUEST_ID] = request_id.encode()
        begin, asked, path, body = time.perf_counter(), None, scope["path"], b""
        try:
            if path in PAGES and scope["method"] in LOOKS:
                self._check_page(path, headers)
                await self._app(scope, receive, send)
                return
            asked = self.asked(path, scope["method"], headers)
            body = await self._body(receive, headers)
            begin = time.perf_counter()
            said = await self.ended(asked, self.start(asked, body))
        except RefusedError as refused:
            said = refusal(refused, content_types(path, headers)[1])
            if asked is None and said.status in UNAUTHORIZED:
                caller = self._tokens.whose(headers.get(b"authorization", b""))
                self._audit.refused(
                    self._route(path),
                    said.status,
                    refused.problem.code,
                    caller,
                    peer_of(scope["client"]),
                )
        except _GoneError:
            return
        self.count(asked, said, begin, scope["client"], body)
        await _send(send, said, request_id)

    def _route(self, path: str) -> str:
        """A path as it may be written down: one that is unknown may have anything in it, a token as
        well."""
        try:
            return path if path in PAGES else self._desk.endpoint(path).name
        except RefusedError:
            return OTHER

    def _check_page(self, path: str, headers: dict[bytes, bytes]) -> None:
        self._check_browser(headers)
        caller = self._tokens.check(headers.get(b"authorization", b""), p.Token.READ)
        if caller.tenant and path not in OPEN_PAGES:
            message = f"{path} tells of all tenants, and needs a token without one"
            raise RefusedError(403, "forbidden", message, "Authorization")

    # The steps of an answer, for whoever goes them without a task.

    def asked(self, path: str, method: str, headers: dict[bytes, bytes]) -> Asked:
        """What a request's head says.

        Raises:
            RefusedError: nobody answers that, or not for this token.
        """
        request_id, authorization = (
            adopt(headers.get(REQUEST_ID)),
            headers.get(b"authorization", b""),
        )
        self._check_browser(headers)
        try:
            endpoint = self._desk.endpoint(path)
        except RefusedError:
            self._tokens.check(authorization, p.Token.READ)
            raise
        caller = self._tokens.check(authorization, endpoint.token)
        if endpoint.method != method:
            raise RefusedError(
                404, "unknown_route", f"{endpoint.name} takes {endpoint.method}, not {method}"
            )
        self._rates.admit(caller, endpoint.name)
        content_type, answer_type = content_types(path, headers)
        once = headers.get(b"idempotency-key", b"").decode("latin-1")
        watched = (
            self._watch.begin(method, endpoint.name, request_id, headers)
            if self._watch is not None
            else None
        )
        entry = Entry() if endpoint.audited else None
        return Asked(endpoint, content_type, answer_type, once, caller, entry, request_id, watched)

    def start(self, asked: Asked, body: bytes) -> Started | Coroutine[Any, Any, Said]:
        """Do it, or return what does it in turn with others, and has to be awaited."""
        return self._in_turn(asked, body) if len(body) > READ_AT_ONCE else self._begin(asked, body)

    async def _in_turn(self, asked: Asked, body: bytes) -> Said:
        """Read a long body: one in each turn of the event loop, however many have come, so that
        nobody waits for several."""
        async with self._reading:
            started = self._begin(asked, body)
            await asyncio.sleep(0)
        return await self.ended(asked, started)

    async def ended(self, asked: Asked, started: Started | Coroutine[Any, Any, Said]) -> Said:
        """The answer, when all is done and written."""
        if not isinstance(started, Started):
            return await started
        written = self.join() if started.changes else None
        try:
            if written is not None:
                await written
        except StoreError as error:
            return self.unwritten(asked, error)
        return started.said

    def _begin(self, asked: Asked, body: bytes) -> Started | Coroutine[Any, Any, Said]:
        try:
            request = self._desk.read(
                asked.endpoint, body, asked.content_type, asked.once, asked.caller
            )
            if asked.watched is not None:
                asked.watched.message = request.message
            if asked.entry is not None:
                asked.entry.about = about(request.message, self._desk.names(request))
            return self._desk.start(request) or self._in_turns(asked, request)
        except RefusedError as refused:
            return Started(refusal(refused, asked.answer_type), False)
        except Exception:  # noqa: BLE001 - a fault of ours must not take the connection, and its trace belongs into the log
            return Started(self._fault(asked), asked.endpoint.changes)

    async def _in_turns(self, asked: Asked, request: Request) -> Said:
        """Do what the desk has not done at once."""
        try:
            return await self._desk.in_turns(request)
        except RefusedError as refused:
            return refusal(refused, asked.answer_type)
        except StoreError as error:
            return self.unwritten(asked, error)
        except Exception:  # noqa: BLE001 - as above
            return self._fault(asked)

    def join(self) -> asyncio.Future[None] | None:
        """Done when all changes are written; None if nothing is."""
        return self._desk.join()

    def unwritten(self, asked: Asked, error: BaseException) -> Said:
        """The answer where they could not be."""
        return refusal(RefusedError(503, "unavailable", str(error)), asked.answer_type)

    def count(
        self,
        asked: Asked | None,
        said: Said,
        begin: float,
        client: Sequence[Any] | None,
        body: bytes | bytearray,
    ) -> None:
        """See to the metrics, to the slowest calls, to the audit log, and to what is to be seen of
        a single request."""
        if asked is not None and (asked.entry is not None or said.status in UNAUTHORIZED):
            self._write_down(asked, said, peer_of(client))
        seconds, route = time.perf_counter() - begin, asked.endpoint.name if asked else OTHER
        self._metrics.answered(route, said.status, seconds)
        if asked is not None and seconds > self._slowest.floor:
            # What is refused for its size may be too much to be read.
            self._recorder.add(
                route,
                said.status,
                seconds,
                asked.request_id,
                b"" if said.status == TOO_LARGE else bytes(body),
                asked.content_type,
            )
        if asked is not None and asked.watched is not None and self._watch is not None:
            self._watch.end(asked.watched, route, said.status, seconds)

    def _write_down(self, asked: Asked, said: Said, peer: str) -> None:
        name, caller = asked.endpoint.name, asked.caller
        if said.status in UNAUTHORIZED:
            code = p.decode(said.body, p.Problem, said.content_type).code
            self._audit.refused(name, said.status, code, caller, peer)
        elif asked.entry is not None:
            self._audit.request(name, said.status, caller, peer, asked.entry.about)

    def _fault(self, asked: Asked) -> Said:
        _log.exception("request_failed", route=asked.endpoint.name, request_id=asked.request_id)
        problem = p.Problem(code="internal", message="this server is at fault; its log tells more")
        return Said(500, asked.answer_type, p.encode(problem, asked.answer_type))

    async def _body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.max_body:
            raise self._too_large()
        message = await receive()
        if not message.get("more_body"):
            return self._part(message)
        parts, size = [self._part(message)], len(message["body"])
        while message.get("more_body"):
            message = await receive()
            parts.append(self._part(message))
            size += len(parts[-1])
            if size > self.max_body:
                raise self._too_large()
        return b"".join(parts)

    def _part(self, message: Any) -> bytes:
        if message["type"] == "http.disconnect":
            raise _GoneError
        part: bytes = message.get("body", b"")
        return part

    def _too_large(self) -> RefusedError:
        return too_large(f"a body of more than {self.max_body} bytes", "body")


def headers_of(said: Said, request_id: str) -> list[tuple[bytes, bytes]]:
    """An answer's head."""
    named = (REQUEST_ID, request_id.encode())
    if said.status == 204:
        return [named]
    headers = [
        (b"content-type", said.content_type.encode()),
        (b"content-length", b"%d" % len(said.body)),
        named,
    ]
    if said.ends_connection:
        headers.append((b"connection", b"close"))
    elif said.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif said.retry_seconds:
        headers.append((b"retry-after", b"%d" % said.retry_seconds))
    return headers


def content_types(path: str, headers: dict[bytes, bytes]) -> tuple[str, str]:
    """How a body is written, and how its answer will be."""
    # Who does not say, as some clients of the compatible part, writes JSON.
    said = (
        headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        or p.JSON
    )
    return said, p.MSGPACK if said == p.MSGPACK and path.startswith("/v2") else p.JSON


async def _send(send: Send, said: Said, request_id: str) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": said.status,
            "headers": headers_of(said, request_id),
        }
    )
    await send({"type": "http.response.body", "body": said.body})
