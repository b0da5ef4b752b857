"""OpenAPI description, generated from the table of routes and the types that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.http.routes import Endpoint
from hicache_metadata_server.protocol import AFTER, HISTORY, HISTORY_ROUTE

if TYPE_CHECKING:
    from collections.abc import Iterable

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
_ANY_ANSWER: Final = {"200": {"description": "Done."}, "204": {"description": "Done."}}
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
_SUMMARIES: Final = {
    "/v2": "Protocol, server, instance, durability, limits",
    "/v2/scopes": "Every scope, its geometry, its slots by state",
    HISTORY: "What the server did over time, and its slowest calls; not every server has it",
}


def openapi(version: str, endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Build the OpenAPI document of the routes, and of the history."""
    table = list(endpoints)
    history = Endpoint(
        name=HISTORY,
        method=HISTORY_ROUTE.method,
        token=HISTORY_ROUTE.token,
        answer=HISTORY_ROUTE.answer,
        do=lambda: None,
    )
    kinds: set[Any] = {p.Problem}
    for endpoint in (*table, history):
        kinds |= {kind for kind in (endpoint.request, endpoint.answer) if kind is not None}
    # In one order: otherwise the document would differ from start to start.
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    schemas, components = msgspec.json.schema_components(ordered, ref_template=TEMPLATE)
    by_kind = dict(zip(ordered, schemas, strict=True))
    paths = {
        endpoint.name: {endpoint.method.lower(): _described(endpoint, by_kind)}
        for endpoint in (*table, history)
    }
    paths[HISTORY]["get"]["parameters"] = [
        {"name": AFTER, "in": "query", "schema": {"type": "number", "default": 0}}
    ]
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


def _described(endpoint: Endpoint, schemas: dict[Any, Any]) -> dict[str, Any]:
    is_native = endpoint.name.startswith("/v2")
    described: dict[str, Any] = {
        "tags": ["native" if is_native else "compatible with SGLang 0.5.23"],
        "description": f"Needs a token of {endpoint.token} where the server has tokens.",
        # `{}` permits calls without a token: a server may have none.
        "security": [{}, {"token": []}],
        "responses": {
            **(_answer(schemas.get(endpoint.answer)) if is_native else _ANY_ANSWER),
            **_refusals(schemas),
        },
        "parameters": [],
    }
    if endpoint.request is not None:
        content_types = (p.JSON, p.MSGPACK) if is_native else (p.JSON,)
        described["requestBody"] = _body(schemas[endpoint.request], *content_types)
    if is_native:
        # The docstring of a request type begins with its route: "`POST /v2/lookup`: summary".
        text = (endpoint.request.__doc__ or "").partition("`: ")[2] if endpoint.request else ""
        described["summary"] = text.partition("\n")[0] or _SUMMARIES[endpoint.name]
    else:
        described["parameters"].append(_RANK)
    if endpoint.idempotent:
        described["parameters"].append(_IDEMPOTENCY_KEY)
    return described


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
