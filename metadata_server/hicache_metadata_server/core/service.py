"""The operations of the protocol on all scopes. No I/O; the time is an argument."""

from __future__ import annotations

import math
import secrets
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import structs

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.changes import (
    Changes,
    IdAllocator,
    IdempotencyCache,
    ScopeRecord,
)
from hicache_metadata_server.core.codec import changes_of
from hicache_metadata_server.core.errors import (
    RequestError,
    invalid,
    too_large,
    unknown_scope,
)
from hicache_metadata_server.core.invariants import SHOWN, audit
from hicache_metadata_server.core.limits import (
    ANYBODY,
    DEFAULTS,
    NO_QUOTA,
    Caller,
    Measure,
    Quotas,
    TenantUsage,
    check_earlier_leases,
    check_lengths,
    check_limits,
    lease_seconds,
    may_use,
)
from hicache_metadata_server.core.removals import RemovalRoom
from hicache_metadata_server.core.restore import ScopeRestorer
from hicache_metadata_server.core.scope import Scope, Totals
from hicache_metadata_server.core.slot_table import as_run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from hicache_metadata_server.core.codec import SlotColumns
    from hicache_metadata_server.core.limits import Columns

MAX_SCOPES: Final = 4096
LONGEST: Final = "longest"
"""Name of a counter in the store: the longest lease and quarantine, in seconds."""
CLOSED_UNTIL: Final = "closed_until"
"""Name of another one: time before which no slot is given, because leases that the store does not
know may be held."""


_PartT = TypeVar("_PartT", p.CommitScope, p.LeaseScope)


class MetadataService:
    """All scopes of one server.

    Not thread-safe. An operation that cannot be done raises `RequestError` and changes nothing. The
    owner calls `take_changes` and writes the result, or calls `forget_changes`.
    """

    def __init__(
        self,
        limits: p.Limits = DEFAULTS,
        *,
        durability: p.StoreDurability = p.StoreDurability.NONE,
        name: str = "hicache-storage",
        max_scopes: int = MAX_SCOPES,
        shares_store: bool = False,
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
        self.scopes: dict[str, Scope] = {}
        self.quotas = Quotas()
        """Quotas in force, which a reload of their file replaces as a whole."""
        self.elsewhere: dict[str, tuple[p.ScopeGeometry, str]] = {}
        """Scopes of other servers on the same store, with their tenants, for the quotas."""
        self.answers = IdempotencyCache(limits.idempotency_seconds)
        self.draining = False
        self.recovery_problems: list[str] = []
        """Contradictions in the store, whose slots the start has quarantined."""
        self._by_number: dict[int, Scope] = {}
        self._leases = IdAllocator()
        self._removal_room = RemovalRoom()
        self._changed: dict[str, Scope] = {}
        self._made: dict[str, Scope] = {}
        """New, cleared or described scopes."""
        self._dropped: list[int] = []
        self._gone = set[int]()
        """Numbers of all scopes that were dropped by this process."""
        self._last_number = 0
        """Number of the newest scope."""
        self._started: float | None = None
        """Time since which this service has known every lease of its scopes."""
        self._shares_store = shares_store
        self.url = ""
        """Address of this server, if servers share a store: the owner of its scopes."""
        self.log_bytes: Callable[[int], int] = lambda number: 0
        """Length of the log of a scope, by its number, if servers share a store."""
        self.max_hold_seconds = math.ceil(limits.max_lease_seconds + limits.quarantine_seconds)
        """Seconds of the longest lease and quarantine that this store has seen. Leases outlive a
        restart, and the restart may have shorter limits."""
        self._written = self._counters() | {LONGEST: 0}
        """Durable counters, or the values that a restart without them would use."""

    # Scopes.

    def initialize(
        self, request: p.Initialize, now: float, caller: Caller = ANYBODY
    ) -> p.Initialized:
        """Create scopes, or check that existing ones match: all or none."""
        wanted, created, earlier = self.check_initialize(request)
        new = [part for name, part in wanted.items() if name not in self.scopes]
        self.check_room(new, caller, "scopes")
        # Another server may have given leases of the scope until now, if they share a store.
        if self._started is None or self._shares_store:
            self._started = now
        for part in new:
            scope, seconds = self.add_scope(part, caller.tenant), earlier.get(part.scope, 0.0)
            until = (
                self._started
                + min(seconds, self.limits.max_lease_seconds)
                + self.limits.quarantine_seconds
            )
            if seconds > 0 and until > now:
                scope.close_until(until)
        return p.Initialized(created=created)

    def check_initialize(
        self, request: p.Initialize
    ) -> tuple[dict[str, p.ScopeGeometry], list[bool], dict[str, float]]:
        """Check that scopes may be created, but for limits of their number, or match.

        Returns:
            The scopes by name, whether each of the request is new, and seconds of earlier leases.
        """
        measure = Measure(self.limits)
        measure.scopes(request.scopes)
        earlier = check_earlier_leases(request)
        wanted: dict[str, p.ScopeGeometry] = {}
        created = list[bool]()
        for i, part in enumerate(request.scopes):
            measure.geometry(part, f"scopes[{i}]")
            known = (
                self.scopes[part.scope].geometry
                if part.scope in self.scopes
                else wanted.get(part.scope)
            )
            created.append(known is None)
            for name in ("slots", "slot_bytes", "geometry", "identity") if known else ():
                has, wants = getattr(known, name), getattr(part, name)
                if has != wants:
                    message = f"scope {part.scope!r} has {name} {has!r}, not {wants!r}"
                    raise RequestError(409, "mismatch", message, f"scopes[{i}].{name}")
            wanted.setdefault(part.scope, part)
        return wanted, created, earlier

    def add_scope(self, geometry: p.ScopeGeometry, tenant: str = "") -> Scope:
        """Create a scope that does not exist."""
        scope = Scope(geometry, self.limits.quarantine_seconds, self._removal_room)
        self.scopes[geometry.scope] = scope
        scope.tenant = tenant
        scope.number = self.new_number()
        self._by_number[scope.number] = scope
        self._made[geometry.scope] = scope
        return scope

    def new_number(self) -> int:
        """Allocate the number of a scope."""
        # Numbers are never reused: the log may still have blocks of a dropped scope.
        self._last_number += 1
        return self._last_number

    # Scopes of a store that servers share come and go.

    def adopt(self, scope: Scope, recovered: Changes) -> None:
        """Serve a scope that `restored_scope` has restored under a `new_number`.

        `recovered` has its answers and counters.
        """
        self._by_number[scope.number] = scope
        self.scopes[scope.geometry.scope] = scope
        self.answers.restore(recovered.answers)
        self._leases.skip_to(recovered.counters.get("lease", 1))
        self.max_hold_seconds = max(self.max_hold_seconds, recovered.counters.get(LONGEST, 0))

    def release(self, name: str) -> None:
        """Forget a scope, with its answers and unwritten changes: another server owns it."""
        number = self._forget(name)
        del self._by_number[number]
        self.answers.release(name)

    def _forget(self, name: str) -> int:
        number = self.scopes.pop(name).number
        self._made.pop(name, None)
        self._changed.pop(name, None)
        self._gone.add(number)
        return number

    def describe(self, request: p.Describe, now: float) -> None:
        """Set the name of the model whose pages a scope holds; the last name stays."""
        scope = self._known(request.scope, "scope")
        if scope.model != request.model:
            scope.model = request.model
            self._made[request.scope] = scope

    def list_scopes(self, caller: Caller = ANYBODY, now: float = math.inf) -> p.Scopes:
        """List the scopes visible to the caller, with their slots by state at a time."""
        names = sorted(self._visible_to(caller))
        return p.Scopes(scopes=[self._status(self.scopes[name], now) for name in names])

    def totals(self) -> Totals:
        """Sum over all scopes. Called every second, so it scans no slots."""
        scopes = self.scopes.values()
        return Totals(
            live=sum(len(scope.lru) for scope in scopes),
            leased=sum(len(scope.leases) for scope in scopes),
            quarantined=sum(scope.quarantined for scope in scopes),
            free=sum(scope.available for scope in scopes),
            hits=sum(scope.hits for scope in scopes),
            misses=sum(scope.misses for scope in scopes),
            evicted=sum(scope.evicted for scope in scopes),
        )

    def clear(self, request: p.Clear, now: float) -> p.Cleared:
        """Empty scopes, leases included."""
        measure = Measure(self.limits)
        measure.scopes(request.scopes)
        measure.owner(request.owner)
        scopes = [self._known(name, f"scopes[{i}]") for i, name in enumerate(request.scopes)]
        for name in request.scopes:
            self._made[name] = self.scopes[name]
            self._changed[name] = self.scopes[name]
        return p.Cleared(pages=[scope.clear(now, request.owner) for scope in scopes])

    def drop(self, request: p.Drop, now: float) -> p.Dropped:
        """Remove empty scopes: all or none.

        A slot in use, or in quarantine, prevents it: its reader or writer may still be active when
        the scope is created anew.
        """
        Measure(self.limits).scopes(request.scopes)
        scopes = [self._known(name, f"scopes[{i}]") for i, name in enumerate(request.scopes)]
        for i, scope in enumerate(scopes):
            scope.settle(now)
            if used := len(scope.lru) + len(scope.leases) + scope.quarantined:
                message = (
                    f"scope {scope.geometry.scope!r} has {used} slots that are live, leased or "
                    f"quarantined: clear it, and try again after the quarantine"
                )
                seconds = math.ceil(self.limits.quarantine_seconds)
                raise RequestError(409, "in_use", message, f"scopes[{i}]", retry_seconds=seconds)
        for name in dict.fromkeys(request.scopes):
            geometry, number = self.scopes[name].geometry, self._forget(name)
            # An empty scope stays under the number: the store may still have to compact blocks of
            # it before it deletes them.
            self._by_number[number] = Scope(geometry, self.limits.quarantine_seconds)
            self._dropped.append(number)
        return p.Dropped(slots=[scope.geometry.slots for scope in scopes])

    # Pages.

    def lookup(self, request: p.Lookup, now: float) -> p.LookedUp:
        """Look up the slots of pages."""
        scopes = self._scopes(request)
        return p.LookedUp(
            scopes=[
                _found(scope, scope.lookup(part.keys, touch=request.touch))
                for part, scope in zip(request.scopes, scopes, strict=True)
            ]
        )

    def reserve(self, request: p.Reserve, now: float) -> p.Leases:
        """Lease slots for keys that are neither live nor leased."""
        scopes = self._scopes(request)
        seconds, answers = lease_seconds(self.limits, request.lease_seconds), list[p.Leased]()
        for part, scope in zip(request.scopes, scopes, strict=True):
            self._changed[part.scope] = scope
            first, evicted = self._leases.take(len(part.keys)), scope.evicted
            states, slots, leases = scope.reserve(
                part.keys, part.prefixes, request.owner, first, now, now + seconds
            )
            generations = scope.table.generations
            answers.append(
                p.Leased(
                    states=states,
                    slots=list(slots),
                    generations=generations[slots.start : slots.stop].tolist()
                    if isinstance(slots, range)
                    else [generations[slot] if slot >= 0 else 0 for slot in slots],
                    leases=leases,
                    evicted=scope.evicted - evicted,
                )
            )
        return p.Leases(scopes=answers, lease_seconds=seconds)

    def commit(self, request: p.Commit, now: float) -> p.SettledLeases:
        """Make pages live."""
        scopes = self._scopes(request)
        return self._settled(
            request.scopes,
            scopes,
            lambda part, scope: scope.commit(part.leases, part.lengths, part.checksums, now),
        )

    def abort(self, request: p.Abort, now: float) -> p.SettledLeases:
        """Give leases back."""
        scopes = self._scopes(request)
        return self._settled(
            request.scopes, scopes, lambda part, scope: scope.abort(part.leases, now)
        )

    def renew(self, request: p.Renew, now: float) -> p.SettledLeases:
        """Renew leases from now on."""
        scopes = self._scopes(request)
        until = now + lease_seconds(self.limits, request.lease_seconds)
        return self._settled(
            request.scopes, scopes, lambda part, scope: scope.renew(part.leases, now, until)
        )

    def touch(self, request: p.Touch, now: float) -> p.Marked:
        """Mark pages as used."""
        scopes = self._scopes(request)
        flags = list[p.Flags]()
        for part, scope in zip(request.scopes, scopes, strict=True):
            flags.append(p.Flags(done=[slot >= 0 for slot in scope.lru.used(part.keys)]))
        return p.Marked(scopes=flags)

    def delete(self, request: p.Delete, now: float) -> p.Marked:
        """Delete pages."""
        scopes = self._scopes(request)
        flags = list[p.Flags]()
        for part, scope in zip(request.scopes, scopes, strict=True):
            self._changed[part.scope] = scope
            flags.append(
                p.Flags(done=scope.delete(part.keys, part.generations, now, request.owner))
            )
        return p.Marked(scopes=flags)

    def collect_removals(self, request: p.CollectRemovals, now: float) -> p.CollectedRemovals:
        """List pages that were removed, as many as the limit of keys allows."""
        Measure(self.limits).scopes(request.scopes)
        room, answers = self.limits.keys, list[p.RemovedPages]()
        scopes = [
            self._known(part.scope, f"scopes[{i}].scope") for i, part in enumerate(request.scopes)
        ]
        for part, scope in zip(request.scopes, scopes, strict=True):
            answers.append(scope.removals.read(part.cursor, room))
            room -= len(answers[-1].keys)
        return p.CollectedRemovals(scopes=answers)

    # Operators.

    def inspect(self, request: p.Inspect, now: float) -> p.Inspected:
        """State of some slots, then of the slots of some keys."""
        measure = Measure(self.limits)
        measure.keys(request.keys, "keys")
        measure.entries(request.slots, "slots")
        scope = self._known(request.scope, "scope")
        for i, slot in enumerate(request.slots):
            if slot >= scope.geometry.slots:
                raise invalid(f"there are {scope.geometry.slots} slots", f"slots[{i}]")
        slots = [*request.slots, *map(scope.slot_of, request.keys)]
        return p.Inspected(slots=[scope.status(slot, now) if slot >= 0 else None for slot in slots])

    def fsck(
        self, request: p.Fsck, now: float, caller: Caller = ANYBODY
    ) -> Iterator[p.FsckReport | None]:
        """Check every invariant in chunks, between which other requests may be served.

        Yields None for each chunk, and the report at the end.
        """
        Measure(self.limits).scopes(request.scopes)
        scopes = [self._known(name, f"scopes[{i}]") for i, name in enumerate(request.scopes)]
        scopes = (
            scopes if request.scopes else [self.scopes[name] for name in self._visible_to(caller)]
        )
        problems = list[str]()
        for scope in scopes:
            for found in audit(scope):
                problems += [f"{scope.geometry.scope}: {problem}" for problem in found]
                yield None
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        yield p.FsckReport(
            slots=sum(scope.geometry.slots for scope in scopes), problems=problems[:SHOWN] + more
        )

    def drain(self, request: p.Drain, now: float) -> p.Draining:
        """Start or stop to refuse new leases; all other operations are served."""
        self.draining = request.enabled
        for scope in self.scopes.values():
            scope.settle(now)
        return p.Draining(
            enabled=request.enabled,
            leases=sum(len(scope.leases) for scope in self.scopes.values()),
        )

    # Time and durability.

    def settle(self, now: float, most: int) -> bool:
        """Process about `most` due slots; True if more are due."""
        self.answers.expire(now)
        for scope in self.scopes.values():
            if most <= 0:
                return True
            due = scope.next_time()
            if due is not None and due <= now:
                most -= scope.settle(now, most)
        return most <= 0

    def take_changes(self) -> Changes:
        """Take the changes since the last call, encoded as the slots are now."""
        changes = Changes(answers=self.answers.added)
        changes.scopes = [
            ScopeRecord(
                scope.number,
                scope.geometry,
                scope.epoch,
                scope.cleared_until,
                scope.tenant,
                scope.model,
            )
            for scope in self._made.values()
        ]
        for scope in self._changed.values():
            if scope.changed:
                changes.slots[scope.number] = changes_of(scope, scope.changed, scope.leased)
        changes.dropped = self._dropped
        self.forget_changes()
        for name, ceiling in self._counters().items():
            # The longest lease with other changes only: a service without leases needs none.
            if ceiling != self._written[name] and (name != LONGEST or changes):
                changes.counters[name] = ceiling
                self._written[name] = ceiling
        return changes

    def scope_of(self, number: int) -> Scope:
        """Scope with a number of the store; an empty one if it was dropped."""
        return self._by_number[number]

    def forget_changes(self) -> None:
        """Discard all changes, for owners without a store."""
        for scope in self._changed.values():
            scope.changed = []
            scope.leased = []
        self._made = {}
        self._changed = {}
        self._dropped = []
        self.answers.added = []

    def put_back(self, changes: Changes) -> None:
        """Return changes that could not be written; the next `take_changes` has them again.

        Slots are encoded anew then. Answers are withdrawn, because their requests get an error.
        """
        self.answers.withdraw(changes.answers)
        self._dropped = changes.dropped + self._dropped
        for record in changes.scopes:
            if record.number not in self._gone:
                self._made[record.geometry.scope] = self._by_number[record.number]
        for number, slots in changes.slots.items():
            if number in self._gone:
                continue
            scope = self._by_number[number]
            self._changed[scope.geometry.scope] = scope
            scope.changed.append(slots.changed)
            if slots.leases.keys:
                scope.leased.append(slots.leased)
        for name in changes.counters:
            # Differs from every value, so that the counter is written again.
            self._written[name] = -1

    def restore(
        self, recovered: Changes, rows: Callable[[ScopeRecord], SlotColumns], now: float
    ) -> None:
        """Restore the contents of a store, before the first request.

        `recovered` has everything but slots, which `rows` returns for one scope.
        """
        self._started = now
        self._leases.skip_to(recovered.counters.get("lease", 1))
        self._last_number = max(
            [recovered.counters.get("scope", 0), *(record.number for record in recovered.scopes)]
        )
        kept = recovered.counters.get(LONGEST, 0)
        self.max_hold_seconds = max(self.max_hold_seconds, kept)
        self._written = self._counters() | {LONGEST: kept}
        closed_until = min(recovered.counters.get(CLOSED_UNTIL, 0), now + self.max_hold_seconds)
        for record in recovered.scopes:
            scope = self.restored_scope(record, rows(record), now)
            if closed_until > max(now, scope.closed_until):
                scope.closed_until = closed_until
            self.adopt(scope, Changes())
        self.answers.restore(recovered.answers)

    def restored_scope(
        self, record: ScopeRecord, columns: SlotColumns, now: float, longest: int = 0
    ) -> Scope:
        """Restore a scope. May run in a thread: requests do not see the scope before `adopt`.

        `longest` is that of the longest lease and quarantine that its store has seen, in seconds.
        """
        scope = Scope(record.geometry, self.limits.quarantine_seconds, self._removal_room)
        longest = max(self.max_hold_seconds, longest)
        scope.number = record.number
        scope.tenant = record.tenant
        scope.epoch = record.epoch
        scope.cleared_until = record.cleared_until
        # In epoch 0 this is the time until which a new scope is closed, see `close_until`.
        if not record.epoch and record.cleared_until > now:
            scope.close_until(min(record.cleared_until, now + longest))
        scope.model = record.model
        problems = ScopeRestorer(scope, columns, now, longest).run()
        self.recovery_problems += [f"{record.geometry.scope}: {problem}" for problem in problems]
        return scope

    def check_access(self, caller: Caller, names: Sequence[str], fields: str) -> None:
        """Check that a caller may use scopes; unknown ones are skipped.

        `fields` is the name of their field in the request, with `{}` for the index of a scope.

        Raises:
            RequestError: 403 for the first scope of another tenant.
        """
        for number, name in enumerate(names):
            scope = self.scopes.get(name)
            if scope is not None and not may_use(caller, scope.tenant):
                message = f"scope {name!r} is another tenant's"
                raise RequestError(403, "forbidden", message, fields.format(number))

    # Shared with `core.sglang`.

    def find(self, name: str, *, changes: bool = True) -> Scope:
        """Find a scope for a request by SGLang's protocol."""
        scope = self._known(name, "namespace")
        if changes:
            self._changed[name] = scope
        return scope

    def lease(
        self, scope: Scope, keys: Sequence[str], prefixes: Sequence[str], now: float
    ) -> tuple[list[p.Reserved], Sequence[int], list[int]]:
        """Reserve by SGLang's protocol, with leases of the default length."""
        first = self._leases.take(len(keys))
        return scope.reserve(keys, prefixes, "", first, now, now + self.limits.lease_seconds)

    def check_room(self, new: Sequence[p.ScopeGeometry], caller: Caller, field: str) -> None:
        """Check that a caller may create these scopes, none of which exists.

        Several servers announce them before they make them: they may be in `elsewhere`.

        Raises:
            RequestError: 413 or 403, a limit of the server or a quota of the tenant is exceeded.
        """
        names = {one.scope for one in new}
        if new and len(self.scopes.keys() | self.elsewhere.keys() | names) > self.max_scopes:
            raise too_large(f"this server keeps {self.max_scopes} scopes", field)
        tenant, quota = caller.tenant, self.quotas.of(caller.tenant)
        if quota is NO_QUOTA or not new:
            return
        if why := quota.beyond(TenantUsage.of(self.held_by(tenant, names)), new):
            raise RequestError(403, "quota", f"tenant {tenant!r} is at its quota: {why}", field)

    def held_by(self, tenant: str, without: Collection[str] = ()) -> Iterator[p.ScopeGeometry]:
        """Geometries of the scopes of one tenant, "" for scopes without tenant."""
        for scope in self.scopes.values():
            if scope.tenant == tenant:
                yield scope.geometry
        for name, (geometry, holder) in self.elsewhere.items():
            if holder == tenant and name not in self.scopes and name not in without:
                yield geometry

    def _counters(self) -> dict[str, int]:
        return {
            "lease": self._leases.ceiling,
            "scope": self._last_number,
            # The last one, which depends on whether others have changed.
            LONGEST: self.max_hold_seconds,
        }

    def _visible_to(self, caller: Caller) -> list[str]:
        return [name for name, scope in self.scopes.items() if may_use(caller, scope.tenant)]

    def _known(self, name: str, field: str) -> Scope:
        scope = self.scopes.get(name)
        if scope is None:
            raise unknown_scope(name, field)
        return scope

    def _scopes(self, request: Columns) -> list[Scope]:
        """Return the scopes of a request, or refuse it before it changes anything."""
        check_limits(request, self.limits)
        parts: Sequence[Any] = request.scopes
        scopes = [self._known(part.scope, f"scopes[{i}].scope") for i, part in enumerate(parts)]
        if isinstance(request, p.Reserve) and self.draining:
            message = "this server gives no new leases while it drains"
            raise RequestError(503, "draining", message)
        if isinstance(request, p.Commit):
            check_lengths(request, [scope.geometry.slot_bytes for scope in scopes])
        return scopes

    def _settled(
        self,
        parts: Sequence[_PartT],
        scopes: Sequence[Scope],
        settle: Callable[[_PartT, Scope], list[bool]],
    ) -> p.SettledLeases:
        answers = list[p.SettledScope]()
        for part, scope in zip(parts, scopes, strict=True):
            self._changed[part.scope] = scope
            done = settle(part, scope)
            states = (
                [p.Settled.DONE] * len(done)
                if all(done)
                else [p.Settled.DONE if one else p.Settled.STALE for one in done]
            )
            answers.append(p.SettledScope(states=states))
        return p.SettledLeases(scopes=answers)

    def _status(self, scope: Scope, now: float) -> p.ScopeStatus:
        return p.ScopeStatus(
            **structs.asdict(scope.geometry),
            free=scope.available,
            leased=len(scope.leases),
            live=len(scope.lru),
            quarantined=scope.quarantined,
            hits=scope.hits,
            misses=scope.misses,
            evicted=scope.evicted,
            tenant=scope.tenant,
            expired_leases=scope.expired,
            model=scope.model,
            owner=self.url,
            log_bytes=self.log_bytes(scope.number),
            closed_seconds=max(0.0, scope.closed_until - now),
        )


def _found(scope: Scope, slots: Sequence[int]) -> p.FoundPages:
    table, run = scope.table, as_run(slots)
    columns = (table.generations, table.lengths, table.checksums)
    if isinstance(run, range) and run.start >= 0:
        # Pages that were written together: slices of the columns.
        found = [column[run.start : run.stop].tolist() for column in columns]
    else:
        found = [[column[slot] if slot >= 0 else 0 for slot in slots] for column in columns]
    generations, lengths, checksums = found
    return p.FoundPages(
        slots=list(slots), generations=generations, lengths=lengths, checksums=checksums
    )
