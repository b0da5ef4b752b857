"""Table of the routes: decoder of the body, method, right, and the function that does it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import RequestError, invalid

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.core.sglang import SglangService
    from hicache_metadata_server.core.tenants import Caller

LISTS_NAMES: Final = (p.Clear, p.Drop, p.Fsck)
"""Messages whose `scopes` holds names; in all others it holds parts."""

_NAMED: Final = re.compile(r"Object (?:missing required|contains unknown) field `(.*)`")

Operation = Callable[..., Any]
"""Called with message and time, or with message, time and caller."""
ScopeNames = Callable[[Any], tuple[Sequence[str], str]]
"""Scope names in a message, and a template of the field that holds them (`{}` is the index)."""


class BodyDecoder:
    """Decoder of the bodies of one route.

    Refusing a body costs at most twice as much as decoding it.
    """

    def __init__(self, kind: type[msgspec.Struct], content_types: tuple[str, ...]) -> None:
        # Made once for each route: building a decoder costs more than decoding a short body.
        self._decoders: dict[str, msgspec.json.Decoder[Any] | msgspec.msgpack.Decoder[Any]] = {
            p.JSON: msgspec.json.Decoder(kind),
            p.MSGPACK: msgspec.msgpack.Decoder(kind),
        }
        self._content_types = content_types

    def decode(self, body: bytes, content_type: str) -> Any:
        """Decode a body.

        Raises:
            RequestError: 400, 415 or 422; the body is invalid.
        """
        if content_type not in self._content_types:
            raise RequestError(
                415, "media_type", f"bodies are {' or '.join(self._content_types)}", "Content-Type"
            )
        try:
            return self._decoders[content_type].decode(body)
        except msgspec.ValidationError as error:
            raise self._invalid(error, body, content_type) from error
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise RequestError(
                400, "malformed", f"the body cannot be read: {error}", "body"
            ) from error

    def _invalid(
        self, error: msgspec.ValidationError, body: bytes, content_type: str
    ) -> RequestError:
        # What is behind the wrong field may be no JSON at all.
        try:
            msgspec.json.decode(body) if content_type == p.JSON else msgspec.msgpack.decode(body)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as unreadable:
            return RequestError(400, "malformed", f"the body cannot be read: {unreadable}", "body")
        message, _, path = str(error).partition(" - at `$")
        field = path.removesuffix("`")
        # A field that is missing or unknown is not part of msgspec's path.
        if named := _NAMED.match(message):
            field += f".{named[1]}"
        return invalid(message, field.lstrip("."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One route."""

    name: str
    """Path, and label in metrics."""
    route: p.Route
    body: BodyDecoder | None = None
    do: Operation
    takes_caller: bool = False
    """`do` is called with the caller, too."""
    changes: bool = False
    names: ScopeNames | None = None
    """None for a route that names no scope."""
    audited: bool = False
    """Written to the audit log: all routes that need an admin token, and those that empty scopes."""


def native_endpoints(service: MetadataService) -> dict[str, Endpoint]:
    """Routes of the v2 protocol, by path."""

    def about(_: None, now: float) -> p.About:
        return service.about

    def list_scopes(_: None, now: float, caller: Caller) -> p.Scopes:
        return service.list_scopes(caller, now)

    def fsck(request: p.Fsck, now: float, caller: Caller) -> Iterator[p.FsckReport | None]:
        return service.fsck(request, caller)

    def row(path: str, do: Operation, **more: Any) -> Endpoint:
        route = p.ROUTES[path]
        kind = route.request
        # A route that accepts a key changes something; some change something without one.
        fields = {"changes": route.changes, "audited": route.token is p.Token.ADMIN, **more}
        return Endpoint(
            name=path,
            route=route,
            body=BodyDecoder(kind, (p.JSON, p.MSGPACK)) if kind else None,
            do=do,
            names=_names_in(kind) if kind else None,
            **fields,
        )

    rows = (
        row("/v2", about),
        row("/v2/initialize", service.initialize, takes_caller=True),
        row("/v2/describe", service.describe, changes=True),
        row("/v2/lookup", service.lookup),
        row("/v2/reserve", service.reserve),
        row("/v2/commit", service.commit),
        row("/v2/abort", service.abort),
        row("/v2/renew", service.renew),
        row("/v2/unpin", service.unpin, takes_caller=True, changes=True),
        row("/v2/touch", service.touch),
        row("/v2/delete", service.delete),
        row("/v2/clear", service.clear, audited=True),
        row("/v2/drop", service.drop, changes=True, audited=True),
        row("/v2/scopes", list_scopes, takes_caller=True),
        row("/v2/inspect", service.inspect),
        # The function is a generator, whose slices `Handlers.run_later` runs.
        row("/v2/fsck", fsck, takes_caller=True),
        row("/v2/drain", service.drain),
    )
    return {endpoint.name: endpoint for endpoint in rows}


class SglangEndpoints:
    """Routes of SGLang's protocol, whose paths contain a rank."""

    def __init__(self, sglang: SglangService) -> None:
        self._operations: dict[str, Operation] = {
            "initialize": sglang.initialize,
            "exists": sglang.exists,
            "get_page_indices": sglang.get_page_indices,
            "reserve_and_allocate_page_indices": sglang.reserve_and_allocate_page_indices,
            "confirm_write": sglang.confirm_write,
            "delete_keys": sglang.delete_keys,
            "clear": sglang.clear,
        }
        self._decoders = {
            operation: BodyDecoder(route.request, (p.JSON,))
            for operation, route in p.SGLANG_ROUTES.items()
            if route.request
        }

    def endpoint(self, rank: int, operation: str) -> Endpoint:
        """Route of one rank."""
        route = p.SGLANG_ROUTES[operation]
        return Endpoint(
            name=route.path,
            route=route,
            body=self._decoders[operation],
            do=partial(self._operations[operation], rank),
            takes_caller=operation == "initialize",
            changes=route.token is p.Token.WRITE,
            names=partial(_name_of_rank, rank),
            audited=operation == "clear",
        )


def _names_in(kind: type[msgspec.Struct]) -> ScopeNames | None:
    """Accessor of scope names in messages of a type: `scope`, `scopes` or its parts."""
    fields = kind.__struct_fields__
    if "scopes" in fields:
        return _names_in_list if kind in LISTS_NAMES else _names_of_parts
    return _name_of_one if "scope" in fields else None


def _names_of_parts(message: Any) -> tuple[Sequence[str], str]:
    return [part.scope for part in message.scopes], "scopes[{}].scope"


def _names_in_list(message: Any) -> tuple[Sequence[str], str]:
    return message.scopes, "scopes[{}]"


def _name_of_one(message: Any) -> tuple[Sequence[str], str]:
    return (message.scope,) if message.scope else (), "scope"


def _name_of_rank(rank: int, message: Any) -> tuple[Sequence[str], str]:
    return (f"{rank}:{message.namespace}",), "namespace"
