"""ASGI application of the protocol's routes, in front of the pages.

It replaces routing table, models and middleware of a framework on the path of every request: one
dictionary lookup finds the endpoint, and msgspec decodes the body. Everything else (health, pages,
OpenAPI) goes on to the FastAPI application behind it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.audit_log import AuditEntry, audit_fields, peer_of
from hicache_metadata_server.core.errors import RequestError, StoreError, too_large
from hicache_metadata_server.dashboard.assets import is_page
from hicache_metadata_server.http.handlers import (
    DecodedRequest,
    Endpoint,
    Response,
    Result,
    refusal,
)
from hicache_metadata_server.protocol.history import PATH as PATH_OF_HISTORY
from hicache_storage.observability.request_ids import HEADER, adopt

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from starlette.types import ASGIApp, Receive, Scope, Send

    from hicache_metadata_server.core.tenants import Caller
    from hicache_metadata_server.http.request_log import LoggedRequest
    from hicache_metadata_server.http.runtime import ServerRuntime

REQUEST_ID: Final = HEADER.lower().encode()
HEALTH: Final = ("/healthz", "/readyz")
PAGES: Final = ("/openapi.json", "/metrics", PATH_OF_HISTORY)
"""Paths of the application behind that need a read token."""
OPEN_PAGES: Final = ("/openapi.json",)
"""Those without data of scopes. The others show the scopes of all tenants, so that the token of one
tenant does not permit them."""
READ_METHODS: Final = ("GET", "HEAD")

UNAUTHORIZED: Final = (401, 403)
TOO_LARGE: Final = 413
LONG_BODY_BYTES: Final = 256 << 10
"""Longer bodies are decoded one at a time; a shorter one takes a few milliseconds at most."""
OTHER: Final = "other"
"""Route of unknown paths in metrics and logs."""

_log = structlog.get_logger()


class _ClientDisconnectError(Exception):
    """The client closed the connection before its request was complete."""


class RequestHead(NamedTuple):
    """Method, path and headers of a request, checked and resolved."""

    endpoint: Endpoint
    content_type: str
    response_type: str
    idempotency_key: str
    """Empty without one."""
    caller: Caller
    audit_entry: AuditEntry | None
    """None for a route that is not audited."""
    request_id: str
    """The client's, or a new one; response and log lines have it."""
    logged: LoggedRequest | None
    """None where neither slow requests nor traces are wanted."""


class ProtocolApp:
    """ASGI application of the protocol, in front of the one for health and pages."""

    def __init__(self, app: ASGIApp, server: ServerRuntime) -> None:
        self._app = app
        self.server = server
        # Bound once: each attribute saves two lookups in every request.
        self._handlers = server.handlers
        self._metrics = server.metrics
        self._request_log = server.request_log
        self._tokens = server.security.tokens
        self._rates = server.security.rates
        self._audit = server.security.audit
        self._check_browser = server.security.check_browser
        self._recorder = server.recorder
        self._slow_log = server.recorder.slow_log
        self._decoding = asyncio.Lock()
        self.max_body = server.service.limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        # Probes of an orchestrator have no token, and the dashboard's files hold no data: both go
        # past tokens, rate limits and metrics.
        if (
            scope["type"] != "http"
            or scope["path"] in HEALTH
            or (is_page(scope["path"]) and scope["method"] in READ_METHODS)
        ):
            await self._app(scope, receive, send)
            return
        headers = dict[bytes, bytes](scope["headers"])
        # A new id goes back into the headers, so that `read_head` below adopts the same one.
        request_id = adopt(headers.get(REQUEST_ID))
        headers[REQUEST_ID] = request_id.encode()
        begin, head, path, body = time.perf_counter(), None, scope["path"], b""
        try:
            if path in PAGES and scope["method"] in READ_METHODS:
                self._check_page(path, headers)
                await self._app(scope, receive, send)
                return
            head = self.read_head(path, scope["method"], headers)
            body = await self._read_body(receive, headers)
            # The time of a slow upload is the client's, not the server's.
            begin = time.perf_counter()
            response = await self.finish(head, self.start(head, body))
        except RequestError as refused:
            response = refusal(refused, content_types(path, headers)[1])
            # With a head, `record` writes the refusal to the audit log.
            if head is None and response.status in UNAUTHORIZED:
                caller = self._tokens.caller_of(headers.get(b"authorization", b""))
                self._audit.refused(
                    self._route(path),
                    response.status,
                    refused.problem.code,
                    caller,
                    peer_of(scope["client"]),
                )
        except _ClientDisconnectError:
            return
        self.record(head, response, begin, scope["client"], body)
        await _send(send, response, request_id)

    def _route(self, path: str) -> str:
        """Name of a path for logs."""
        # An unknown path may contain anything, a token pasted into the wrong place included.
        try:
            return path if path in PAGES else self._handlers.endpoint(path).name
        except RequestError:
            return OTHER

    def _check_page(self, path: str, headers: dict[bytes, bytes]) -> None:
        self._check_browser(headers)
        caller = self._tokens.check(headers.get(b"authorization", b""), p.Token.READ)
        if caller.tenant and path not in OPEN_PAGES:
            message = f"{path} shows all tenants, and needs a token without one"
            raise RequestError(403, "forbidden", message, "Authorization")

    # The steps of a request. The fast path calls them too, without a task.

    def read_head(self, path: str, method: str, headers: dict[bytes, bytes]) -> RequestHead:
        """Check and resolve path, method and headers of a request.

        Raises:
            RequestError: unknown route or method, wrong token, or too many requests.
        """
        request_id = adopt(headers.get(REQUEST_ID))
        authorization = headers.get(b"authorization", b"")
        self._check_browser(headers)
        try:
            endpoint = self._handlers.endpoint(path)
        except RequestError:
            # The token first: without one, a client must not learn which routes there are.
            self._tokens.check(authorization, p.Token.READ)
            raise
        caller = self._tokens.check(authorization, endpoint.token)
        if endpoint.method != method:
            raise RequestError(
                404, "unknown_route", f"{endpoint.name} takes {endpoint.method}, not {method}"
            )
        # Before the body is read, so that a tenant over its rate costs no decoding.
        self._rates.admit(caller, endpoint.name)
        content_type, response_type = content_types(path, headers)
        idempotency_key = headers.get(b"idempotency-key", b"").decode("latin-1")
        logged = (
            self._request_log.begin(method, endpoint.name, request_id, headers)
            if self._request_log is not None
            else None
        )
        audit_entry = AuditEntry() if endpoint.audited else None
        return RequestHead(
            endpoint,
            content_type,
            response_type,
            idempotency_key,
            caller,
            audit_entry,
            request_id,
            logged,
        )

    def start(self, head: RequestHead, body: bytes) -> Result | Coroutine[Any, Any, Response]:
        """Run a request at once, or return a coroutine that runs it beside others."""
        if len(body) > LONG_BODY_BYTES:
            return self._start_long_body(head, body)
        return self._start_now(head, body)

    async def _start_long_body(self, head: RequestHead, body: bytes) -> Response:
        # Decoding blocks the event loop. The lock and the `sleep(0)` let the loop serve short
        # requests between two long bodies, however many arrive at once.
        async with self._decoding:
            started = self._start_now(head, body)
            await asyncio.sleep(0)
        return await self.finish(head, started)

    async def finish(
        self, head: RequestHead, started: Result | Coroutine[Any, Any, Response]
    ) -> Response:
        """Wait for the response and for the commit of its changes."""
        if not isinstance(started, Result):
            return await started
        committed = self.commit() if started.changes else None
        try:
            if committed is not None:
                await committed
        except StoreError as error:
            return self.commit_failed(head, error)
        return started.response

    def _start_now(self, head: RequestHead, body: bytes) -> Result | Coroutine[Any, Any, Response]:
        try:
            request = self._handlers.read(
                head.endpoint, body, head.content_type, head.idempotency_key, head.caller
            )
            if head.logged is not None:
                head.logged.message = request.message
            if head.audit_entry is not None:
                head.audit_entry.fields = audit_fields(
                    request.message, self._handlers.names(request)
                )
            return self._handlers.start(request) or self._run_in_slices(head, request)
        except RequestError as refused:
            return Result(refusal(refused, head.response_type), False)
        except Exception:  # noqa: BLE001 - a bug must not close the connection, and its traceback belongs into the log
            # The bug may have struck after a change: the 500 waits for its commit like an answer.
            return Result(self._internal_error(head), head.endpoint.changes)

    async def _run_in_slices(self, head: RequestHead, request: DecodedRequest) -> Response:
        try:
            return await self._handlers.run_in_slices(request)
        except RequestError as refused:
            return refusal(refused, head.response_type)
        except StoreError as error:
            return self.commit_failed(head, error)
        except Exception:  # noqa: BLE001 - as above
            return self._internal_error(head)

    async def hand_over(self) -> None:
        """Give everything to other servers that they can serve; called before the end."""
        await self._handlers.hand_over()

    def commit(self) -> asyncio.Future[None] | None:
        """Commit all changes so far; None if they are durable already."""
        return self._handlers.commit()

    def commit_failed(self, head: RequestHead, error: BaseException) -> Response:
        """Response where changes could not be committed."""
        return refusal(RequestError(503, "unavailable", str(error)), head.response_type)

    def record(
        self,
        head: RequestHead | None,
        response: Response,
        begin: float,
        client: Sequence[Any] | None,
        body: bytes | bytearray,
    ) -> None:
        """Record a request in metrics, slow log, audit log and request log."""
        if head is not None and (head.audit_entry is not None or response.status in UNAUTHORIZED):
            self._write_audit(head, response, peer_of(client))
        seconds, route = time.perf_counter() - begin, head.endpoint.name if head else OTHER
        self._metrics.observe(route, response.status, seconds)
        if head is not None and seconds > self._slow_log.floor:
            # The slow log decodes the body once more. A body over the limit is left out: decoding
            # it is what the limit forbids.
            self._recorder.add(
                route,
                response.status,
                seconds,
                head.request_id,
                b"" if response.status == TOO_LARGE else bytes(body),
                head.content_type,
            )
        if head is not None and head.logged is not None and self._request_log is not None:
            self._request_log.end(head.logged, route, response.status, seconds)

    def _write_audit(self, head: RequestHead, response: Response, peer: str) -> None:
        name, caller = head.endpoint.name, head.caller
        if response.status in UNAUTHORIZED:
            code = p.decode(response.body, p.Problem, response.content_type).code
            self._audit.refused(name, response.status, code, caller, peer)
        elif head.audit_entry is not None:
            self._audit.request(name, response.status, caller, peer, head.audit_entry.fields)

    def _internal_error(self, head: RequestHead) -> Response:
        _log.exception("request_failed", route=head.endpoint.name, request_id=head.request_id)
        problem = p.Problem(code="internal", message="this server is at fault; its log tells more")
        return Response(500, head.response_type, p.encode(problem, head.response_type))

    async def _read_body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        # By the header first, so that a client that announces too much is refused before it sends.
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
            # A chunked body announces nothing: it is counted as it arrives.
            if size > self.max_body:
                raise self._too_large()
        return b"".join(parts)

    def _part(self, message: Any) -> bytes:
        if message["type"] == "http.disconnect":
            raise _ClientDisconnectError
        part: bytes = message.get("body", b"")
        return part

    def _too_large(self) -> RequestError:
        return too_large(f"a body of more than {self.max_body} bytes", "body")


def response_headers(response: Response, request_id: str) -> list[tuple[bytes, bytes]]:
    """Headers of a response."""
    request_id_header = (REQUEST_ID, request_id.encode())
    # RFC 9110: a 204 has neither content type nor content length.
    if response.status == 204:
        return [request_id_header]
    headers = [
        (b"content-type", response.content_type.encode()),
        (b"content-length", b"%d" % len(response.body)),
        request_id_header,
    ]
    if response.location:
        headers.append((b"location", response.location.encode()))
    if response.ends_connection:
        headers.append((b"connection", b"close"))
    elif response.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif response.retry_seconds:
        headers.append((b"retry-after", b"%d" % response.retry_seconds))
    return headers


def content_types(path: str, headers: dict[bytes, bytes]) -> tuple[str, str]:
    """Content types of a request's body and of its response."""
    # Some clients of the SGLang protocol send JSON without a content type.
    sent = (
        headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
        or p.JSON
    )
    return sent, p.MSGPACK if sent == p.MSGPACK and path.startswith("/v2") else p.JSON


async def _send(send: Send, response: Response, request_id: str) -> None:
    await send(
        {
            "type": "http.response.start",
            "status": response.status,
            "headers": response_headers(response, request_id),
        }
    )
    await send({"type": "http.response.body", "body": response.body})
