"""The whole application: the protocol in front; health, metrics and pages behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.changes import SteadyClock
from hicache_metadata_server.core.errors import RequestError, invalid
from hicache_metadata_server.dashboard.assets import PREFIX, Assets
from hicache_metadata_server.http.asgi import ProtocolApp, content_types
from hicache_metadata_server.http.openapi import openapi
from hicache_metadata_server.http.runtime import ServerRuntime
from hicache_metadata_server.protocol import AFTER, HISTORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from hicache_metadata_server.auth.tokens import Tokens
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.http.handlers import Handlers
    from hicache_metadata_server.storage.store import MetadataStore

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def create_app(
    service: MetadataService,
    store: MetadataStore,
    *,
    tokens: Tokens | None = None,
    security: Security | None = None,
    clock: Callable[[], float] | None = None,
    handlers: Handlers | None = None,
) -> ProtocolApp:
    """Application of one service, which was restored from its store.

    Requests are traced if tracing is enabled before this call.

    Args:
        tokens: a short form of `security` with nothing but these tokens.
        clock: seconds since 1970.
        handlers: replaces `Handlers` for a shared store.
    """
    server = ServerRuntime(
        service,
        store,
        security or Security(service, tokens),
        clock or SteadyClock(),
        handlers,
    )
    assets = Assets()
    app = Starlette(
        routes=[*_pages(server), Route("/", assets.index), Mount(PREFIX, assets)],
        # A wrong method is an unknown route as well, as in the protocol's own routes.
        exception_handlers={404: _unknown, 405: _unknown},
        lifespan=server.running,
    )
    return ProtocolApp(app, server)


def _pages(server: ServerRuntime) -> list[Route]:
    described = openapi(server.service.about.server.rpartition(" ")[2])

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        problem = server.handlers.problem()
        if not problem:
            return JSONResponse({"status": "ok"})
        code = "draining" if server.service.draining else "unavailable"
        return Response(p.encode(p.Problem(code=code, message=problem)), 503, media_type=p.JSON)

    async def description(request: Request) -> Response:
        return JSONResponse(described)

    async def metrics(request: Request) -> Response:
        return Response(server.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def history(request: Request) -> Response:
        _, content_type = content_types(request.url.path, dict(request.scope["headers"]))
        try:
            found = server.recorder.history(_after(request.query_params.get(AFTER, "0")))
        except RequestError as refused:
            return Response(
                p.encode(refused.problem, content_type), refused.status, media_type=content_type
            )
        return Response(p.encode(found, content_type), media_type=content_type)

    return [
        Route("/healthz", healthz),
        Route("/readyz", readyz),
        Route("/openapi.json", description),
        Route("/metrics", metrics),
        Route(HISTORY, history),
    ]


async def _unknown(request: Request, error: Exception) -> Response:
    problem = p.Problem(
        code="unknown_route", message=f"there is no {request.method} {request.url.path}"
    )
    return Response(p.encode(problem), 404, media_type=p.JSON)


def _after(text: str) -> float:
    try:
        after = float(text)
    except ValueError:
        after = math.nan
    if not math.isfinite(after):
        raise invalid(f"seconds since 1970, not {text[:40]!r}", AFTER)
    return after
