"""ASGI application of the protocol's routes, in front of the pages, and the work beside requests.

One dictionary lookup finds the endpoint, and msgspec decodes the body. Everything else (health,
metrics, status page, OpenAPI) goes on to the Starlette application behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, Final

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError, StoreError, too_large
from hicache_metadata_server.core.limits import LONG_BODY, request_size
from hicache_metadata_server.http.handlers import ReceivedRequest, Response, refusal
from hicache_metadata_server.http.metrics import HistoryRecorder, Metrics
from hicache_metadata_server.protocol import HISTORY
from hicache_metadata_server.storage.group_commit import GroupCommit
from hicache_storage.observability.request_ids import HEADER, adopt

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from starlette.applications import Starlette
    from starlette.types import ASGIApp, Receive, Scope, Send

    from hicache_metadata_server.auth.security import Security
    from hicache_metadata_server.http.handlers import Handlers
    from hicache_metadata_server.storage.store import MetadataStore

REQUEST_ID: Final = HEADER.lower().encode()
HEALTH: Final = ("/healthz", "/readyz")
PAGES: Final = ("/openapi.json", "/metrics", HISTORY)
"""Paths of the application behind that need a read token."""
OPEN_PAGES: Final = ("/openapi.json",)
"""Those without data of scopes. The others show the scopes of all tenants, so that the token of one
tenant does not permit them."""
STATUS_PAGE: Final = "/page"
"""Below it are the files of the status page."""
READ_METHODS: Final = ("GET", "HEAD")

UNAUTHORIZED: Final = (401, 403)
OTHER: Final = "other"
"""Route of unknown paths in metrics and logs."""
TICK_SECONDS: Final = 0.1
"""Interval of the timers; a lease or quarantine ends at most this much late."""
BUSY_TICK_SECONDS: Final = 0.002
"""Interval while more slots are due than one tick handles."""
TICK_SLOTS: Final = 1024

_log = structlog.get_logger()


# Some clients of the SGLang protocol send JSON without a content type.
_CONTENT_TYPES: Final = {b"": p.JSON, p.JSON.encode(): p.JSON, p.MSGPACK.encode(): p.MSGPACK}


class _ClientDisconnectError(Exception):
    """The client closed the connection before its request was complete."""


class ProtocolApp:
    """ASGI application of the protocol, in front of the one for health and pages."""

    def __init__(self, handlers: Handlers, store: MetadataStore, security: Security) -> None:
        self.pages: ASGIApp
        """Serves everything that is no route of the protocol; set before the first request."""
        self.handlers = handlers
        self.service = handlers.service
        self.security = security
        self.metrics = Metrics(handlers, store, security)
        self.recorder = HistoryRecorder(handlers.service, self.metrics, handlers.clock)
        self.store = store
        # Bound once: each attribute saves two lookups in every request.
        self._known = handlers.endpoints
        self._slow_log = self.recorder.slow_log
        self._tokens = security.tokens
        self._audit = security.audit
        self._check_browser = security.origin_policy.check
        self._long = asyncio.Lock()
        self._max_body = handlers.service.limits.body_bytes
        self._stopping = False
        self._next_second = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        # Routes of the protocol first: all others are rare.
        if scope["type"] != "http" or (
            scope["path"] not in self._known and _is_open(scope["path"], scope["method"])
        ):
            await self.pages(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = adopt(headers.get(REQUEST_ID))
        begin, path, request = time.perf_counter(), scope["path"], None
        try:
            if path in PAGES and scope["method"] in READ_METHODS:
                self._check_browser(headers)
                caller = self._tokens.check(headers.get(b"authorization", b""), p.Token.READ)
                if caller.tenant and path not in OPEN_PAGES:
                    message = f"{path} shows all tenants, and needs a token without one"
                    raise RequestError(403, "forbidden", message, "Authorization")
                await self.pages(scope, receive, send)
                return
            request = self._read_head(path, scope["method"], headers)
            body = await self._read_body(receive, headers)
            # The time of a slow upload is the client's, not the server's.
            begin = time.perf_counter()
            response = await self._answer(request, body)
        except RequestError as refused:
            response = refusal(refused, content_types(path, headers)[1])
        except _ClientDisconnectError:
            return
        if response.status in UNAUTHORIZED or (request is not None and request.endpoint.audited):
            client = scope["client"]
            peer = f"{client[0]}:{client[1]}" if client else ""
            self._write_audit(path, headers, request, response, peer)
        self._record(request, response.status, time.perf_counter() - begin, request_id)
        await send(
            {
                "type": "http.response.start",
                "status": response.status,
                "headers": _response_headers(response, request_id),
            }
        )
        await send({"type": "http.response.body", "body": response.body})

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette | None = None) -> AsyncGenerator[None]:
        """Lifespan of the application: starts the group commit and the timers, and ends them."""
        # Here and not in `__init__`: both need the running event loop.
        if self.store.durability is not p.StoreDurability.NONE:
            self.handlers.group_commit = GroupCommit(
                self.service,
                self.store,
                self.handlers.clock,
                self.handlers.fenced,
                self.metrics.write_seconds.observe,
            )
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            # Timers first, because they make changes; then the commit of the last changes; then the
            # store, which that commit needs.
            self._stopping = True
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await self.handlers.close()
            await asyncio.to_thread(self.store.close)
            _log.info("stopped", scopes=len(self.service.scopes))

    async def _tick(self) -> None:
        # A cancellation may be lost on its way: `asyncio.wait_for`, in which redis-py sends, returns
        # its result instead if that is there in the same turn of the loop (CPython before 3.12).
        while not self._stopping:
            more = False
            try:
                now = self.handlers.clock()
                # Once a second: looking at files and summing all scopes is work.
                if now >= self._next_second:
                    self._next_second = now // 1.0 + 1.0
                    self.security.reload()
                    self.recorder.sample()
                more = await self.handlers.tick(TICK_SLOTS)
            except StoreError:
                # Not logged ten times a second: the group commit has logged it, and `/readyz` and the
                # metrics show it for as long as it lasts.
                pass
            except Exception:  # noqa: BLE001 - without timers no lease would ever expire
                _log.exception("tick_failed")
            await asyncio.sleep(BUSY_TICK_SECONDS if more else TICK_SECONDS)

    def _record(
        self, request: ReceivedRequest | None, status: int, seconds: float, request_id: str
    ) -> None:
        """Record a request that is answered, in seconds from the last byte of its body."""
        route = OTHER if request is None else request.endpoint.name
        self.metrics.observe(route, status, seconds)
        if seconds <= self._slow_log.floor:
            return
        # Entries are counted here and not before: most requests are not slow.
        size = request_size(request.message if request is not None else None)
        self._slow_log.add(
            p.SlowCall(
                time=self.handlers.clock(),
                route=route,
                status=status,
                seconds=seconds,
                request_id=request_id,
                **size._asdict(),
            )
        )

    def _read_head(self, path: str, method: str, headers: dict[bytes, bytes]) -> ReceivedRequest:
        """Check and resolve path, method and headers of a request.

        Raises:
            RequestError: unknown route or method, or wrong token.
        """
        authorization = headers.get(b"authorization", b"")
        self._check_browser(headers)
        try:
            endpoint = self.handlers.endpoint(path)
        except RequestError:
            # The token first: without one, a client must not learn which routes there are.
            self._tokens.check(authorization, p.Token.READ)
            raise
        caller = self._tokens.check(authorization, endpoint.route.token)
        if (takes := endpoint.route.method) != method:
            raise RequestError(404, "unknown_route", f"{endpoint.name} takes {takes}, not {method}")
        content_type, response_type = content_types(path, headers)
        idempotency_key = headers.get(b"idempotency-key", b"").decode("latin-1")
        return ReceivedRequest(endpoint, content_type, response_type, idempotency_key, caller)

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

    async def _answer(self, request: ReceivedRequest, body: bytes) -> Response:
        """Run a request, and wait for the commit of its changes."""
        try:
            if len(body) > LONG_BODY:
                # A turn of the event loop that no other long request has: short ones are served in
                # between, however many long ones arrive at once.
                async with self._long:
                    await asyncio.sleep(0)
            self.handlers.read(request, body)
            response = self.handlers.start(request)
            if response is None:
                return await self.handlers.run_later(request)
            if response.changes and (committed := self.handlers.commit()) is not None:
                await committed
        except RequestError as refused:
            return refusal(refused, request.response_type)
        except StoreError as error:
            unavailable = RequestError(503, "unavailable", str(error))
            return refusal(unavailable, request.response_type)
        except Exception:  # noqa: BLE001 - a bug must not close the connection, and its traceback belongs into the log
            return await self._internal_error(request)
        return response

    async def _internal_error(self, request: ReceivedRequest) -> Response:
        _log.exception("request_failed", route=request.endpoint.name)
        # The bug may have struck after a change: the 500 waits for its commit like an answer.
        if request.endpoint.changes and (committed := self.handlers.commit()) is not None:
            await asyncio.wait([committed])
        problem = p.Problem(code="internal", message="this server is at fault; its log tells more")
        response_type = request.response_type
        return Response(500, response_type, p.encode(problem, response_type))

    def _write_audit(
        self,
        path: str,
        headers: dict[bytes, bytes],
        request: ReceivedRequest | None,
        response: Response,
        peer: str,
    ) -> None:
        if response.status in UNAUTHORIZED:
            code = p.decode(response.body, p.Problem, response.content_type).code
            caller = self._tokens.caller_of(headers.get(b"authorization", b""))
            self._audit.refused(self._route(path), response.status, code, caller, peer)
        elif request is not None:
            # No message: the body could not be decoded.
            names = self.handlers.names(request) if request.message is not None else ()
            name, caller = request.endpoint.name, request.caller
            self._audit.request(name, response.status, caller, peer, request.message, names)

    def _route(self, path: str) -> str:
        """Name of a path for logs."""
        # An unknown path may contain anything, a token pasted into the wrong place included.
        try:
            return path if path in PAGES else self.handlers.endpoint(path).name
        except RequestError:
            return OTHER


def _is_open(path: str, method: str) -> bool:
    """True for what goes past tokens and metrics."""
    # Probes of an orchestrator have no token, and the dashboard's files hold no data.
    is_file = path == "/" or path.startswith(f"{STATUS_PAGE}/")
    return path in HEALTH or (is_file and method in READ_METHODS)


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
