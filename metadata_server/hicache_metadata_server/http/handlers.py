"""Every route of the protocol: what it takes, whom it asks, and what has to be written before it
answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import AnswerRecord
from hicache_metadata_server.core.chunking import chunks_of, is_long, join_responses
from hicache_metadata_server.core.errors import RequestError, invalid
from hicache_metadata_server.core.idempotency import check_idempotency_key, digest_of
from hicache_metadata_server.core.sglang import SglangService
from hicache_metadata_server.core.tenants import ANYBODY, Caller
from hicache_metadata_server.http.decoding import CONTENT_TYPES, Body

if TYPE_CHECKING:
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.group_commit import GroupCommit

LONG_BODY: Final = 16_384
"""Shorter bodies are not looked at for whether they are long."""

OF_NO_SCOPE: Final = frozenset(("/v2", "/v2/scopes", "/v2/unpin"))
"""Routes that name no scope and are open to tenants, each of which keeps to what is its own. Others
are about the whole server."""
NAMED: Final = (p.Clear, p.Drop, p.Fsck)
"""Messages that have names of scopes where others have parts."""

Do = Callable[[Any, float], Any]
DoAs = Callable[[Any, float, Caller], Any]
Names = Callable[[Any], tuple[Sequence[str], str]]
"""The scopes that a message names, and its field for them, with `{}` for the number of one."""
_CODERS: Final[dict[str, msgspec.json.Encoder | msgspec.msgpack.Encoder]] = {
    p.JSON: msgspec.json.Encoder(),
    p.MSGPACK: msgspec.msgpack.Encoder(),
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One route."""

    name: str
    """As metrics call it."""
    method: str
    token: p.Token
    body: Body | None
    do: Do
    do_checked: Do | None = None
    """For requests that were checked; where there is one, long requests are done in pieces."""
    check: Callable[[Any], None] | None = None
    changes: bool = False
    once: bool = False
    """Takes an idempotency key."""
    names: Names | None = None
    """None of a route that names no scope."""
    do_as: DoAs | None = None
    """In the place of `do` where it matters who asks."""
    audited: bool = False
    """An operator wants to know who has done it: all that needs an admin token, and what empties
    scopes."""


@dataclass(frozen=True, slots=True)
class Said:
    """An answer."""

    status: int
    content_type: str
    body: bytes
    retry_seconds: int = 0
    """When to ask again; 0 where that is not said."""

    @property
    def ends_connection(self) -> bool:
        """Whether what is left of a body need not be read."""
        return self.status == 413


class Request(NamedTuple):
    """What somebody asks for, as it was read."""

    endpoint: Endpoint
    message: Any
    content_type: str
    is_long: bool = False
    """Done in pieces, so that others are served in between."""
    once: str = ""
    """The idempotency key."""
    digest: bytes = b""
    """Of a request that has one."""
    caller: Caller = ANYBODY


class Started(NamedTuple):
    """A request that was done, or refused."""

    said: Said
    changes: bool
    """It is told when what it has changed is written (`Desk.join`)."""


class Desk:
    """Answers requests. `group_commit` is set while the server runs; a service that keeps nothing
    has none."""

    def __init__(self, service: MetadataService, clock: Callable[[], float]) -> None:
        self.service, self.clock = service, clock
        self.group_commit: GroupCommit | None = None
        self._compatible = self._compatible_part()
        self._long = asyncio.Lock()
        self.native = {path: self._native_endpoint(path, route) for path, route in p.ROUTES.items()}
        self._operations = {name: self._bodies(name) for name in p.SGLANG_ROUTES}
        self._endpoints: dict[str, Endpoint] = dict(self.native)
        """Of paths that were asked for before."""

    def endpoint(self, path: str) -> Endpoint:
        """Who answers a path.

        Raises:
            RequestError: nobody.
        """
        found = self._endpoints.get(path)
        if found is None:
            found = self._compatible_endpoint(path)
            if len(self._endpoints) < 4096:
                self._endpoints[path] = found
        return found

    def read(
        self,
        endpoint: Endpoint,
        body: bytes,
        content_type: str,
        once: str,
        caller: Caller = ANYBODY,
    ) -> Request:
        """What a body asks an endpoint for.

        Raises:
            RequestError: it cannot be read, it is about what is another tenant's, or the
            idempotency key is none.
        """
        if endpoint.body is None:
            # Whatever a GET says of a body that it has not.
            self._check_tenant(endpoint, None, caller)
            return Request(
                endpoint, None, p.MSGPACK if content_type == p.MSGPACK else p.JSON, caller=caller
            )
        message = endpoint.body.decode(body, content_type)
        self._check_tenant(endpoint, message, caller)
        is_a_long_one = (
            len(body) > LONG_BODY and endpoint.do_checked is not None and is_long(message)
        )
        if not once or not endpoint.once:
            return Request(endpoint, message, content_type, is_a_long_one, caller=caller)
        check_idempotency_key(once)
        # No header has a carriage return in it, so that no tenant finds what another's key has been
        # answered.
        once = f"{caller.tenant}\r{once}" if caller.tenant else once
        return Request(
            endpoint,
            message,
            content_type,
            is_a_long_one,
            once,
            digest_of(endpoint.name, content_type, body),
            caller,
        )

    def names(self, request: Request) -> Sequence[str]:
        """The scopes that a request names."""
        names = request.endpoint.names
        return names(request.message)[0] if names is not None else ()

    def start(self, request: Request) -> Started | None:
        """Do what is asked for; None where that has to take turns with others (`in_turns`).

        Raises:
            RequestError: it was not done.
        """
        endpoint, message = request.endpoint, request.message
        if request.digest and (kept := self._kept(request.once, request.digest)) is not None:
            return Started(kept, True)
        if request.is_long or isinstance(message, p.Fsck):
            return None
        changes = endpoint.changes or (isinstance(message, p.Lookup) and message.pin_seconds > 0)
        try:
            if endpoint.do_as is not None:
                answer = endpoint.do_as(message, self.clock(), request.caller)
            else:
                answer = endpoint.do(message, self.clock())
            said = self._said(answer, request.content_type)
        except RequestError as refused:
            # A confirm that is refused has done the rest.
            return Started(refusal(refused, request.content_type), changes)
        self._remember(request.once, request.digest, said)
        return Started(said, changes)

    async def in_turns(self, request: Request) -> Said:
        """Do what `start` did not.

        Raises:
            RequestError: it was not done.
            StoreError: it was not written.
        """
        if isinstance(request.message, p.Fsck):
            return self._said(
                await self._fsck(request.message, request.caller), request.content_type
            )
        try:
            return await self._do_long(request)
        finally:
            if request.endpoint.changes:
                await self._written()

    def join(self) -> asyncio.Future[None] | None:
        """Done when all changes are written; None if nothing is."""
        if self.group_commit is None:
            self.service.forget_changes()
            return None
        return self.group_commit.flush()

    # What runs beside the requests; another kind of desk does it elsewhere.

    async def tick(self, slots: int) -> bool:
        """Do what is due, about so many slots of it; returns whether there is more."""
        return self.service.settle(self.clock(), slots)

    async def look(self) -> None:
        """See that `list_scopes` of the service tells how the scopes are."""

    async def close(self) -> None:
        """Write what is left; nobody asks for anything any more."""
        if self.group_commit is not None:
            await self.group_commit.close()

    def problem(self) -> str:
        """Why it is not ready, or ""."""
        if self.group_commit is not None and self.group_commit.error is not None:
            return f"changes are refused: {self.group_commit.error}"
        return "this server drains: it gives no new leases" if self.service.draining else ""

    def store_problem(self) -> str:
        """Of a store without group commit: the error of the last try, or ""."""
        return ""

    def _compatible_part(self) -> Any:
        return SglangService(self.service)

    def _check_tenant(self, endpoint: Endpoint, message: Any, caller: Caller) -> None:
        if caller.sees_all:
            return
        if endpoint.names is not None:
            self.service.tenants.check_access(caller, *endpoint.names(message))
        elif endpoint.name not in OF_NO_SCOPE:
            message = (
                f"{endpoint.name} is about the whole server, and needs a token without a tenant"
            )
            raise RequestError(403, "forbidden", message, "Authorization")

    async def _do_long(self, request: Request) -> Said:
        check = request.endpoint.check
        assert check is not None, "what is done in pieces is checked as a whole"
        # One at a time: several would make those who ask for little wait for a piece of each.
        async with self._long:
            # The same request may have come twice, and have waited for itself.
            if request.digest and (kept := self._kept(request.once, request.digest)) is not None:
                return kept
            check(request.message)
            said = self._said(await self._in_pieces(request), request.content_type)
            self._remember(request.once, request.digest, said)
        return said

    async def _fsck(self, request: p.Fsck, caller: Caller) -> p.FsckReport:
        """Check the invariants, while others are served."""
        checked: p.FsckReport | None = None
        for checked in self.service.fsck(request, caller):  # noqa: B007 - the last one is the answer
            await asyncio.sleep(0)
        assert checked is not None, "the last piece is the answer"
        return checked

    async def _in_pieces(self, request: Request) -> Any:
        """Others are served after each piece, and what it has changed is written, so that nobody
        waits for all of it."""
        pieces, answers = chunks_of(request.message), list[Any]()
        for number, piece in enumerate(pieces):
            # No header has a line feed in it, so that nobody else's idempotency key is this one.
            answers.append(self._do_piece(request, piece.request, f"{number}\n{request.once}"))
            if request.endpoint.changes:
                await self._written()
            await asyncio.sleep(0)
        return join_responses(pieces, answers)

    def _do_piece(self, request: Request, piece: Any, once: str) -> Any:
        """A piece of a request that a crash has cut short, and that is sent again, is not done
        again either."""
        do = request.endpoint.do_checked
        assert do is not None, "what is done in pieces is checked as a whole"
        if not request.digest:
            return do(piece, self.clock())
        kept = self._kept(once, request.digest)
        if kept is not None:
            return msgspec.msgpack.decode(kept.body, type=p.ROUTES[request.endpoint.name].answer)
        answer = do(piece, self.clock())
        self._remember(once, request.digest, self._said(answer, p.MSGPACK))
        return answer

    async def _written(self) -> None:
        written = self.join()
        if written is not None:
            await written

    def _said(self, answer: Any, content_type: str) -> Said:
        if answer is None:
            return Said(204, content_type, b"")
        return Said(200, content_type, _CODERS[content_type].encode(answer))

    def _kept(self, once: str, digest: bytes) -> Said | None:
        record = self.service.answers.find(once, digest, self.clock())
        return Said(record.status, record.content_type, record.body) if record is not None else None

    def _remember(self, once: str, digest: bytes, said: Said) -> None:
        if digest:
            until = self.clock() + self.service.answers.seconds
            self.service.answers.add(
                AnswerRecord(once, until, digest, said.content_type, said.status, said.body)
            )

    def _native_endpoint(self, path: str, route: p.Route) -> Endpoint:
        service, name = self.service, path.rpartition("/")[2]
        body = Body(route.request, CONTENT_TYPES, service.limits) if route.request else None
        fixed: dict[str, Do] = {
            "/v2": lambda _, now: service.about,
            "/v2/scopes": lambda _, now: service.list_scopes(),
            # Done in pieces by `_fsck`.
            "/v2/fsck": lambda request, now: None,
        }
        as_caller: dict[str, DoAs] = {
            "/v2/scopes": lambda _, now, caller: service.list_scopes(caller),
            "/v2/initialize": service.initialize,
            "/v2/unpin": service.unpin,
        }
        do = fixed.get(path) or getattr(service, name)
        changes = route.changes or path in ("/v2/describe", "/v2/unpin", "/v2/drop")
        checked: Do | None = getattr(service, f"do_{name}", None)
        return Endpoint(
            path,
            route.method,
            route.token,
            body,
            do,
            checked,
            service.check if checked else None,
            changes,
            route.changes,
            names=_names_in(route.request) if route.request else None,
            do_as=as_caller.get(path),
            audited=route.token is p.Token.ADMIN or name in ("clear", "drop"),
        )

    def _bodies(self, operation: str) -> tuple[Body, p.Token]:
        kind, token = p.SGLANG_ROUTES[operation]
        return Body(kind, (p.JSON,), self.service.limits), token

    def _compatible_endpoint(self, path: str) -> Endpoint:
        empty, _, rest = path.partition("/")
        rank, _, operation = rest.partition("/")
        known = self._operations.get(operation)
        if empty or known is None:
            raise RequestError(404, "unknown_route", f"there is no {path!r}")
        if not (rank.isascii() and rank.isdecimal() and len(rank) <= 9):
            raise invalid(f"a rank is a natural number of at most 9 digits, not {rank!r}", "rank")
        body, token = known
        run: Callable[[int, Any, float], Any] = getattr(self._compatible, operation)
        number = int(rank)
        changes = operation not in ("exists", "get_page_indices")
        can_be_long = operation in (
            "exists",
            "get_page_indices",
            "reserve_and_allocate_page_indices",
            "delete_keys",
        )

        def do(request: Any, now: float) -> Any:
            return run(number, request, now)

        def initialize(request: Any, now: float, caller: Caller) -> Any:
            return self._compatible.initialize(number, request, now, caller)

        def names(request: Any) -> tuple[Sequence[str], str]:
            return (f"{number}:{request.namespace}",), "namespace"

        def check(request: Any) -> None:
            self._compatible.check(number, request)

        return Endpoint(
            f"/{{rank}}/{operation}",
            "POST",
            token,
            body,
            do,
            do if can_be_long else None,
            check if can_be_long else None,
            changes,
            names=names,
            do_as=initialize if operation == "initialize" else None,
            audited=operation == "clear",
        )


def refusal(refused: RequestError, content_type: str) -> Said:
    """An answer that says why not."""
    return Said(
        refused.status, content_type, p.encode(refused.problem, content_type), refused.retry_seconds
    )


def _names_in(kind: type[p.Request]) -> Names | None:
    """How messages of a type name scopes: by `scope`, or by `scopes`, which holds their names or
    parts that do."""
    fields = kind.__struct_fields__
    if "scopes" in fields:
        return _of_names if kind in NAMED else _of_parts
    return _of_one if "scope" in fields else None


def _of_parts(message: Any) -> tuple[Sequence[str], str]:
    return [part.scope for part in message.scopes], "scopes[{}].scope"


def _of_names(message: Any) -> tuple[Sequence[str], str]:
    return message.scopes, "scopes[{}]"


def _of_one(message: Any) -> tuple[Sequence[str], str]:
    return (message.scope,), "scope"
