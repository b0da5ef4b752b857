"""The application: the protocol in front, pages and health behind, and what runs beside the
requests."""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Any, Final

import structlog
from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.clock import SteadyClock
from hicache_metadata_server.core.errors import RequestError, invalid
from hicache_metadata_server.dashboard.assets import HEADERS, PREFIX, read_assets
from hicache_metadata_server.http.asgi import Front, content_types
from hicache_metadata_server.http.handlers import Desk
from hicache_metadata_server.http.metrics import Metrics
from hicache_metadata_server.http.openapi import openapi
from hicache_metadata_server.http.recorder import Recorder
from hicache_metadata_server.http.request_log import Watch
from hicache_metadata_server.protocol.history import AFTER
from hicache_metadata_server.protocol.history import PATH as HISTORY
from hicache_metadata_server.storage.group_commit import GroupCommit
from hicache_metadata_server.storage.store import StoreError
from hicache_storage.observability import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.requests import Request

    from hicache_metadata_server.auth.tokens import Tokens
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.store import MetadataStore

TICK_SECONDS: Final = 0.1
"""How often the server looks for what is due where nobody asks for it."""
TICK_SLOTS: Final = 1024
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_log = structlog.get_logger()


class Server:
    """A service with its store, while the application runs."""

    def __init__(
        self,
        service: MetadataService,
        store: MetadataStore,
        security: Security,
        clock: Callable[[], float],
        desk: Desk | None = None,
        slow_seconds: float = 0.0,
    ) -> None:
        self.service, self.store, self.clock = service, store, clock
        self.metrics = Metrics(service, self.problem)
        self.recorder = Recorder(service, self.metrics, clock)
        self.security = self.metrics.security = security
        self.metrics.store_sizes = store.sizes
        self.desk = desk or Desk(service, clock)
        if desk is not None:
            self.metrics.store_problem = desk.store_problem
        spans = tracing.spans()
        self.watch = (
            Watch(self.metrics, slow_seconds, spans) if slow_seconds or spans is not None else None
        )

    @contextlib.asynccontextmanager
    async def running(self, app: FastAPI | None = None) -> AsyncGenerator[None]:
        """What stands around the requests: the group commit, and the clock's work."""
        if self.store.durability is not p.StoreDurability.NONE:
            self.desk.group_commit = self.metrics.group_commit = GroupCommit(
                self.service, self.store, self.clock
            )
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await self.desk.close()
            await asyncio.to_thread(self.store.close)
            if (spans := tracing.spans()) is not None:
                await asyncio.to_thread(spans.flush)
            _log.info("stopped", scopes=len(self.service.scopes))

    def problem(self) -> str:
        """Why it is not ready, or ""."""
        return self.desk.problem()

    async def _tick(self) -> None:
        while True:
            try:
                self.security.reloads.look()
                more = await self.desk.tick(TICK_SLOTS)
            except StoreError:
                # The desk's problem tells.
                more = False
            except Exception:  # noqa: BLE001 - the clock must go on, and the log must tell
                _log.exception("tick_failed")
                more = False
            self._record()
            await asyncio.sleep(0.002 if more else TICK_SECONDS)

    def _record(self) -> None:
        try:
            self.recorder.tick()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("record_failed")


def create_app(
    service: MetadataService,
    store: MetadataStore,
    *,
    tokens: Tokens | None = None,
    security: Security | None = None,
    clock: Callable[[], float] | None = None,
    desk: Desk | None = None,
    slow_seconds: float = 0.0,
) -> Front:
    """The application of one service, which was restored from its store; of the desk in front of
    it, where that is another than `Desk`.

    `tokens` are for where `security` is not needed. Requests are traced if tracing is enabled
    before.
    """
    server = Server(
        service,
        store,
        security or Security(service, tokens),
        clock or SteadyClock(),
        desk,
        slow_seconds,
    )
    version = service.about.server.rpartition(" ")[2]
    # FastAPI's viewers of the description load their scripts from elsewhere, and cannot send the
    # token that it needs.
    app = FastAPI(
        title="HiCache metadata server",
        version=version,
        lifespan=server.running,
        docs_url=None,
        redoc_url=None,
    )
    described = openapi(version)

    def schema() -> dict[str, Any]:
        return described

    app.openapi = schema  # type: ignore[method-assign]  # fastapi's own way to bring a schema along
    _add_pages(app, server)
    _add_page(app)
    return Front(app, server)


def _add_pages(app: FastAPI, server: Server) -> None:
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def readyz() -> Response:
        problem = server.problem()
        if not problem:
            return JSONResponse({"status": "ok"})
        code = "draining" if server.service.draining else "unavailable"
        return Response(p.encode(p.Problem(code=code, message=problem)), 503, media_type=p.JSON)

    async def metrics() -> PlainTextResponse:
        await server.desk.look()
        return PlainTextResponse(server.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def history(request: Request) -> Response:
        _, content_type = content_types(request.url.path, dict(request.scope["headers"]))
        try:
            told = server.recorder.told(_after(request.query_params.get(AFTER, "0")))
        except RequestError as refused:
            return Response(
                p.encode(refused.problem, content_type), refused.status, media_type=content_type
            )
        return Response(p.encode(told, content_type), media_type=content_type)

    async def unknown(request: Request, error: Exception) -> Response:
        problem = p.Problem(
            code="unknown_route", message=f"there is no {request.method} {request.url.path}"
        )
        return Response(p.encode(problem), 404, media_type=p.JSON)

    for path, answer in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
        # Starlette's own routes take HEAD with GET; FastAPI's do not.
        app.add_api_route(
            path, answer, methods=["GET", "HEAD"], include_in_schema=False, response_model=None
        )
    app.add_route(HISTORY, history, methods=["GET"])
    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)


def _add_page(app: FastAPI) -> None:
    assets = read_assets()

    async def page(request: Request) -> Response:
        asset = assets.get(request.url.path)
        if asset is None:
            raise HTTPException(404)
        headers = {**HEADERS, "ETag": asset.tag}
        if asset.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(asset.body, headers=headers, media_type=asset.content_type)

    for path in ("/", PREFIX + "{name}"):
        app.add_route(path, page, methods=["GET"])


def _after(text: str) -> float:
    try:
        after = float(text)
    except ValueError:
        after = math.nan
    if not math.isfinite(after):
        raise invalid(f"seconds since 1970, not {text[:40]!r}", AFTER)
    return after
