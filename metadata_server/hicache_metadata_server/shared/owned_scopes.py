"""Request handlers of one server among several, and its assembly."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import SteadyClock
from hicache_metadata_server.core.errors import (
    FencedError,
    StoreError,
    moved,
    unknown_scope,
)
from hicache_metadata_server.core.limits import Caller, may_use
from hicache_metadata_server.http.app import create_app
from hicache_metadata_server.http.handlers import Handlers, ReceivedRequest, Response
from hicache_metadata_server.shared.connection import RedisConnection
from hicache_metadata_server.shared.ownership import LEASE_SECONDS
from hicache_metadata_server.shared.scope_log import ScopeLogStore
from hicache_metadata_server.shared.scope_owner import BEAT_SECONDS, ScopeOwner

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_metadata_server.auth.security import Security
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.http.asgi import ProtocolApp

CREATING: Final = ("/v2/initialize", "/{rank}/initialize")
"""Routes that create scopes."""
LISTING: Final = "/v2/scopes"
DROPPING: Final = "/v2/drop"
WITH_MAP: Final = (LISTING, DROPPING)
"""Routes that use the map of all scopes."""

_log = structlog.get_logger()


class OwnerHandlers(Handlers):
    """Answers requests about scopes that this server owns, and says who owns the others.

    A request about scopes of this server takes the same way as in a server of its own store.
    """

    def __init__(
        self, service: MetadataService, clock: Callable[[], float], owner: ScopeOwner
    ) -> None:
        super().__init__(service, clock)
        self.owner = owner
        owner.flush = self.commit
        owner.discarded = self._refuse_waiting
        self._creating = asyncio.Lock()
        self._beating: asyncio.Task[None] | None = None
        self._leaves = False
        self._problem = "it has no lease yet"

    def start(self, request: ReceivedRequest) -> Response | None:
        """Run a request at once if this server owns its scopes."""
        names = self.names(request)
        if request.endpoint.name in WITH_MAP or (names and not self.owner.serves(names)):
            return None
        return super().start(request)

    async def run_later(self, request: ReceivedRequest) -> Response:
        """Find the owner of the scopes, or create them; then run the request as any other."""
        names = self.names(request)
        if request.endpoint.name == LISTING:
            return self._response(await self._listed(request.caller), request)
        if not names or self.owner.serves(names):
            return await self._run(request)
        if self._problem and self.owner.has_lost_lease:
            # At once: each of many requests would wait for a Redis that is known not to answer.
            raise StoreError(self._problem)
        if request.endpoint.name in CREATING:
            return await self._create(request, names)
        if url := await self.owner.admit(names):
            raise moved(url + _path_of(request, names))
        if not self.owner.serves(names):
            assert request.endpoint.names is not None, "it names scopes"
            names, field = request.endpoint.names(request.message)
            for i, name in enumerate(names):
                if name not in self.owner.entries:
                    raise unknown_scope(name, field.format(i))
        return await self._run(request)

    def fenced(self, scopes: Sequence[str]) -> None:
        """Forget scopes that another server owns by now."""
        self.owner.drop(scopes)

    async def tick(self, slots: int) -> bool:
        """Expire leases and quarantines, and begin the heartbeats."""
        if self._beating is None and not self._leaves:
            self._beating = asyncio.create_task(self._beat())
        return await super().tick(slots)

    async def hand_over(self) -> None:
        """Give all scopes back, and take none any more."""
        # Also a flag: redis-py may lose the cancellation, see `ProtocolApp`.
        self._leaves = True
        if self._beating is not None:
            self._beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._beating
        # The others take no scope from a server that looks as if it would serve it again.
        self.service.draining = True
        if not self.service.scopes:
            return
        try:
            await self.owner.give_back(list(self.service.scopes))
        except StoreError as error:
            # Their leases end by themselves.
            _log.error("scopes_kept", error=str(error))

    async def close(self) -> None:
        """Give all scopes back, and write the remaining changes."""
        await self.hand_over()
        await super().close()
        await self.owner.close()

    def problem(self) -> str:
        """Reason why the server is not ready, or ""."""
        return self._problem or super().problem()

    def store_fails(self) -> bool:
        """True if Redis does not answer heartbeats, or takes no changes."""
        return bool(self._problem) or super().store_fails()

    def unowned_scopes(self) -> int:
        """Number of scopes that have no owner."""
        return self.owner.unowned()

    async def _beat(self) -> None:
        while not self._leaves:
            try:
                await self.owner.beat()
                problem = ""
            except StoreError as error:
                problem = str(error)
            except Exception as error:  # noqa: BLE001 - without heartbeats no scope would be served
                _log.exception("beat_failed")
                problem = f"{type(error).__name__}: {error}"
            if bool(problem) != bool(self._problem):
                if problem:
                    _log.error("store_failing", error=problem)
                else:
                    _log.info("store_serving")
            self._problem = problem
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(BEAT_SECONDS):
                    await self.owner.wanted.wait()
                # Not at once: clients that wait ask again and again.
                await asyncio.sleep(BEAT_SECONDS / 5)
            self.owner.wanted.clear()

    async def _run(self, request: ReceivedRequest) -> Response:
        """Run a request about scopes that this server serves."""
        names = frozenset(self.names(request) if request.endpoint.name == DROPPING else ())
        added = names - self.owner.dropping
        self.owner.dropping |= added
        try:
            started = super().start(request)
            if started is None:
                return await super().run_later(request)
            response = await self._committed(started)
            if names and response.status == 200:
                await self.owner.publish(dict.fromkeys(names))
            return response
        finally:
            self.owner.dropping -= added

    async def _committed(self, response: Response) -> Response:
        """Wait for the commit of what a request has changed."""
        if response.changes and (written := self.commit()) is not None:
            await written
        return response

    def _refuse_waiting(self, scopes: Sequence[str]) -> None:
        if self.group_commit is not None:
            self.group_commit.refuse_waiting(FencedError(scopes))

    async def _listed(self, caller: Caller) -> p.Scopes:
        """Scopes of all servers, and these; scopes of the others as of up to a second ago."""
        # Another server may just have made one.
        await self.owner.poll()
        others = {
            status.scope: status
            for status in await self.owner.other_statuses()
            if may_use(caller, status.tenant)
        }
        # Only now: a scope that is taken meanwhile is no other's any more.
        found = self.service.list_scopes(caller, self.clock()).scopes
        own = {status.scope: status for status in found}
        listed = [status for _, status in sorted((others | own).items())]
        servers = list[p.ServerStatus]()
        for url, state in sorted(self.owner.members().items()):
            logs = [status.log_bytes for status in listed if status.owner == url]
            servers.append(
                p.ServerStatus(url=url, state=state, scopes=len(logs), log_bytes=sum(logs))
            )
        return p.Scopes(scopes=listed, servers=servers)

    async def _create(self, request: ReceivedRequest, names: Sequence[str]) -> Response:
        """Create scopes here, or send the client to where they are, or should be."""
        geometries = _geometries(request, names)
        # One at a time: a second request must not find a scope between its two steps.
        async with self._creating:
            if not self.owner.serves(names):
                await self.owner.poll()
            try:
                while not await self._have_heads(request, names, geometries):
                    await self.owner.poll()
                started = super().start(request)
            finally:
                self.owner.attach()
        assert started is not None, "a request that creates scopes is no fsck"
        return await self._committed(started)

    async def _have_heads(
        self, request: ReceivedRequest, names: Sequence[str], geometries: dict[str, p.ScopeGeometry]
    ) -> bool:
        """Own the scopes that exist, and those that do not; False if they have changed meanwhile."""
        known = [name for name in geometries if name in self.owner.entries]
        if known:
            if url := await self.owner.admit(known):
                raise moved(url + _path_of(request, names))
            if not self.owner.serves(known):
                return False
        new = [part for name, part in geometries.items() if name not in known]
        if not new:
            return True
        field = "namespace"
        if isinstance(request.message, p.Initialize):
            # Before other servers see the scopes.
            self.service.check_initialize(request.message)
            field = "scopes"
        self.service.check_room(new, request.caller, field)
        if not known and (url := self.owner.less_loaded()):
            raise moved(url + _path_of(request, names))
        group = self.owner.entries[known[0]].group if known else ""
        return await self.owner.create(new, request.caller.tenant, group)


def _path_of(request: ReceivedRequest, names: Sequence[str]) -> str:
    return request.endpoint.name.replace("{rank}", names[0].partition(":")[0])


def _geometries(request: ReceivedRequest, names: Sequence[str]) -> dict[str, p.ScopeGeometry]:
    message: Any = request.message
    if isinstance(message, p.Initialize):
        return {part.scope: part for part in reversed(message.scopes)}
    return {names[0]: p.ScopeGeometry(scope=names[0], slots=message.num_pages)}


def owner_app(
    service: MetadataService,
    store_url: str,
    url: str,
    *,
    replicas: int = 0,
    lease_seconds: float = LEASE_SECONDS,
    security: Security | None = None,
) -> ProtocolApp:
    """Application of one server among several, with a service that has no scopes yet.

    The others take its scopes once it has been silent for `lease_seconds`. `replicas` replicas have
    a change before it is acknowledged. Clients reach the server at `url`.

    Raises:
        ValueError: the address of the store is not valid.
    """
    clock = SteadyClock()
    connection = RedisConnection(store_url, replicas=replicas)
    store = ScopeLogStore(connection, clock)
    owner = ScopeOwner(
        connection,
        service,
        store,
        url=url,
        now=clock,
        lease_seconds=lease_seconds,
    )
    return create_app(
        service,
        store,
        security=security,
        clock=clock,
        handlers=OwnerHandlers(service, clock, owner),
    )
