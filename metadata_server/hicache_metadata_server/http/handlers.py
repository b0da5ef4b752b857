"""Request handlers: the routes, the decoding of bodies, the check of tenants, and what is done.

A handler runs in the event loop, without a thread and without an await: no request is long that is
within the limits. fsck runs in slices. A request that changes something is answered when its
changes are committed.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import xxhash

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import AnswerRecord
from hicache_metadata_server.core.errors import RequestError, invalid
from hicache_metadata_server.core.limits import ANYBODY, Caller
from hicache_metadata_server.core.sglang import SglangService

if TYPE_CHECKING:
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.group_commit import GroupCommit

TENANT_ROUTES: Final = frozenset(("/v2", "/v2/scopes"))
"""Routes without a scope that tenants may call; the list is filtered by tenant. All other routes
without a scope concern the whole server."""
MAX_CACHED_PATHS: Final = 4096
KEY_CHARACTERS: Final = 128
"""Characters of an idempotency key."""
_ENCODE: Final = {p.JSON: msgspec.json.encode, p.MSGPACK: msgspec.msgpack.encode}
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


class Response(NamedTuple):
    """One response, with its body encoded."""

    status: int
    content_type: str
    body: bytes
    retry_seconds: int = 0
    """For the header `Retry-After`; 0 omits it."""
    location: str = ""
    """For the header `Location`; empty omits it."""
    changes: bool = False
    """The response is sent after `Handlers.commit`."""


@dataclass(slots=True)
class ReceivedRequest:
    """A request: its head, checked and resolved, and its body, once it is decoded."""

    endpoint: Endpoint
    content_type: str
    response_type: str
    idempotency_key: str
    """Empty without one."""
    caller: Caller = ANYBODY
    message: Any = None
    digest: bytes = b""
    """Of route, content type and body; empty without an idempotency key."""


class Handlers:
    """Request handlers of one service.

    `group_commit` is set while the server runs; a service without a durable store has none.
    """

    def __init__(self, service: MetadataService, clock: Callable[[], float]) -> None:
        self.service = service
        self.clock = clock
        self.group_commit: GroupCommit | None = None
        self._sglang = sglang_operations(SglangService(service))
        self.endpoints = native_endpoints(service)
        """By path. Paths of the SGLang protocol contain a rank, so they are added when first used."""

    def endpoint(self, path: str) -> Endpoint:
        """Look up the endpoint of a path.

        Raises:
            RequestError: 404 without such a route, 422 for a rank that is no number.
        """
        found = self.endpoints.get(path)
        if found is None:
            found = self._sglang_endpoint(path)
            # Ranks come from the client: without a bound, a client could fill the memory with paths.
            if len(self.endpoints) < MAX_CACHED_PATHS:
                self.endpoints[path] = found
        return found

    def read(self, request: ReceivedRequest, body: bytes) -> None:
        """Decode a body and check the tenant of the scopes in it.

        Raises:
            RequestError: the body cannot be decoded, a scope belongs to another tenant, or the
                idempotency key is malformed.
        """
        endpoint, caller = request.endpoint, request.caller
        # A GET has no body; a content type that it sends anyway only selects the answer's.
        if endpoint.body is not None:
            request.message = endpoint.body.decode(body, request.content_type)
        if not caller.sees_all:
            self._check_tenant(endpoint, request.message, caller)
        if request.idempotency_key and endpoint.route.changes:
            if len(request.idempotency_key) > KEY_CHARACTERS:
                message = f"an idempotency key of more than {KEY_CHARACTERS} characters"
                raise invalid(message, p.IDEMPOTENCY_HEADER)
            # Keys are per tenant: with a shared namespace, a tenant could read another one's answer
            # by guessing its key. A header cannot contain a carriage return, so the prefix is
            # unambiguous.
            if caller.tenant:
                request.idempotency_key = f"{caller.tenant}\r{request.idempotency_key}"
            head = f"{endpoint.name} {request.content_type} ".encode()
            request.digest = xxhash.xxh3_128_digest(head + body)

    def names(self, request: ReceivedRequest) -> Sequence[str]:
        """Scope names in a request that was read."""
        names = request.endpoint.names
        return names(request.message)[0] if names is not None else ()

    def start(self, request: ReceivedRequest) -> Response | None:
        """Run a request at once; None if it takes longer (`run_later`).

        Raises:
            RequestError: the request was refused, and changed nothing.
        """
        endpoint, message = request.endpoint, request.message
        answers = self.service.answers
        if request.digest and (
            kept := answers.find(request.idempotency_key, request.digest, self.clock())
        ):
            # The first request may still be in the current commit group: its answer, repeated
            # before the commit, would promise changes that a crash can lose.
            return Response(kept.status, kept.content_type, kept.body, changes=True)
        if isinstance(message, p.Fsck):
            return None
        try:
            if endpoint.takes_caller:
                answer = endpoint.do(message, self.clock(), request.caller)
            else:
                answer = endpoint.do(message, self.clock())
        except RequestError as refused:
            # A refused confirm of the SGLang protocol has confirmed the other pages, so there may
            # be changes to commit even so.
            return refusal(refused, request.response_type)._replace(changes=endpoint.changes)
        response = self._response(answer, request, changes=endpoint.changes)
        if request.digest:
            answers.add(
                AnswerRecord(
                    request.idempotency_key,
                    self.clock() + answers.seconds,
                    request.digest,
                    response.content_type,
                    response.status,
                    response.body,
                    next(iter(self.names(request)), ""),
                )
            )
        return response

    async def run_later(self, request: ReceivedRequest) -> Response:
        """Run a request that `start` has left: fsck, between whose slices others are served.

        Raises:
            RequestError: the request was refused.
        """
        checked: p.FsckReport | None = None
        slices = request.endpoint.do(request.message, self.clock(), request.caller)
        for checked in slices:  # noqa: B007 - the last one is the result
            await asyncio.sleep(0)
        return self._response(checked, request)

    def commit(self) -> asyncio.Future[None] | None:
        """Commit all changes so far with the next group; None if they are durable already.

        The future raises StoreError if they could not be written.
        """
        if self.group_commit is None:
            self.service.forget_changes()
            return None
        return self.group_commit.flush()

    # Background work and state. The handlers of a shared store override these.

    def fenced(self, scopes: Sequence[str]) -> None:
        """Forget scopes that another server owns by now; called by the group commit."""

    async def tick(self, slots: int) -> bool:
        """Expire leases and quarantines of about `slots` slots; True if more are due."""
        return self.service.settle(self.clock(), slots)

    async def hand_over(self) -> None:
        """Give everything to other servers that they can serve; connections are closed later."""

    async def close(self) -> None:
        """Commit the remaining changes; called after the last request."""
        if self.group_commit is not None:
            await self.group_commit.close()

    def problem(self) -> str:
        """Reason why the server is not ready, or ""."""
        if self.group_commit is not None and self.group_commit.error is not None:
            return f"changes are refused: {self.group_commit.error}"
        return "this server drains: it gives no new leases" if self.service.draining else ""

    def store_fails(self) -> bool:
        """True if the store takes no changes."""
        return self.group_commit is not None and self.group_commit.error is not None

    def unowned_scopes(self) -> int:
        """Number of scopes in the store that no server serves."""
        return 0

    def _check_tenant(self, endpoint: Endpoint, message: Any, caller: Caller) -> None:
        if endpoint.names is not None:
            self.service.check_access(caller, *endpoint.names(message))
        elif endpoint.name not in TENANT_ROUTES:
            message = (
                f"{endpoint.name} is about the whole server, and needs a token without a tenant"
            )
            raise RequestError(403, "forbidden", message, "Authorization")

    def _response(
        self, answer: Any, request: ReceivedRequest, *, changes: bool = False
    ) -> Response:
        response_type = request.response_type
        status, body = (204, b"") if answer is None else (200, _ENCODE[response_type](answer))
        return Response(status, response_type, body, changes=changes)

    def _sglang_endpoint(self, path: str) -> Endpoint:
        empty, _, rest = path.partition("/")
        rank, _, operation = rest.partition("/")
        if empty or operation not in p.SGLANG_ROUTES:
            raise RequestError(404, "unknown_route", f"there is no {path!r}")
        if not (rank.isascii() and rank.isdecimal() and len(rank) <= 9):
            raise invalid(f"a rank is a natural number of at most 9 digits, not {rank!r}", "rank")
        route, name = p.SGLANG_ROUTES[operation], f"{int(rank)}:"
        do, body = self._sglang[operation]
        return Endpoint(
            name=route.path,
            route=route,
            body=body,
            do=partial(do, int(rank)),
            takes_caller=operation == "initialize",
            changes=route.token is p.Token.WRITE,
            names=lambda message: ((name + message.namespace,), "namespace"),
            audited=operation == "clear",
        )


def refusal(refused: RequestError, content_type: str) -> Response:
    """Response for a refused request."""
    return Response(
        refused.status,
        content_type,
        p.encode(refused.problem, content_type),
        refused.retry_seconds,
        refused.location,
    )


def native_endpoints(service: MetadataService) -> dict[str, Endpoint]:
    """Routes of the v2 protocol, by path."""

    def about(_: None, now: float) -> p.About:
        return service.about

    def list_scopes(_: None, now: float, caller: Caller) -> p.Scopes:
        return service.list_scopes(caller, now)

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
        row("/v2/touch", service.touch),
        row("/v2/delete", service.delete),
        row("/v2/clear", service.clear, audited=True),
        # Answered with the next group: a crash must not bring back what was reported as removed.
        row("/v2/removals", service.collect_removals, changes=True),
        row("/v2/drop", service.drop, changes=True, audited=True),
        row("/v2/scopes", list_scopes, takes_caller=True),
        row("/v2/inspect", service.inspect),
        # A generator, whose slices `Handlers.run_later` runs.
        row("/v2/fsck", service.fsck, takes_caller=True),
        row("/v2/drain", service.drain),
    )
    return {endpoint.name: endpoint for endpoint in rows}


def sglang_operations(sglang: SglangService) -> dict[str, tuple[Operation, BodyDecoder]]:
    """Operations of SGLang's protocol, which are called with the rank first, and their bodies."""
    operations: dict[str, Operation] = {
        "initialize": sglang.initialize,
        "exists": sglang.exists,
        "get_page_indices": sglang.get_page_indices,
        "reserve_and_allocate_page_indices": sglang.reserve_and_allocate_page_indices,
        "confirm_write": sglang.confirm_write,
        "delete_keys": sglang.delete_keys,
        "clear": sglang.clear,
    }
    return {
        operation: (operations[operation], BodyDecoder(route.request, (p.JSON,)))
        for operation, route in p.SGLANG_ROUTES.items()
        if route.request
    }


def _names_in(kind: type[msgspec.Struct]) -> ScopeNames | None:
    """Accessor of scope names in messages of a type: `scope`, `scopes` or its parts."""
    fields = kind.__struct_fields__
    if kind in LISTS_NAMES:
        return lambda message: (message.scopes, "scopes[{}]")
    if "scopes" in fields:
        return lambda message: ([part.scope for part in message.scopes], "scopes[{}].scope")
    if "scope" in fields:
        return lambda message: ((message.scope,), "scope")
    return None
