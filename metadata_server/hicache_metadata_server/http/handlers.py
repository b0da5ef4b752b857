"""Request handlers: decode requests, check their tenants, and run them.

A handler runs in the event loop, without a thread and without an await: no request is long that is
within the limits. fsck runs in slices. A request that changes something is answered when its
changes are committed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import AnswerRecord, check_idempotency_key, digest_of
from hicache_metadata_server.core.errors import RequestError, invalid
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.core.tenants import ANYBODY, Caller
from hicache_metadata_server.http.routes import Endpoint, SglangEndpoints, native_endpoints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.group_commit import GroupCommit

TENANT_ROUTES: Final = frozenset(("/v2", "/v2/scopes", "/v2/unpin"))
"""Routes without a scope that tenants may call; their operations filter by tenant. All other routes
without a scope concern the whole server."""
MAX_CACHED_PATHS: Final = 4096

_ENCODERS: Final[dict[str, msgspec.json.Encoder | msgspec.msgpack.Encoder]] = {
    p.JSON: msgspec.json.Encoder(),
    p.MSGPACK: msgspec.msgpack.Encoder(),
}


class Response(NamedTuple):
    """One response, with its body encoded."""

    status: int
    content_type: str
    body: bytes
    retry_seconds: int = 0
    """For the header `Retry-After`; 0 omits it."""
    location: str = ""
    """For the header `Location`; empty omits it."""


class DecodedRequest(NamedTuple):
    """A request with its body decoded and its tenant checked."""

    endpoint: Endpoint
    message: Any
    content_type: str
    idempotency_key: str = ""
    digest: bytes = b""
    """Of route, content type and body; empty without an idempotency key."""
    caller: Caller = ANYBODY


class Result(NamedTuple):
    """Immediate result of a request."""

    response: Response
    changes: bool
    """The response is sent after `Handlers.commit`."""


class Handlers:
    """Request handlers of one service.

    `group_commit` is set while the server runs; a service without a durable store has none.
    """

    def __init__(self, service: MetadataService, clock: Callable[[], float]) -> None:
        self.service = service
        self.clock = clock
        self.group_commit: GroupCommit | None = None
        self._sglang = SglangEndpoints(SglangService(service))
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

    def read(
        self,
        endpoint: Endpoint,
        body: bytes,
        content_type: str,
        idempotency_key: str,
        caller: Caller = ANYBODY,
    ) -> DecodedRequest:
        """Decode a body and check the tenant of the scopes in it.

        Raises:
            RequestError: the body cannot be decoded, a scope belongs to another tenant, or the
                idempotency key is malformed.
        """
        if endpoint.body is None:
            # A GET has no body; a content type that it sends anyway only selects the answer's.
            if not caller.sees_all:
                self._check_tenant(endpoint, None, caller)
            return DecodedRequest(
                endpoint, None, p.MSGPACK if content_type == p.MSGPACK else p.JSON, caller=caller
            )
        message = endpoint.body.decode(body, content_type)
        if not caller.sees_all:
            self._check_tenant(endpoint, message, caller)
        if not idempotency_key or not endpoint.route.changes:
            return DecodedRequest(endpoint, message, content_type, caller=caller)
        check_idempotency_key(idempotency_key)
        # Keys are per tenant: with a shared namespace, a tenant could read another one's answer by
        # guessing its key. A header cannot contain a carriage return, so the prefix is unambiguous.
        if caller.tenant:
            idempotency_key = f"{caller.tenant}\r{idempotency_key}"
        return DecodedRequest(
            endpoint,
            message,
            content_type,
            idempotency_key,
            digest_of(endpoint.name, content_type, body),
            caller,
        )

    def names(self, request: DecodedRequest) -> Sequence[str]:
        """Scope names in a request, for the audit log."""
        names = request.endpoint.names
        return names(request.message)[0] if names is not None else ()

    def start(self, request: DecodedRequest) -> Result | None:
        """Run a request at once; None if it takes longer (`run_later`).

        Raises:
            RequestError: the request was refused, and changed nothing.
        """
        endpoint, message = request.endpoint, request.message
        if (kept := self._find_answer(request)) is not None:
            # The first request may still be in the current commit group: its answer, repeated
            # before the commit, would promise changes that a crash can lose.
            return Result(kept, True)
        if isinstance(message, p.Fsck):
            return None
        changes = endpoint.changes or (isinstance(message, p.Lookup) and message.pin_seconds > 0)
        try:
            if endpoint.takes_caller:
                answer = endpoint.do(message, self.clock(), request.caller)
            else:
                answer = endpoint.do(message, self.clock())
            response = self._response(answer, request.content_type)
        except RequestError as refused:
            # A refused confirm of the SGLang protocol has confirmed the other pages, so there may
            # be changes to commit even so.
            return Result(refusal(refused, request.content_type), changes)
        self._keep_answer(request, response)
        return Result(response, changes)

    async def run_later(self, request: DecodedRequest) -> Response:
        """Run a request that `start` has left: fsck, between whose slices others are served.

        Raises:
            RequestError: the request was refused.
        """
        checked: p.FsckReport | None = None
        slices = request.endpoint.do(request.message, self.clock(), request.caller)
        for checked in slices:  # noqa: B007 - the last one is the result
            await asyncio.sleep(0)
        return self._response(checked, request.content_type)

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

    def _response(self, answer: Any, content_type: str) -> Response:
        if answer is None:
            return Response(204, content_type, b"")
        return Response(200, content_type, _ENCODERS[content_type].encode(answer))

    def _find_answer(self, request: DecodedRequest) -> Response | None:
        if not request.digest:
            return None
        kept = self.service.answers.find(request.idempotency_key, request.digest, self.clock())
        return Response(kept.status, kept.content_type, kept.body) if kept is not None else None

    def _keep_answer(self, request: DecodedRequest, response: Response) -> None:
        if request.digest:
            until = self.clock() + self.service.answers.seconds
            self.service.answers.add(
                AnswerRecord(
                    request.idempotency_key,
                    until,
                    request.digest,
                    response.content_type,
                    response.status,
                    response.body,
                    next(iter(self.names(request)), ""),
                )
            )

    def _sglang_endpoint(self, path: str) -> Endpoint:
        empty, _, rest = path.partition("/")
        rank, _, operation = rest.partition("/")
        if empty or operation not in p.SGLANG_ROUTES:
            raise RequestError(404, "unknown_route", f"there is no {path!r}")
        if not (rank.isascii() and rank.isdecimal() and len(rank) <= 9):
            raise invalid(f"a rank is a natural number of at most 9 digits, not {rank!r}", "rank")
        return self._sglang.endpoint(int(rank), operation)


def refusal(refused: RequestError, content_type: str) -> Response:
    """Response for a refused request."""
    return Response(
        refused.status,
        content_type,
        p.encode(refused.problem, content_type),
        refused.retry_seconds,
        refused.location,
    )
