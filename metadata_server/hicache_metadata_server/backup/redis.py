"""Shared stores as source and target of snapshots.

Redis does not know which of its clients are servers. So nothing here can lock them out: the
operator stops them before a store is filled.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.export import CHUNK_SLOTS
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.snapshot_parts import EmptySlots, Pages, ScopeHeader, Tally
from hicache_metadata_server.core.tenants import Caller
from hicache_metadata_server.shared.assembly import open_connection
from hicache_metadata_server.shared.catalog import ScriptTask
from hicache_metadata_server.shared.exporting import read_slots, tasks_of
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.names import SCOPES, ScopeKeys
from hicache_metadata_server.shared.preflight import check_redis
from hicache_metadata_server.shared.scripts import NO_IDEMPOTENCY_KEY
from hicache_metadata_server.shared.service import TOGETHER, SharedService

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator

    from hicache_metadata_server.core.snapshot_parts import SnapshotPart

T = TypeVar("T")
A = TypeVar("A", bound=p.Answer)


class SharedStoreClient:
    """Synchronous client of a shared store, with an event loop of its own.

    Raises:
        StoreError: Redis is not reached.
        ValueError: the address is not valid.
    """

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        try:
            self.service = self.do(_connected(url))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        """Return the client, which is connected already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections."""
        self.close()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end."""
        return self._runner.run(coroutine)

    def call(self, path: str, request: p.Request | None, kind: type[A]) -> A:
        """Answer the routes of `ExportServer`: scopes, export and inspection."""
        answer: Any = (
            self.do(self._listed())
            if request is None
            else self.do(getattr(self.service, path.rpartition("/")[2])(request))
        )
        assert isinstance(answer, kind), "asked for something else"
        return answer

    def close(self) -> None:
        """Close the connections."""
        try:
            self.do(self.service.connection.close())
        finally:
            self._runner.close()

    async def _listed(self) -> p.Scopes:
        await self.service.look()
        return self.service.list_scopes()


class RedisTarget:
    """One Redis as the target of a snapshot.

    Its new scopes enter the list of scopes, and thereby exist for servers, at `commit`. With
    `replace` the old ones are removed when `load` begins.

    Raises:
        StoreError: Redis is not reached.
        SnapshotError: it holds scopes, and `replace` is false.
        ValueError: the address is not valid.
    """

    def __init__(self, url: str, *, replace: bool) -> None:
        self._store = SharedStoreClient(url)
        self._headers: list[ScopeHeader] = []
        self._committed = False
        try:
            self._old = self._store.call("/v2/scopes", None, p.Scopes).scopes
            if self._old and not replace:
                raise SnapshotError(
                    f"{self._store.service.connection.redacted} holds scopes already; "
                    f"--replace replaces them"
                )
        except BaseException:
            self._store.close()
            raise

    def load(self, parts: Iterable[SnapshotPart]) -> None:
        """Remove the old scopes and write the new ones, 256 slots by each script."""
        # Removed first rather than last: two copies may not fit into the memory of Redis.
        self._store.do(self._remove([scope.scope for scope in self._old]))
        seen = bytearray()
        for part in parts:
            match part:
                case ScopeHeader():
                    self._fill_holes(seen)
                    seen = bytearray()
                    self._store.do(self._make(part))
                case Pages() | EmptySlots():
                    self._store.do(self._run(tasks_of(self._headers[-1].geometry.scope, part)))
                    _mark(seen, part.slots)
                case _:
                    pass
        self._fill_holes(seen)

    def read_back(self) -> tuple[Tally, list[str]]:
        """Read all slots, and run fsck."""
        tally = Tally()
        for _ in tally.over(self._parts()):
            pass
        problems = list[str]()
        for header in self._headers:
            request = p.Fsck(scopes=[header.geometry.scope])
            problems += self._store.do(fsck(self._store.service, request)).problems
        return tally, problems

    def commit(self) -> None:
        """Enter the scopes into the list."""
        catalog = self._store.service.catalog
        for tenant in sorted({header.tenant for header in self._headers}):
            parts = [header.geometry for header in self._headers if header.tenant == tenant]
            owner = Caller(tenant=tenant, sees_all=True)
            self._store.do(catalog.register(parts, NO_IDEMPOTENCY_KEY, len(self._headers), owner))
        self._committed = True

    def close(self) -> None:
        """Remove scopes that were not committed, and close the connections."""
        try:
            if not self._committed:
                self._store.do(self._remove([header.geometry.scope for header in self._headers]))
        finally:
            self._store.close()

    async def _make(self, header: ScopeHeader) -> None:
        catalog, name = self._store.service.catalog, header.geometry.scope
        # A load that was cut short may have left keys of this scope, which no list names.
        await catalog.connection.command("UNLINK", *ScopeKeys(name).all)
        self._headers.append(header)
        await catalog.make([header.geometry], header.tenant)
        if header.model:
            await catalog.run([ScriptTask("describe", name, "scope", [header.model])])

    async def _run(self, tasks: Iterable[ScriptTask]) -> None:
        waiting = list(tasks)
        for start in range(0, len(waiting), TOGETHER):
            await self._store.service.catalog.run(waiting[start : start + TOGETHER])

    async def _remove(self, names: Iterable[str]) -> None:
        connection = self._store.service.connection
        for name in names:
            # Off the list first: a scope that is listed without keys would be created anew, empty.
            await connection.command("HDEL", SCOPES, name)
            await connection.command("UNLINK", *ScopeKeys(name).all)

    def _fill_holes(self, seen: bytearray) -> None:
        """Write records of unused slots that precede a used one."""
        # In Redis all slots below the highest used one have a record; a snapshot lists only used
        # ones, in any order.
        holes = [slot for slot, there in enumerate(seen) if not there]
        if holes:
            empty = EmptySlots(holes, [0] * len(holes), [0.0] * len(holes))
            self._store.do(self._run(tasks_of(self._headers[-1].geometry.scope, empty)))

    def _parts(self) -> Iterator[SnapshotPart]:
        catalog, now = self._store.service.catalog, time.time()
        for header in self._headers:
            yield header
            first, used = 0, 1
            while first < used:
                read = read_slots(
                    catalog,
                    header.geometry.scope,
                    first,
                    CHUNK_SLOTS,
                    now,
                    DEFAULTS.max_lease_seconds,
                )
                pages, empty, used, *_ = self._store.do(read)
                yield pages
                yield empty
                first += CHUNK_SLOTS


async def _connected(url: str) -> SharedService:
    connection = open_connection(url)
    try:
        await check_redis(connection, p.StoreDurability.NONE)
    except BaseException:
        await connection.close()
        raise
    # The limits of a server do not matter to its store, except that of leases: the default bounds
    # the quarantine of leased slots.
    return SharedService(connection, DEFAULTS, durability=p.StoreDurability.NONE)


def _mark(seen: bytearray, slots: list[int]) -> None:
    end = max(slots, default=-1) + 1
    if end > len(seen):
        seen.extend(bytes(end - len(seen)))
    for slot in slots:
        seen[slot] = 1
