"""The whole application: the protocol in front; health, metrics, pages and their description behind."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from hicache_metadata_server import protocol as p
from hicache_metadata_server.auth.security import Security
from hicache_metadata_server.core.changes import SteadyClock
from hicache_metadata_server.core.errors import invalid
from hicache_metadata_server.http.asgi import STATUS_PAGE, ProtocolApp, content_types
from hicache_metadata_server.http.handlers import Handlers
from hicache_metadata_server.protocol import HISTORY

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request
    from starlette.types import Scope

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.store import MetadataStore

METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS: Final = {
    # Revalidated each time: after an update of the server, a cached old page would call a new
    # protocol. The entity tag makes that cheap.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
ROUTES: Final = (*p.ROUTES.values(), *p.SGLANG_ROUTES.values(), p.HISTORY_ROUTE)


def create_app(
    service: MetadataService,
    store: MetadataStore,
    *,
    security: Security | None = None,
    clock: Callable[[], float] | None = None,
    handlers: Handlers | None = None,
) -> ProtocolApp:
    """Application of one service, which was restored from its store.

    By default everything is permitted, and the clock is that of the machine; a shared store has
    `handlers` of its own.
    """
    app = ProtocolApp(
        handlers or Handlers(service, clock or SteadyClock()), store, security or Security(service)
    )
    assets = Assets()
    app.pages = Starlette(
        routes=[*_pages(app), Route("/", assets.index), Mount(STATUS_PAGE, assets)],
        # A wrong method is an unknown route as well, as in the protocol's own routes.
        exception_handlers={404: _unknown, 405: _unknown},
        lifespan=app.running,
    )
    return app


def _pages(app: ProtocolApp) -> list[Route]:
    described = openapi(app.service.about.server.rpartition(" ")[2])

    async def healthz(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def readyz(request: Request) -> Response:
        problem = app.handlers.problem()
        if not problem:
            return JSONResponse({"status": "ok"})
        code = "draining" if app.service.draining else "unavailable"
        return Response(p.encode(p.Problem(code=code, message=problem)), 503, media_type=p.JSON)

    async def description(request: Request) -> Response:
        return JSONResponse(described)

    async def metrics(request: Request) -> Response:
        return Response(app.metrics.text(), headers={"Content-Type": METRICS_TYPE})

    async def history(request: Request) -> Response:
        _, content_type = content_types(request.url.path, dict(request.scope["headers"]))
        text = request.query_params.get("after", "0")
        try:
            after = float(text)
        except ValueError:
            after = math.nan
        if math.isfinite(after):
            found = p.encode(app.recorder.history(after), content_type)
            return Response(found, media_type=content_type)
        refused = invalid(f"seconds since 1970, not {text[:40]!r}", "after")
        problem = p.encode(refused.problem, content_type)
        return Response(problem, refused.status, media_type=content_type)

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


class Assets(StaticFiles):
    """The files of the status page, with `HEADERS`.

    They contain no data, so they are served without a token; the page's scripts then call the
    protocol with the token that the user enters.
    """

    def __init__(self) -> None:
        super().__init__(packages=[("hicache_metadata_server.dashboard", "static")])

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response

    async def index(self, request: Request) -> Response:
        """The page at `/`."""
        return await self.get_response("index.html", request.scope)


def openapi(version: str) -> dict[str, Any]:
    """Build the OpenAPI document out of the table of routes."""
    # In one order: otherwise the document would differ from start to start.
    kinds: list[Any] = sorted(
        {p.Problem, *(kind for route in ROUTES for kind in (route.request, route.answer) if kind)},
        key=lambda kind: kind.__name__,
    )
    schemas, components = msgspec.json.schema_components(
        kinds, ref_template="#/components/schemas/{name}"
    )
    by_kind = dict(zip(kinds, schemas, strict=True))
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "HiCache metadata server",
            "version": version,
            "description": "See docs/metadata-protocol.md.",
        },
        "paths": {
            route.path: {route.method.lower(): _described(route, by_kind)} for route in ROUTES
        },
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _described(route: p.Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    # The part that is compatible with SGLang 0.5.23 is JSON alone.
    types = (p.JSON, p.MSGPACK) if route.path.startswith("/v2") else (p.JSON,)

    def body(kind: Any) -> dict[str, Any]:
        content = {name: {"schema": schemas[kind]} for name in types} if kind else {}
        return {"description": f"{kind.__name__ if kind else 'Done'}.", "content": content}

    parameters = [
        {"name": name, "in": place, "required": place == "path", "schema": {"type": kind}}
        for name, place, kind, is_taken in (
            ("rank", "path", "integer", "{rank}" in route.path),
            (p.IDEMPOTENCY_HEADER, "header", "string", route.changes),
            ("after", "query", "number", route.path == HISTORY),
        )
        if is_taken
    ]
    return {
        "summary": ((route.request or route.answer).__doc__ or "").partition("\n")[0],
        "description": f"Needs a token of {route.token} where the server has tokens.",
        # `{}` permits calls without a token: a server may have none.
        "security": [{}, {"token": []}],
        "parameters": parameters,
        **({"requestBody": {**body(route.request), "required": True}} if route.request else {}),
        "responses": {
            "200" if route.answer else "204" if len(types) > 1 else "2XX": body(route.answer),
            "default": body(p.Problem),
        },
    }
