"""Operations of the protocol, executed in Redis."""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, Final

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.chunking import batched, join_responses
from hicache_metadata_server.core.errors import RequestError, StoreError, draining, in_use, invalid
from hicache_metadata_server.core.export import exported
from hicache_metadata_server.core.limits import (
    Measure,
    check_earlier_leases,
    check_lengths,
    check_limits,
    lease_seconds,
)
from hicache_metadata_server.core.scope import Totals
from hicache_metadata_server.core.service import MAX_SCOPES
from hicache_metadata_server.core.slot_table import NAMES
from hicache_metadata_server.core.snapshot_parts import Counters
from hicache_metadata_server.core.tenants import ANYBODY, Caller, Tenants, may_use
from hicache_metadata_server.shared.catalog import (
    MICROSECONDS,
    NO_LEASES,
    ScopeCatalog,
    ScriptTask,
    is_refused,
    tasks_of,
)
from hicache_metadata_server.shared.chunking import answer_of, empty_answer, in_order, task_of
from hicache_metadata_server.shared.exporting import read_slots
from hicache_metadata_server.shared.names import SCOPES
from hicache_metadata_server.shared.pins import PinRegistry
from hicache_metadata_server.shared.scripts import NO_IDEMPOTENCY_KEY, columns_of, value_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from hicache_metadata_server.core.limits import Columns
    from hicache_metadata_server.shared.connection import RedisConnection
    from hicache_metadata_server.shared.scripts import IdempotencyKey

TOGETHER: Final = 4
"""Scripts of a long request that are sent together; other requests wait for them, some
milliseconds."""
PROBE_SECONDS: Final = 1.0
"""Interval between two test writes, in seconds."""


class SharedService:
    """Service of one of several servers on one Redis. For use from one event loop.

    Operations raise `RequestError` if a request cannot be executed, and `StoreError` if Redis was
    not reached or has not answered. In the second case it may have been executed; a client with an
    idempotency key can repeat it.
    """

    def __init__(
        self,
        connection: RedisConnection,
        limits: p.Limits,
        *,
        durability: p.StoreDurability,
        name: str = "hicache-storage",
        max_scopes: int = MAX_SCOPES,
    ) -> None:
        self.limits = limits
        self.about = p.About(
            protocol=p.PROTOCOL,
            server=name,
            instance=secrets.token_hex(8),
            durability=durability,
            limits=limits,
        )
        self.max_scopes = max_scopes
        self.connection = connection
        self.tenants = Tenants()
        self.catalog = ScopeCatalog(connection, limits, self.tenants)
        self.draining = False
        self.recovery_problems: list[str] = []
        self.problem = ""
        """Error of the last tick, or ""."""
        self._pins = PinRegistry(self.catalog)
        self._statuses: dict[str, p.ScopeStatus] = {}
        self._turn = 0
        self._next_probe = 0.0

    @property
    def scopes(self) -> dict[str, Any]:
        """Scopes by name, from the cache of this server."""
        return dict(self.catalog.known)

    # Scopes.

    async def initialize(
        self,
        request: p.Initialize,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
        caller: Caller = ANYBODY,
    ) -> p.Initialized:
        """Create scopes, or check that they are as the client describes them: all or none."""
        measure = Measure(self.limits)
        measure.scopes(request.scopes)
        for i, part in enumerate(request.scopes):
            measure.geometry(part, f"scopes[{i}]")
        earlier = check_earlier_leases(request)

        async def register() -> p.Initialized:
            return p.Initialized(
                created=await self.register(request.scopes, caller, idempotency_key, earlier)
            )

        initialized: p.Initialized = await self._claimed(idempotency_key, register)
        return initialized

    async def register(
        self,
        parts: Sequence[p.ScopeGeometry],
        caller: Caller,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
        earlier: Mapping[str, float] = NO_LEASES,
    ) -> list[bool]:
        """Create scopes whose limits were checked."""
        quota = self.tenants.quotas.of(caller.tenant)
        return await self.catalog.register(
            parts, idempotency_key, self.max_scopes, caller, quota, earlier
        )

    async def describe(
        self, request: p.Describe, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> None:
        """Record the model whose pages a scope holds; the last name counts."""
        await self.catalog.find([request.scope], ["scope"])
        await self.catalog.run([ScriptTask("describe", request.scope, "scope", [request.model])])

    async def check_tenant(self, caller: Caller, names: Sequence[str], fields: str) -> None:
        """Check that a caller may use those of these scopes that exist (`Tenants.see`)."""
        await self.catalog.learn(names)
        self.tenants.check_access(caller, names, fields)

    def held_by(self, tenant: str) -> list[p.ScopeGeometry]:
        """Return the scopes of a tenant, from the cache of this server."""
        return [known.geometry for known in self.catalog.known.values() if known.tenant == tenant]

    async def clear(
        self, request: p.Clear, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.Cleared:
        """Empty scopes, leases included."""
        Measure(self.limits).scopes(request.scopes)
        fields = [f"scopes[{i}]" for i in range(len(request.scopes))]
        await self.catalog.find(request.scopes, fields)
        tasks = [
            ScriptTask("clear", scope, fields[i], chunk=str(i))
            for i, scope in enumerate(request.scopes)
        ]

        async def clear() -> p.Cleared:
            return p.Cleared(
                pages=[value_of(reply) for reply in await self.catalog.run(tasks, idempotency_key)]
                if tasks
                else []
            )

        cleared: p.Cleared = await self._claimed(idempotency_key, clear, alone=not tasks)
        return cleared

    async def drop(
        self, request: p.Drop, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.Dropped:
        """Remove empty scopes: all or none, unless one comes into use meanwhile."""
        Measure(self.limits).scopes(request.scopes)
        names, seconds = list(dict.fromkeys(request.scopes)), self.limits.quarantine_seconds
        found = await self.catalog.find(
            request.scopes, [f"scopes[{i}]" for i in range(len(request.scopes))]
        )
        # All are checked before the first is removed. In a cluster no script spans two scopes, so a
        # scope can come into use between the two passes; then those before it are removed.
        for remove in (False, True):
            for i, name in enumerate(names):
                used = await (self.catalog.remove(name) if remove else self.catalog.used(name))
                if used:
                    raise in_use(name, used, seconds, f"scopes[{i}]")
        return p.Dropped(slots=[known.geometry.slots for known in found])

    # Pages.

    async def lookup(
        self, request: p.Lookup, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.LookedUp:
        """Look up pages, and pin them if the request asks for it."""
        await self._check(request)
        if request.pin_seconds <= 0 or not request.scopes:
            return await self._in_chunks(request, idempotency_key)  # type: ignore[no-any-return]
        seconds = min(request.pin_seconds, self.limits.max_pin_seconds)
        pin = self._pins.draw()
        found: p.LookedUp = await self._in_chunks(
            request, idempotency_key, pin=pin, seconds=seconds
        )
        if not any(slot >= 0 for part in found.scopes for slot in part.slots):
            return found
        # Pinned before it is registered: a slot must not be evicted between the reply and the pin.
        # A number that is taken is given up, and its pins expire.
        if not await self._pins.enter(pin, request, seconds):
            return await self.lookup(request, idempotency_key)
        return p.LookedUp(scopes=found.scopes, pin=pin, pin_seconds=seconds)

    async def reserve(
        self, request: p.Reserve, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.Leases:
        """Lease slots for keys that have no page."""
        await self._check(request)
        # A repeated request may have an answer from before the drain, which only the script knows.
        if self.draining and not idempotency_key.digest:
            raise draining()
        seconds = lease_seconds(self.limits, request.lease_seconds)
        leases: p.Leases = await self._in_chunks(
            request, idempotency_key, seconds=seconds, draining=self.draining
        )
        return leases

    async def commit(
        self, request: p.Commit, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.SettledLeases:
        """Make pages live."""
        await self._check(request)
        check_lengths(
            request, [self.catalog.known[part.scope].geometry.slot_bytes for part in request.scopes]
        )
        return await self._in_chunks(request, idempotency_key)  # type: ignore[no-any-return]

    async def abort(
        self, request: p.Abort, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.SettledLeases:
        """End leases without a page."""
        await self._check(request)
        return await self._in_chunks(request, idempotency_key)  # type: ignore[no-any-return]

    async def renew(
        self, request: p.Renew, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.SettledLeases:
        """Renew leases from now on."""
        await self._check(request)
        seconds = lease_seconds(self.limits, request.lease_seconds)
        renewed: p.SettledLeases = await self._in_chunks(request, idempotency_key, seconds=seconds)
        return renewed

    async def unpin(
        self,
        request: p.Unpin,
        idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY,
        caller: Caller = ANYBODY,
    ) -> None:
        """End pins before their time."""
        Measure(self.limits).entries(request.pins, "pins")
        await self._pins.release(request.pins, caller)

    async def touch(
        self, request: p.Touch, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.Marked:
        """Record a use of pages."""
        await self._check(request)
        return await self._in_chunks(request, idempotency_key)  # type: ignore[no-any-return]

    async def delete(
        self, request: p.Delete, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.Marked:
        """Delete pages."""
        await self._check(request)
        return await self._in_chunks(request, idempotency_key)  # type: ignore[no-any-return]

    # Operators.

    async def inspect(
        self, request: p.Inspect, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.Inspected:
        """Return the state of slots, then that of the slots of keys."""
        measure = Measure(self.limits)
        measure.keys(request.keys, "keys")
        measure.entries(request.slots, "slots")
        (known,) = await self.catalog.find([request.scope], ["scope"])
        for i, slot in enumerate(request.slots):
            if slot >= known.geometry.slots:
                raise invalid(f"there are {known.geometry.slots} slots", f"slots[{i}]")
        chunks: list[tuple[Sequence[int], Sequence[str]]] = [
            (slots, ()) for slots in batched(request.slots)
        ]
        chunks += [((), keys) for keys in batched(request.keys)]
        found = list[p.SlotStatus | None]()
        for chunk in chunks:
            (reply,) = await self.catalog.run(
                [ScriptTask("inspect", request.scope, "scope", chunk)]
            )
            found += _slot_statuses(reply)
        return p.Inspected(slots=found)

    async def export(
        self, request: p.Export, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.Exported:
        """Return the content of some slots of a scope."""
        (known,) = await self.catalog.find([request.scope], ["scope"])
        now, count = time.time(), min(request.count, self.limits.keys)
        pages, empty, used, epoch, lease = await read_slots(
            self.catalog, request.scope, request.first, count, now, self.limits.max_lease_seconds
        )
        return exported(
            pages,
            empty,
            now,
            used=used,
            epoch=epoch,
            counters=Counters(lease + 1),
            rows=request.rows,
            tenant=known.tenant,
        )

    async def drain(
        self, request: p.Drain, idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> p.Draining:
        """Stop giving leases from this server; return the number of leases of all servers."""
        self.draining = request.enabled
        await self.look()
        return p.Draining(
            enabled=request.enabled, leases=sum(status.leased for status in self._statuses.values())
        )

    def list_scopes(self, caller: Caller = ANYBODY) -> p.Scopes:
        """Return every scope that the caller may use, as of the last `look` or `tick`."""
        of_scope = self.tenants.of_scope
        return p.Scopes(
            scopes=[
                self._statuses[name]
                for name in sorted(self._statuses)
                if may_use(caller, of_scope.get(name, ""))
            ]
        )

    def totals(self) -> Totals:
        """Return the sums over all scopes, as of the last `look` or `tick`."""
        scopes = self._statuses.values()
        return Totals(
            live=sum(one.live for one in scopes),
            leased=sum(one.leased for one in scopes),
            quarantined=sum(one.quarantined for one in scopes),
            free=sum(one.free for one in scopes),
            hits=sum(one.hits for one in scopes),
            misses=sum(one.misses for one in scopes),
            evicted=sum(one.evicted for one in scopes),
        )

    async def look(self) -> None:
        """Refresh the status of all scopes."""
        await self.catalog.refresh()
        self._statuses = {
            name: status for name, status in self._statuses.items() if name in self.catalog.known
        }
        await self._settle(list(self.catalog.known))

    async def tick(self, scopes: int) -> bool:
        """Run due work of some scopes, others at each call; set `problem`.

        Returns:
            True if more work may be due in these scopes.

        Raises:
            StoreError: Redis was not reached, or takes no writes.
        """
        try:
            names = sorted(self.catalog.known)
            if self._turn >= len(names):
                self._turn = 0
                await self.catalog.refresh()
                names = sorted(self.catalog.known)
            some = names[self._turn : self._turn + scopes]
            more = await self._settle(some)
            # A scope with much due work, such as one that was cleared, keeps the turn.
            self._turn += 0 if more else len(some)
            await self._probe_writes()
        except StoreError as error:
            self.problem = str(error)
            raise
        self.problem = ""
        return more

    # Helpers.

    async def _probe_writes(self) -> None:
        # Without writes from clients a full Redis would look healthy. `_next_probe` advances only
        # after a success, so that the problem lasts until Redis takes writes.
        if time.monotonic() >= self._next_probe:
            scopes = self.catalog.known.values() if self.connection.is_cluster else ()
            await self.connection.probe_writes([SCOPES, *(known.keys.all[0] for known in scopes)])
            self._next_probe = time.monotonic() + PROBE_SECONDS

    async def _settle(self, names: Sequence[str]) -> bool:
        more = False
        for some in batched(names, TOGETHER):
            try:
                replies = await self.catalog.run(tasks_of("settle", some))
            except RequestError:
                # The scope was dropped or lost since the list was read.
                continue
            for name, reply in zip(some, replies, strict=True):
                is_more, *counts = value_of(reply)
                self._statuses[name] = self._status(name, counts)
                more = more or is_more
        return more

    def _status(self, name: str, counts: list[Any]) -> p.ScopeStatus:
        geometry = self.catalog.known[name].geometry
        free, leased, live, quarantined, hits, misses, evicted, expired, model = counts
        return p.ScopeStatus(
            scope=name,
            slots=geometry.slots,
            slot_bytes=geometry.slot_bytes,
            geometry=geometry.geometry,
            identity=geometry.identity,
            free=free,
            leased=leased,
            live=live,
            quarantined=quarantined,
            hits=hits,
            misses=misses,
            evicted=evicted,
            expired_leases=expired,
            tenant=self.catalog.known[name].tenant,
            model=model,
        )

    async def _check(self, request: Columns) -> None:
        check_limits(request, self.limits)
        names = [part.scope for part in request.scopes]
        await self.catalog.find(names, [f"scopes[{i}].scope" for i in range(len(names))])

    async def _in_chunks(
        self,
        request: Columns,
        idempotency_key: IdempotencyKey,
        *,
        pin: int = 0,
        seconds: float = 0.0,
        draining: bool = False,
    ) -> Any:
        """Run one script for each scope, or several for a scope with many entries."""
        chunks = in_order(request)
        lasts = round(seconds * MICROSECONDS)
        tasks = [
            task_of(chunk, number, lasts, pin, draining=draining)
            for number, chunk in enumerate(chunks)
        ]

        async def run() -> Any:
            answers = list[Any]()
            if not chunks:
                return empty_answer(request, seconds)
            for some in batched(list(zip(chunks, tasks, strict=True)), TOGETHER):
                replies = await self.catalog.run([task for _, task in some], idempotency_key)
                _check_done(replies)
                answers += [
                    answer_of(chunk.request, reply, seconds)
                    for (chunk, _), reply in zip(some, replies, strict=True)
                ]
            return join_responses(chunks, answers)

        return await self._claimed(idempotency_key, run, alone=not chunks)

    async def _claimed(
        self, idempotency_key: IdempotencyKey, run: Callable[[], Any], *, alone: bool = False
    ) -> Any:
        # On one node each script checks the key by itself. Only in a cluster, or for a request
        # that has no scope and no script (`alone`), the key is claimed first.
        if not idempotency_key.digest or not (self.connection.is_cluster or alone):
            return await run()
        is_new = await self.catalog.claim(idempotency_key)
        try:
            return await run()
        except RequestError:
            # A refused request has changed nothing, and may be repeated with other content.
            if is_new:
                await self.catalog.unclaim(idempotency_key)
            raise


def _check_done(replies: list[list[Any]]) -> None:
    if any(map(is_refused, replies)):
        raise draining()


def _slot_statuses(reply: list[Any]) -> Iterator[p.SlotStatus | None]:
    """Decode a reply of the script `inspect`; None for a key without a slot."""
    lengths, checksums = columns_of(reply[2])
    for row, length, checksum in zip(value_of(reply), lengths, checksums, strict=True):
        if not row:
            yield None
            continue
        slot, number, generation, left, key, prefix, owner, pins = row
        state: p.SlotState = NAMES[int(number)]
        timed = state in (p.SlotState.LEASED, p.SlotState.QUARANTINED)
        yield p.SlotStatus(
            slot=slot,
            state=state,
            generation=generation,
            key=key,
            prefix=prefix,
            length=length,
            checksum=checksum,
            owner=owner,
            seconds_left=left / MICROSECONDS if timed else 0.0,
            pins=pins,
        )
