"""The application: the protocol in front, pages and health behind, and what runs beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import structlog
from fastapi import FastAPI
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.responses import Response

from hicache_metadata_server import protocol as p
from hicache_metadata_server.clock import Clock
from hicache_metadata_server.journal import Journal
from hicache_metadata_server.stores.store import StoreError
from hicache_metadata_server.web.desk import Desk
from hicache_metadata_server.web.front import Front
from hicache_metadata_server.web.metrics import Metrics
from hicache_metadata_server.web.openapi import openapi
from hicache_metadata_server.web.status_page import status_page
from hicache_metadata_server.web.tokens import Tokens

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.requests import Request

    from hicache_metadata_server.service.service import MetadataService
    from hicache_metadata_server.stores.store import Store

TICK_SECONDS: Final = 0.1
"""How often the server looks for what is due where nobody asks for it."""
TICK_SLOTS: Final = 1024
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

_log = structlog.get_logger()


class Server:
    """A service with its store, while the application runs."""

    def __init__(
        self, service: MetadataService, store: Store, tokens: Tokens, clock: Callable[[], float], desk: Desk | None = None
    ) -> None:
        self.service, self.store, self.clock = service, store, clock
        self.metrics = Metrics(service)
        self.tokens = tokens
        self.desk = desk or Desk(service, clock)
        if desk is not None:
            self.metrics.store_problem = desk.store_problem

    @contextlib.asynccontextmanager
    async def running(self, app: FastAPI | None = None) -> AsyncGenerator[None]:
        """What stands around the requests: the journal, and the clock's work."""
        if self.store.durability is not p.Durability.NONE:
            self.desk.journal = self.metrics.journal = Journal(self.service, self.store, self.clock)
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await self.desk.close()
            await asyncio.to_thread(self.store.close)
            _log.info("stopped", scopes=len(self.service.scopes))

    def problem(self) -> str:
        """Why it is not ready, or ""."""
        return self.desk.problem()

    async def _tick(self) -> None:
        while True:
            try:
                more = await self.desk.tick(TICK_SLOTS)
            except StoreError:
                # The desk's problem tells.
                more = False
            except Exception:  # noqa: BLE001 - the clock must go on, and the log must tell
                _log.exception("tick_failed")
                more = False
            await asyncio.sleep(0.002 if more else TICK_SECONDS)


def create_app(
    service: MetadataService, store: Store, *, tokens: Tokens | None = None, clock: Callable[[], float] | None = None,
    desk: Desk | None = None,
) -> Front:  # fmt: skip
    """The application of one service, which was restored from its store; of the desk in front of it, where that is another than `Desk`."""
    server = Server(service, store, tokens or Tokens(), clock or Clock(), desk)
    version = service.about.server.rpartition(" ")[2]
    app = FastAPI(title="HiCache metadata server", version=version, lifespan=server.running, redoc_url=None)
    described = openapi(version)

    def schema() -> dict[str, Any]:
        return described

    app.openapi = schema  # type: ignore[method-assign]  # fastapi's own way to bring a schema along
    _add_pages(app, server)
    return Front(app, server)


def _add_pages(app: FastAPI, server: Server) -> None:
    async def page() -> HTMLResponse:
        await server.desk.look()
        return HTMLResponse(status_page(server.service, server.problem()))

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

    async def unknown(request: Request, error: Exception) -> Response:
        problem = p.Problem(code="unknown_route", message=f"there is no {request.method} {request.url.path}")
        return Response(p.encode(problem), 404, media_type=p.JSON)

    for path, answer in (("/", page), ("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
        app.add_api_route(path, answer, methods=["GET"], include_in_schema=False, response_model=None)
    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)
