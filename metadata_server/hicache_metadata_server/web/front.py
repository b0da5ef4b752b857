"""The protocol's routes as one ASGI application in front of the pages: no routing table, no models, no middleware on the way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.protocol_history import PATH as PATH_OF_HISTORY
from hicache_metadata_server.service.refused import RefusedError, too_large
from hicache_metadata_server.stores.store import StoreError
from hicache_metadata_server.web.desk import Endpoint, Request, Said, Started, refusal
from hicache_metadata_server.web.page.assets import is_page

if TYPE_CHECKING:
    import asyncio

    from starlette.types import ASGIApp, Receive, Scope, Send

    from hicache_metadata_server.web.app import Server

HEALTH: Final = ("/healthz", "/readyz")
PAGES: Final = ("/openapi.json", "/docs", "/metrics", PATH_OF_HISTORY)
"""The other paths that are not every server's; they take a read token."""
LOOKS: Final = ("GET", "HEAD")
REQUEST_ID: Final = b"x-request-id"
MOST_REQUEST_ID: Final = 64
"""Characters that are kept of one."""

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
    request_id: str = ""
    """As the client calls it, or empty."""


class Front:
    """Answers the protocol's requests; health and pages go on to the application behind."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self.server = app, server
        self._desk, self._tokens, self._metrics = server.desk, server.tokens, server.metrics
        self._recorder, self._slowest = server.recorder, server.recorder.slowest
        self.most_body = server.service.limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] in HEALTH or (is_page(scope["path"]) and scope["method"] in LOOKS):
            await self._app(scope, receive, send)
            return
        headers = dict[bytes, bytes](scope["headers"])
        begin, asked, path, body = time.perf_counter(), None, scope["path"], b""
        try:
            if path in PAGES and scope["method"] in LOOKS:
                self._tokens.check(headers.get(b"authorization", b""), p.Token.READ)
                await self._app(scope, receive, send)
                return
            asked = self.asked(path, scope["method"], headers)
            body = await self._body(receive, headers)
            begin = time.perf_counter()
            said = await self._answer(asked, body)
        except RefusedError as refused:
            said = refusal(refused, content_types(path, headers)[1])
        except _GoneError:
            return
        self.count(asked, said, begin, body)
        await _send(send, said)

    # The steps of an answer, for whoever goes them without a task.

    def asked(self, path: str, method: str, headers: dict[bytes, bytes]) -> Asked:
        """What a request's head says.

        Raises:
            RefusedError: nobody answers that, or not for this token.
        """
        authorization = headers.get(b"authorization", b"")
        try:
            endpoint = self._desk.endpoint(path)
        except RefusedError:
            self._tokens.check(authorization, p.Token.READ)
            raise
        self._tokens.check(authorization, endpoint.token)
        if endpoint.method != method:
            raise RefusedError(404, "unknown_route", f"{endpoint.name} takes {endpoint.method}, not {method}")
        content_type, answer_type = content_types(path, headers)
        once, request_id = headers.get(b"idempotency-key", b"").decode("latin-1"), _request_id(headers)
        return Asked(endpoint, content_type, answer_type, once, request_id)

    def start(self, asked: Asked, body: bytes) -> Started | Request:
        """Do it, or say what of it has to take turns with others (`in_turns`)."""
        try:
            request = self._desk.read(asked.endpoint, body, asked.content_type, asked.once)
            return self._desk.start(request) or request
        except RefusedError as refused:
            return Started(refusal(refused, asked.answer_type), False)
        except Exception:  # noqa: BLE001 - a fault of ours must not take the connection, and its trace belongs into the log
            return Started(self._fault(asked), asked.endpoint.changes)

    async def in_turns(self, asked: Asked, request: Request) -> Said:
        """Do what `start` did not."""
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

    def count(self, asked: Asked | None, said: Said, begin: float, body: bytes) -> None:
        """See to the metrics, and to the slowest calls."""
        seconds = time.perf_counter() - begin
        self._metrics.answered(asked.endpoint.name if asked else "other", said.status, seconds)
        if asked and seconds > self._slowest.floor:
            self._recorder.add(asked, said.status, seconds, body)

    async def _answer(self, asked: Asked, body: bytes) -> Said:
        started = self.start(asked, body)
        if isinstance(started, Request):
            return await self.in_turns(asked, started)
        written = self.join() if started.changes else None
        try:
            if written is not None:
                await written
        except StoreError as error:
            return self.unwritten(asked, error)
        return started.said

    def _fault(self, asked: Asked) -> Said:
        _log.exception("request_failed", path=asked.endpoint.name)
        problem = p.Problem(code="internal", message="this server is at fault; its log tells more")
        return Said(500, asked.answer_type, p.encode(problem, asked.answer_type))

    async def _body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self.most_body:
            raise self._too_large()
        message = await receive()
        if not message.get("more_body"):
            return self._part(message)
        parts, size = [self._part(message)], len(message["body"])
        while message.get("more_body"):
            message = await receive()
            parts.append(self._part(message))
            size += len(parts[-1])
            if size > self.most_body:
                raise self._too_large()
        return b"".join(parts)

    def _part(self, message: Any) -> bytes:
        if message["type"] == "http.disconnect":
            raise _GoneError
        part: bytes = message.get("body", b"")
        return part

    def _too_large(self) -> RefusedError:
        return too_large(f"a body of more than {self.most_body} bytes", "body")


def headers_of(said: Said) -> list[tuple[bytes, bytes]]:
    """An answer's head."""
    if said.status == 204:
        return []
    headers = [(b"content-type", said.content_type.encode()), (b"content-length", b"%d" % len(said.body))]
    if said.ends_connection:
        headers.append((b"connection", b"close"))
    elif said.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers


def _request_id(headers: dict[bytes, bytes]) -> str:
    given = headers.get(REQUEST_ID)
    if not given:
        return ""
    return "".join(character for character in given[:MOST_REQUEST_ID].decode("latin-1") if " " < character < "\x7f")


def content_types(path: str, headers: dict[bytes, bytes]) -> tuple[str, str]:
    """How a body is written, and how its answer will be."""
    said = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1") or p.JSON
    if not path.startswith("/v2"):
        # SGLang's client does not always say.
        return p.JSON, p.JSON
    return said, p.MSGPACK if said == p.MSGPACK else p.JSON


async def _send(send: Send, said: Said) -> None:
    await send({"type": "http.response.start", "status": said.status, "headers": headers_of(said)})
    await send({"type": "http.response.body", "body": said.body})
