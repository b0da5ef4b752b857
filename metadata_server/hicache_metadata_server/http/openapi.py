"""OpenAPI description, generated from the types that the server decodes.

Not by FastAPI, which does not know msgspec's types, and would have to serve the routes itself.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.protocol.history import AFTER
from hicache_metadata_server.protocol.history import PATH as HISTORY
from hicache_metadata_server.protocol.history import ROUTE as HISTORY_ROUTE

TEMPLATE: Final = "#/components/schemas/{name}"
STATUSES: Final = {
    400: "The body cannot be read.",
    401: "No token, or an unknown one.",
    403: "The token does not permit this, the scope is another tenant's, or the tenant is at its "
    "quota.",
    404: "The scope is not initialized.",
    409: "The scope has another value, or the slot is not reserved for the key.",
    413: "Beyond the limits.",
    415: "Neither JSON nor msgpack.",
    422: "A field is missing, unknown, of the wrong type or out of range.",
    429: "The tenant sends more requests a second than it may; `Retry-After` says when to come "
    "again.",
    503: "The server drains, or its store cannot be written.",
}
_SUMMARIES: Final = {
    "/v2": "Protocol, server, instance, durability, limits",
    "/v2/scopes": "Every scope, its geometry, its slots by state",
    HISTORY: "What the server did over time, and its slowest calls; not every server has it",
}


def openapi(version: str) -> dict[str, Any]:
    """Build the OpenAPI document."""
    kinds: set[Any] = {p.Problem}
    routes = {**p.ROUTES, HISTORY: HISTORY_ROUTE}
    for route in routes.values():
        kinds |= {kind for kind in (route.request, route.answer) if kind is not None}
    kinds |= {kind for kind, _ in p.SGLANG_ROUTES.values()}
    # In one order: otherwise the document would differ from start to start.
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=TEMPLATE)
    by_kind = dict(zip(ordered, schemas, strict=True))
    paths: dict[str, Any] = {}
    for path, route in routes.items():
        paths[path] = {route.method.lower(): _native(path, route, by_kind)}
    paths[HISTORY]["get"]["parameters"] = [
        {"name": AFTER, "in": "query", "schema": {"type": "number", "default": 0}}
    ]
    for operation, (kind, token) in p.SGLANG_ROUTES.items():
        paths[f"/{{rank}}/{operation}"] = {"post": _compatible(kind, token, by_kind)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "HiCache metadata server",
            "version": version,
            "description": "See docs/metadata-protocol.md.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _native(path: str, route: p.Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    # The docstring of a request type begins with its route: "`POST /v2/lookup`: summary".
    doc = (route.request.__doc__ or "").partition("`: ")[2] if route.request else _SUMMARIES[path]
    described: dict[str, Any] = {
        "tags": ["native"],
        "summary": doc.partition("\n")[0],
        "description": f"Needs a token of {route.token} where the server has tokens.",
        # `{}` permits calls without a token: a server may have none.
        "security": [{}, {"token": []}],
        "responses": {**_answer(schemas.get(route.answer)), **_refusals(schemas)},
    }
    if route.request is not None:
        described["requestBody"] = _body(schemas[route.request], p.JSON, p.MSGPACK)
    if route.changes:
        described["parameters"] = [
            {
                "name": p.IDEMPOTENCY_HEADER,
                "in": "header",
                "schema": {"type": "string", "maxLength": 128},
            }
        ]
    return described


def _compatible(kind: Any, token: p.Token, schemas: dict[Any, Any]) -> dict[str, Any]:
    return {
        "tags": ["compatible with SGLang 0.5.23"],
        "description": f"Needs a token of {token} where the server has tokens.",
        "security": [{}, {"token": []}],
        "parameters": [
            {
                "name": "rank",
                "in": "path",
                "required": True,
                "schema": {"type": "integer", "minimum": 0, "maximum": 999_999_999},
            }
        ],
        "requestBody": _body(schemas[kind], p.JSON),
        "responses": {
            "200": {"description": "Done."},
            "204": {"description": "Done."},
            **_refusals(schemas),
        },
    }


def _body(schema: Any, *content_types: str) -> dict[str, Any]:
    return {
        "required": True,
        "content": {content_type: {"schema": schema} for content_type in content_types},
    }


def _answer(schema: Any) -> dict[str, Any]:
    if schema is None:
        return {"204": {"description": "Done."}}
    return {
        "200": {
            "description": "Done.",
            "content": {kind: {"schema": schema} for kind in (p.JSON, p.MSGPACK)},
        }
    }


def _refusals(schemas: dict[Any, Any]) -> dict[str, Any]:
    problem = {p.JSON: {"schema": schemas[p.Problem]}}
    return {
        str(status): {"description": text, "content": problem} for status, text in STATUSES.items()
    }
