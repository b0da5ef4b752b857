"""OpenAPI description, generated from the routes of the protocol and the types that they name."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.protocol import AFTER, HISTORY, Route

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
_AFTER: Final = {"name": AFTER, "in": "query", "schema": {"type": "number", "default": 0}}
_SUMMARIES: Final = {
    "/v2": "Protocol, server, instance, durability, limits",
    "/v2/scopes": "Every scope, its geometry, its slots by state",
    HISTORY: "What the server did over time, and its slowest calls; not every server has it",
}


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


def _described(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
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
