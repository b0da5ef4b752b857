"""A right request to every route there is, made from the types of the routes: one that is added is
included by itself."""

from __future__ import annotations

import msgspec
from msgspec import inspect

from hicache_metadata_server.http.asgi import OPEN_PAGES, PAGES
from hicache_metadata_server.protocol import ROUTES, SGLANG_ROUTES, ReserveScope, Token

SCOPE = "0:kv"
VALUES = {"scope": SCOPE, "namespace": "kv", "model": "m", "num_pages": 64, "pages_to_release": []}
VALUES |= {"slots": [0], "keys": ["live"], "prefixes": [""], "enabled": True}
VALUES |= {name: [1] for name in ("lengths", "checksums", "generations")}
"""By field, of a server on which `prepared` was called."""


class AnyRequest(msgspec.Struct, frozen=True):
    """One request."""

    method: str
    path: str
    body: dict | None
    right: Token
    names_scope: bool
    open_to_tenants: bool

    @property
    def done(self) -> tuple[int, ...]:
        """Statuses that are no refusal for want of a right; the scope of the tests is in use, so
        that it cannot be dropped."""
        return (409,) if self.path == "/v2/drop" else (200, 204)


def every_route(*, lease):
    """A request to each, with a lease that is out."""
    values = VALUES | {"leases": [lease]}
    for path, route in ROUTES.items():
        body = filled(route.request, values) if route.request else None
        names = body is not None and bool({"scope", "scopes"} & set(body))
        yield AnyRequest(route.method, path, body, route.token, names, path != "/v2/drain")
    for operation, route in SGLANG_ROUTES.items():
        body = filled(route.request, values)
        if operation == "reserve_and_allocate_page_indices":
            body["keys"] = [["new", ""]]
        if operation == "confirm_write":
            body["written_keys_to_confirm"] = [["leased", 1]]
        yield AnyRequest("POST", f"/0/{operation}", body, route.token, True, True)
    for path in PAGES:
        yield AnyRequest("GET", path, None, Token.READ, False, path in OPEN_PAGES)


def filled(kind, values):
    """A message with all of its fields that have a value above, and no other that is optional."""
    body = {}
    for field in inspect.type_info(kind).fields:
        name = field.encode_name
        if name == "scopes":
            part = field.type.item_type
            body[name] = [
                filled(part.cls, values) if isinstance(part, inspect.StructType) else SCOPE
            ]
        elif name in values:
            body[name] = values[name]
        elif field.required:
            raise AssertionError(f"{kind.__name__}.{name} is new: give it a value here")
    if kind.__name__ == "ScopeGeometry":
        body["slots"] = 64
    if kind is ReserveScope:
        body["keys"] = ["new"]
    return body


async def prepared(caller, headers):
    """A scope with a live page and a leased one; returns the lease."""
    assert (await caller.initialize(SCOPE, slots=64, headers=headers)).status == 200
    assert (await caller.store(SCOPE, ["live"], headers=headers)).status == 200
    leased = await caller.reserve(SCOPE, ["leased"], headers=headers)
    return leased.json["scopes"][0]["leases"][0]


async def ask(caller, asked, headers):
    body = b"" if asked.body is None else msgspec.json.encode(asked.body)
    return await caller.send(asked.method, asked.path, body, headers=headers)
