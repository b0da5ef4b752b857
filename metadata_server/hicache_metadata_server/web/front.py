"""The protocol's routes as one ASGI application in front of the pages: no routing table, no models, no middleware on the way."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.service.refused import RefusedError, too_large
from hicache_metadata_server.web.desk import Said

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from hicache_metadata_server.web.app import Server
    from hicache_metadata_server.web.desk import Endpoint

HEALTH: Final = ("/healthz", "/readyz")
PAGES: Final = ("/", "/openapi.json", "/docs", "/metrics")
"""The other paths that are not the protocol's; they take a read token."""

_log = structlog.get_logger()


class _GoneError(Exception):
    """The client closed the connection before its request was whole."""


class Front:
    """Answers the protocol's requests; health and pages go on to the application behind."""

    def __init__(self, app: ASGIApp, server: Server) -> None:
        self._app, self.server = app, server
        self._desk, self._tokens, self._metrics = server.desk, server.tokens, server.metrics
        self._most_body = server.service.limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http" or scope["path"] in HEALTH:
            await self._app(scope, receive, send)
            return
        headers = dict[bytes, bytes](scope["headers"])
        content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1") or p.JSON
        native = scope["path"].startswith("/v2")
        answer_type = p.MSGPACK if native and content_type == p.MSGPACK else p.JSON
        begin, route = time.perf_counter(), "other"
        try:
            if scope["path"] in PAGES and scope["method"] in ("GET", "HEAD"):
                self._tokens.check(headers.get(b"authorization", b""), p.Token.READ)
                await self._app(scope, receive, send)
                return
            endpoint = self._endpoint(scope, headers)
            route = endpoint.name
            body = await self._body(receive, headers)
            begin = time.perf_counter()
            said = await self._desk.answer(
                endpoint, body, content_type if native else p.JSON, headers.get(b"idempotency-key", b"").decode("latin-1")
            )
        except RefusedError as refused:
            said = Said(refused.status, answer_type, p.encode(refused.problem, answer_type))
        except _GoneError:
            return
        except Exception:  # noqa: BLE001 - a fault of ours must not take the connection, and its trace belongs into the log
            _log.exception("request_failed", path=scope["path"])
            problem = p.Problem(code="internal", message="this server is at fault; its log tells more")
            said = Said(500, answer_type, p.encode(problem, answer_type))
        self._metrics.answered(route, said.status, time.perf_counter() - begin)
        await _send(send, said)

    def _endpoint(self, scope: Scope, headers: dict[bytes, bytes]) -> Endpoint:
        try:
            endpoint = self._desk.endpoint(scope["path"])
        except RefusedError:
            self._tokens.check(headers.get(b"authorization", b""), p.Token.READ)
            raise
        self._tokens.check(headers.get(b"authorization", b""), endpoint.token)
        if endpoint.method != scope["method"]:
            raise RefusedError(404, "unknown_route", f"{endpoint.name} takes {endpoint.method}, not {scope['method']}")
        return endpoint

    async def _body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._most_body:
            raise self._too_large()
        message = await receive()
        if not message.get("more_body"):
            return self._part(message)
        parts, size = [self._part(message)], len(message["body"])
        while message.get("more_body"):
            message = await receive()
            parts.append(self._part(message))
            size += len(parts[-1])
            if size > self._most_body:
                raise self._too_large()
        return b"".join(parts)

    def _part(self, message: Any) -> bytes:
        if message["type"] == "http.disconnect":
            raise _GoneError
        part: bytes = message.get("body", b"")
        return part

    def _too_large(self) -> RefusedError:
        return too_large(f"a body of more than {self._most_body} bytes", "body")


async def _send(send: Send, said: Said) -> None:
    headers = [(b"content-type", said.content_type.encode()), (b"content-length", b"%d" % len(said.body))]
    if said.status == 204:
        headers = []
    elif said.status == 413:
        # What is left of the body need not be read.
        headers.append((b"connection", b"close"))
    elif said.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": said.status, "headers": headers})
    await send({"type": "http.response.body", "body": said.body})
