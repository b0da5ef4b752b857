"""ASGI application of the protocol's routes, in front of the pages.

One dictionary lookup finds the endpoint, and msgspec decodes the body. Everything else (health,
metrics, status page, OpenAPI) goes on to the Starlette application behind it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.audit_log import audit_fields, peer_of
from hicache_metadata_server.core.errors import RequestError, StoreError, too_large
from hicache_metadata_server.core.limits import LONG_BODY
from hicache_metadata_server.dashboard.assets import is_page
from hicache_metadata_server.http.handlers import DecodedRequest, Response, refusal
from hicache_metadata_server.protocol import HISTORY
from hicache_storage.observability import tracing
from hicache_storage.observability.request_ids import HEADER, adopt

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

    from hicache_metadata_server.core.tenants import Caller
    from hicache_metadata_server.http.routes import Endpoint
    from hicache_metadata_server.http.runtime import ServerRuntime
    from hicache_storage.observability.otel import ServerSpan

REQUEST_ID: Final = HEADER.lower().encode()
HEALTH: Final = ("/healthz", "/readyz")
PAGES: Final = ("/openapi.json", "/metrics", HISTORY)
"""Paths of the application behind that need a read token."""
OPEN_PAGES: Final = ("/openapi.json",)
"""Those without data of scopes. The others show the scopes of all tenants, so that the token of one
tenant does not permit them."""
READ_METHODS: Final = ("GET", "HEAD")

UNAUTHORIZED: Final = (401, 403)
OTHER: Final = "other"
"""Route of unknown paths in metrics and logs."""

_log = structlog.get_logger()


# Some clients of the SGLang protocol send JSON without a content type.
_CONTENT_TYPES: Final = {b"": p.JSON, p.JSON.encode(): p.JSON, p.MSGPACK.encode(): p.MSGPACK}


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
    span: ServerSpan | None
    """None without traces."""


class ProtocolApp:
    """ASGI application of the protocol, in front of the one for health and pages."""

    def __init__(self, app: ASGIApp, server: ServerRuntime) -> None:
        self._app = app
        self.server = server
        # Bound once: each attribute saves two lookups in every request.
        self._handlers = server.handlers
        self._known = server.handlers.endpoints
        self._record = server.record
        self._spans = tracing.spans()
        self._tokens = server.security.tokens
        self._rates = server.security.rates
        self._audit = server.security.audit
        self._check_browser = server.security.check_browser
        self._long = asyncio.Lock()
        self._max_body = server.service.limits.body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        # Routes of the protocol first: all others are rare.
        if scope["type"] != "http" or (
            scope["path"] not in self._known and _is_open(scope["path"], scope["method"])
        ):
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = adopt(headers.get(REQUEST_ID))
        begin, path, head, request = time.perf_counter(), scope["path"], None, None
        try:
            if path in PAGES and scope["method"] in READ_METHODS:
                self._check_page(path, headers)
                await self._app(scope, receive, send)
                return
            head = self._read_head(path, scope["method"], headers, request_id)
            body = await self._read_body(receive, headers)
            # The time of a slow upload is the client's, not the server's.
            begin = time.perf_counter()
            request, response = await self._answer(head, body)
        except RequestError as refused:
            response = refusal(refused, content_types(path, headers)[1])
        except _ClientDisconnectError:
            return
        if response.status in UNAUTHORIZED or (head is not None and head.endpoint.audited):
            self._write_audit(path, headers, head, request, response, peer_of(scope["client"]))
        self._record(
            head.endpoint.name if head is not None else OTHER,
            response.status,
            time.perf_counter() - begin,
            request_id,
            request.message if request is not None else None,
            head.span if head is not None else None,
        )
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": _response_headers(response, request_id),
            }
        )
        await send({"type": "http.response.body", "body": response.body})

    async def hand_over(self) -> None:
        """Give everything to other servers that they can serve; called before the end."""
        await self._handlers.hand_over()

    def _check_page(self, path: str, headers: dict[bytes, bytes]) -> None:
        self._check_browser(headers)
        caller = self._tokens.check(headers.get(b"authorization", b""), p.Token.READ)
        if caller.tenant and path not in OPEN_PAGES:
            message = f"{path} shows all tenants, and needs a token without one"
            raise RequestError(403, "forbidden", message, "Authorization")

    def _read_head(
        self, path: str, method: str, headers: dict[bytes, bytes], request_id: str
    ) -> RequestHead:
        """Check and resolve path, method and headers of a request.

        Raises:
            RequestError: unknown route or method, wrong token, or too many requests.
        """
        authorization = headers.get(b"authorization", b"")
        self._check_browser(headers)
        try:
            endpoint = self._handlers.endpoint(path)
        except RequestError:
            # The token first: without one, a client must not learn which routes there are.
            self._tokens.check(authorization, p.Token.READ)
            raise
        caller = self._tokens.check(authorization, endpoint.route.token)
        if (takes := endpoint.route.method) != method:
            raise RequestError(404, "unknown_route", f"{endpoint.name} takes {takes}, not {method}")
        # Before the body is read, so that a tenant over its rate costs no decoding.
        self._rates.admit(caller, endpoint.name)
        content_type, response_type = content_types(path, headers)
        idempotency_key = headers.get(b"idempotency-key", b"").decode("latin-1")
        span = None
        if self._spans is not None:
            span = self._spans.answer(method, endpoint.name, request_id, headers)
        return RequestHead(endpoint, content_type, response_type, idempotency_key, caller, span)

    async def _read_body(self, receive: Receive, headers: dict[bytes, bytes]) -> bytes:
        # By the header first, so that a client that announces too much is refused before it sends.
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
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
            if size > self._max_body:
                raise self._too_large()
        return b"".join(parts)

    def _part(self, message: Any) -> bytes:
        if message["type"] == "http.disconnect":
            raise _ClientDisconnectError
        part: bytes = message.get("body", b"")
        return part

    def _too_large(self) -> RequestError:
        return too_large(f"a body of more than {self._max_body} bytes", "body")

    async def _answer(
        self, head: RequestHead, body: bytes
    ) -> tuple[DecodedRequest | None, Response]:
        """Run a request, and wait for the commit of its changes."""
        request = None
        try:
            if len(body) > LONG_BODY:
                await self._own_turn()
            request = self._handlers.read(
                head.endpoint, body, head.content_type, head.idempotency_key, head.caller
            )
            started = self._handlers.start(request)
            if started is None:
                return request, await self._handlers.run_later(request)
            if started.changes and (committed := self._handlers.commit()) is not None:
                await committed
        except RequestError as refused:
            return request, refusal(refused, head.response_type)
        except StoreError as error:
            unavailable = RequestError(503, "unavailable", str(error))
            return request, refusal(unavailable, head.response_type)
        except Exception:  # noqa: BLE001 - a bug must not close the connection, and its traceback belongs into the log
            return request, await self._internal_error(head)
        return request, started.response

    async def _own_turn(self) -> None:
        """Wait for a turn of the event loop that no other long request has.

        Each blocks the loop: it serves short ones in between, however many long ones arrive at once.
        """
        async with self._long:
            await asyncio.sleep(0)

    async def _internal_error(self, head: RequestHead) -> Response:
        _log.exception("request_failed", route=head.endpoint.name)
        # The bug may have struck after a change: the 500 waits for its commit like an answer.
        if head.endpoint.changes and (committed := self._handlers.commit()) is not None:
            await asyncio.wait([committed])
        problem = p.Problem(code="internal", message="this server is at fault; its log tells more")
        return Response(500, head.response_type, p.encode(problem, head.response_type))

    def _write_audit(
        self,
        path: str,
        headers: dict[bytes, bytes],
        head: RequestHead | None,
        request: DecodedRequest | None,
        response: Response,
        peer: str,
    ) -> None:
        if response.status in UNAUTHORIZED:
            code = p.decode(response.body, p.Problem, response.content_type).code
            caller = self._tokens.caller_of(headers.get(b"authorization", b""))
            self._audit.refused(self._route(path), response.status, code, caller, peer)
        elif head is not None:
            fields = (
                audit_fields(request.message, self._handlers.names(request))
                if request is not None
                else {}
            )
            self._audit.request(head.endpoint.name, response.status, head.caller, peer, fields)

    def _route(self, path: str) -> str:
        """Name of a path for logs."""
        # An unknown path may contain anything, a token pasted into the wrong place included.
        try:
            return path if path in PAGES else self._handlers.endpoint(path).name
        except RequestError:
            return OTHER


def _is_open(path: str, method: str) -> bool:
    """True for what goes past tokens, rate limits and metrics."""
    # Probes of an orchestrator have no token, and the dashboard's files hold no data.
    return path in HEALTH or (is_page(path) and method in READ_METHODS)


def content_types(path: str, headers: dict[bytes, bytes]) -> tuple[str, str]:
    """Content types of a request's body and of its response."""
    header = headers.get(b"content-type", b"")
    sent = _CONTENT_TYPES.get(header) or header.partition(b";")[0].strip().lower().decode("latin-1")
    return sent, p.MSGPACK if sent == p.MSGPACK and path.startswith("/v2") else p.JSON


def _response_headers(response: Response, request_id: str) -> list[tuple[bytes, bytes]]:
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
    # The rest of a body that is too large is not read.
    if response.status == 413:
        headers.append((b"connection", b"close"))
    elif response.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    elif response.retry_seconds:
        headers.append((b"retry-after", b"%d" % response.retry_seconds))
    return headers
