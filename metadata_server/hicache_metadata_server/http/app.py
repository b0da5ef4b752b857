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
TEMPLATE: Final = "#/components/schemas/{name}"
ROUTES: Final = (*p.ROUTES.values(), *p.SGLANG_ROUTES.values(), p.HISTORY_ROUTE)
_DONE: Final = {"description": "Done."}
_RANK: Final = {
    "name": "rank",
    "in": "path",
    "required": True,
    "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
}
_IDEMPOTENCY_KEY: Final = {
    "name": p.IDEMPOTENCY_HEADER,
    "in": "header",
    "schema": {"type": "string", "maxLength": 128},
}
_AFTER: Final = {"name": "after", "in": "query", "schema": {"type": "number", "default": 0}}
_SUMMARIES: Final = {
    "/v2": "Protocol, server, instance, durability, limits",
    "/v2/scopes": "Every scope, its geometry, its slots by state",
    HISTORY: "What the server did over time, and its slowest calls; not every server has it",
}


def create_app(
    service: MetadataService,
    store: MetadataStore,
    *,
    security: Security | None = None,
    clock: Callable[[], float] | None = None,
    handlers: Handlers | None = None,
) -> ProtocolApp:
    """Application of one service, which was restored from its store.

    Requests are traced if tracing is enabled before this call. By default everything is permitted,
    and the clock is that of the machine; a shared store has `handlers` of its own.
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
    """Build the OpenAPI document."""
    kinds: set[Any] = {p.Problem}
    for route in ROUTES:
        kinds |= {kind for kind in (route.request, route.answer) if kind is not None}
    # In one order: otherwise the document would differ from start to start.
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=TEMPLATE)
    by_kind = dict(zip(ordered, schemas, strict=True))
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
    is_native = route.path.startswith("/v2")
    both = (p.JSON, p.MSGPACK)
    described: dict[str, Any] = {
        "tags": ["native" if is_native else "compatible with SGLang 0.5.23"],
        "description": f"Needs a token of {route.token} where the server has tokens.",
        # `{}` permits calls without a token: a server may have none.
        "security": [{}, {"token": []}],
        "responses": {
            "default": {
                "description": "Refused; `code` and `field` say why.",
                "content": _content(schemas[p.Problem], p.JSON),
            }
        },
        "parameters": [],
    }
    if route.answer is not None:
        described["responses"]["200"] = {**_DONE, "content": _content(schemas[route.answer], *both)}
    elif is_native:
        described["responses"]["204"] = _DONE
    else:
        described["responses"] |= {"200": _DONE, "204": _DONE}
        described["parameters"].append(_RANK)
    if route.request is not None:
        content_types = both if is_native else (p.JSON,)
        content = _content(schemas[route.request], *content_types)
        described["requestBody"] = {"required": True, "content": content}
    if is_native:
        # The docstring of a request type begins with its route: "`POST /v2/lookup`: summary".
        text = (route.request.__doc__ or "").partition("`: ")[2] if route.request else ""
        described["summary"] = text.partition("\n")[0] or _SUMMARIES[route.path]
    if route.changes:
        described["parameters"].append(_IDEMPOTENCY_KEY)
    if route.path == HISTORY:
        described["parameters"].append(_AFTER)
    return described


def _content(schema: Any, *content_types: str) -> dict[str, Any]:
    return {content_type: {"schema": schema} for content_type in content_types}
