"""Shared stores, filled from a snapshot and read into one. Nothing says whether servers use a
store: the operator stops them first."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

from hicache_metadata_server import protocol as p
from hicache_metadata_server.backup.capture import CHUNK_SLOTS
from hicache_metadata_server.backup.parts import (
    EmptySlots,
    Pages,
    ScopeHeader,
    SnapshotError,
    Tally,
)
from hicache_metadata_server.core.limits import DEFAULTS
from hicache_metadata_server.core.tenants import Caller
from hicache_metadata_server.shared.assembly import open_connection
from hicache_metadata_server.shared.catalog import ScriptTask
from hicache_metadata_server.shared.exporting import read_slots, tasks_of
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.names import SCOPES, ScopeKeys
from hicache_metadata_server.shared.preflight import check_redis
from hicache_metadata_server.shared.script_results import NO_IDEMPOTENCY_KEY
from hicache_metadata_server.shared.service import TOGETHER, SharedService

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator
    from types import TracebackType

    from hicache_metadata_server.backup.parts import SnapshotPart

T = TypeVar("T")
A = TypeVar("A", bound=p.Answer)


class SharedStoreClient:
    """A connection to a store, with an event loop of its own.

    Raises:
        StoreError: Redis is not reached.
        ValueError: the address is none.
    """

    def __init__(self, url: str) -> None:
        self._runner = asyncio.Runner()
        try:
            self.service = self.do(_connected(url))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> Self:
        """Connected since it was made."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the connections."""
        self.close()

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run something to its end."""
        return self._runner.run(coroutine)

    def call(self, path: str, request: p.Request | None, kind: type[A]) -> A:
        """Ask as one asks a server: for the scopes, or for slots of one."""
        answer: Any = (
            self.do(self._listed())
            if request is None
            else self.do(getattr(self.service, path.rpartition("/")[2])(request))
        )
        assert isinstance(answer, kind), "asked for something else"
        return answer

    def close(self) -> None:
        """End the connections."""
        try:
            self.do(self.service.connection.close())
        finally:
            self._runner.close()

    async def _listed(self) -> p.Scopes:
        await self.service.look()
        return self.service.list_scopes()


class RedisTarget:
    """All of one Redis. Its scopes are in the list of scopes, which servers go by, from `keep` on;
    with `replace` the old ones go when `load` begins.

    Raises:
        StoreError: Redis is not reached.
        SnapshotError: it holds scopes, and `replace` is false.
        ValueError: the address is none.
    """

    def __init__(self, url: str, *, replace: bool) -> None:
        self._store = SharedStoreClient(url)
        self._heads: list[ScopeHeader] = []
        self._kept = False
        try:
            self._old = self._store.call("/v2/scopes", None, p.Scopes).scopes
            if self._old and not replace:
                raise SnapshotError(
                    f"{self._store.service.connection.redacted} holds scopes already; with --replace they "
                    f"make room"
                )
        except BaseException:
            self._store.close()
            raise

    def load(self, parts: Iterable[SnapshotPart]) -> None:
        """In pieces of 256 slots, each written by one script."""
        self._store.do(self._remove([scope.scope for scope in self._old]))
        seen = bytearray()
        for part in parts:
            match part:
                case ScopeHeader():
                    self._fill_holes(seen)
                    seen = bytearray()
                    self._store.do(self._make(part))
                case Pages() | EmptySlots():
                    self._store.do(self._run(tasks_of(self._heads[-1].geometry.scope, part)))
                    _note(seen, part.slots)
                case _:
                    pass
        self._fill_holes(seen)

    def read_back(self) -> tuple[Tally, list[str]]:
        """All slots, and what fsck finds."""
        tally = Tally()
        for _ in tally.over(self._parts()):
            pass
        problems = list[str]()
        for head in self._heads:
            request = p.Fsck(scopes=[head.geometry.scope])
            problems += self._store.do(fsck(self._store.service, request)).problems
        return tally, problems

    def commit(self) -> None:
        """Enter the scopes into the list."""
        catalog = self._store.service.catalog
        for tenant in sorted({head.tenant for head in self._heads}):
            theirs, owner = (
                [head.geometry for head in self._heads if head.tenant == tenant],
                Caller(tenant=tenant, sees_all=True),
            )
            self._store.do(catalog.register(theirs, NO_IDEMPOTENCY_KEY, len(self._heads), owner))
        self._kept = True

    def close(self) -> None:
        """Remove what was not kept, and end the connections."""
        try:
            if not self._kept:
                self._store.do(self._remove([head.geometry.scope for head in self._heads]))
        finally:
            self._store.close()

    async def _make(self, head: ScopeHeader) -> None:
        catalog, name = self._store.service.catalog, head.geometry.scope
        await catalog.connection.command("UNLINK", *ScopeKeys(name).all)
        self._heads.append(head)
        await catalog.make([head.geometry], head.tenant)
        if head.model:
            await catalog.run([ScriptTask("describe", name, "scope", [head.model])])

    async def _run(self, tasks: Iterable[ScriptTask]) -> None:
        waiting = list(tasks)
        for start in range(0, len(waiting), TOGETHER):
            await self._store.service.catalog.run(waiting[start : start + TOGETHER])

    async def _remove(self, names: Iterable[str]) -> None:
        connection = self._store.service.connection
        for name in names:
            await connection.command("HDEL", SCOPES, name)
            await connection.command("UNLINK", *ScopeKeys(name).all)

    def _fill_holes(self, seen: bytearray) -> None:
        """Slots before a used one that are not in the snapshot are free; each has a record
        there."""
        holes = [slot for slot, there in enumerate(seen) if not there]
        if holes:
            empty = EmptySlots(holes, [0] * len(holes), [0.0] * len(holes))
            self._store.do(self._run(tasks_of(self._heads[-1].geometry.scope, empty)))

    def _parts(self) -> Iterator[SnapshotPart]:
        catalog, now = self._store.service.catalog, time.time()
        for head in self._heads:
            yield head
            first, used = 0, 1
            while first < used:
                read = read_slots(
                    catalog,
                    head.geometry.scope,
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
        await check_redis(connection, p.Durability.NONE)
    except BaseException:
        await connection.close()
        raise
    return SharedService(connection, DEFAULTS, durability=p.Durability.NONE)


def _note(seen: bytearray, slots: list[int]) -> None:
    end = max(slots, default=-1) + 1
    if end > len(seen):
        seen.extend(bytes(end - len(seen)))
    for slot in slots:
        seen[slot] = 1
