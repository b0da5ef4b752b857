"""The whole application: the protocol in front; health, metrics and pages behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from fastapi import FastAPI
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.errors import RequestError, invalid
from hicache_metadata_server.core.leases import SteadyClock
from hicache_metadata_server.dashboard.assets import HEADERS, PREFIX, read_assets
from hicache_metadata_server.http.asgi import ProtocolApp, content_types
from hicache_metadata_server.http.openapi import openapi
from hicache_metadata_server.http.runtime import ServerRuntime
from hicache_metadata_server.protocol.history import AFTER
from hicache_metadata_server.protocol.history import PATH as HISTORY

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
    slow_seconds: float = 0.0,
) -> ProtocolApp:
    """Application of one service, which was restored from its store.

    Requests are traced if tracing is enabled before this call.

    Args:
        tokens: a short form of `security` with nothing but these tokens.
        clock: seconds since 1970.
        handlers: replaces `Handlers` for a shared store.
        slow_seconds: slower requests are logged; 0 for none.
    """
    server = ServerRuntime(
        service,
        store,
        security or Security(service, tokens),
        clock or SteadyClock(),
        handlers,
        slow_seconds,
    )
    version = service.about.server.rpartition(" ")[2]
    # No docs_url and redoc_url: FastAPI's viewers load their scripts from another host, and cannot
    # send the token that the description needs.
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

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way to replace the schema
    _add_pages(app, server)
    _add_dashboard(app)
    return ProtocolApp(app, server)


def _add_pages(app: FastAPI, server: ServerRuntime) -> None:
    async def healthz() -> JSONResponse:
        return JSONResponse({"status": "ok"})

    async def readyz() -> Response:
        problem = server.problem()
        if not problem:
            return JSONResponse({"status": "ok"})
        code = "draining" if server.service.draining else "unavailable"
        return Response(p.encode(p.Problem(code=code, message=problem)), 503, media_type=p.JSON)

    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(server.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def history(request: Request) -> Response:
        _, content_type = content_types(request.url.path, dict(request.scope["headers"]))
        try:
            found = server.recorder.history(_after(request.query_params.get(AFTER, "0")))
        except RequestError as refused:
            return Response(
                p.encode(refused.problem, content_type), refused.status, media_type=content_type
            )
        return Response(p.encode(found, content_type), media_type=content_type)

    async def unknown(request: Request, error: Exception) -> Response:
        problem = p.Problem(
            code="unknown_route", message=f"there is no {request.method} {request.url.path}"
        )
        return Response(p.encode(problem), 404, media_type=p.JSON)

    for path, endpoint in (("/healthz", healthz), ("/readyz", readyz), ("/metrics", metrics)):
        # Starlette's own routes take HEAD with GET; FastAPI's do not.
        app.add_api_route(
            path, endpoint, methods=["GET", "HEAD"], include_in_schema=False, response_model=None
        )
    app.add_route(HISTORY, history, methods=["GET"])
    # A wrong method is an unknown route as well, as in the protocol's own routes.
    app.add_exception_handler(404, unknown)
    app.add_exception_handler(405, unknown)


def _add_dashboard(app: FastAPI) -> None:
    assets = read_assets()

    async def page(request: Request) -> Response:
        asset = assets.get(request.url.path)
        if asset is None:
            raise HTTPException(404)
        headers = {**HEADERS, "ETag": asset.tag}
        # `in`, not `==`: the header may list several tags, or mark them as weak.
        if asset.tag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(asset.body, headers=headers, media_type=asset.content_type)

    for path in ("/", PREFIX + "{name}"):
        app.add_route(path, page, methods=["GET"])


def _after(text: str) -> float:
    # By hand: FastAPI would answer with its own form of error, and takes `nan` for a number.
    try:
        after = float(text)
    except ValueError:
        after = math.nan
    if not math.isfinite(after):
        raise invalid(f"seconds since 1970, not {text[:40]!r}", AFTER)
    return after
