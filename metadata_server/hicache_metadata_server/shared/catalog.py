"""Catalog of scopes: the list in Redis, and scripts that run on one scope.

The list is the truth about which scopes exist. A server caches it, and notices by a script's reply
(`UNKNOWN`) that a scope of its cache is gone.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import (
    RequestError,
    key_reused,
    mismatch,
    too_large,
    unknown_scope,
)
from hicache_metadata_server.core.tenants import (
    ANYBODY,
    NO_QUOTA,
    Caller,
    Quota,
    TenantUsage,
    beyond_quota,
)
from hicache_metadata_server.shared.connection import ScriptCall
from hicache_metadata_server.shared.names import SCOPES, ScopeKeys, idempotency_redis_key
from hicache_metadata_server.shared.scripts import (
    NO_IDEMPOTENCY_KEY,
    OK,
    REFUSED,
    REUSED,
    UNKNOWN,
    IdempotencyKey,
    packed,
    script,
    unpacked,
    value_of,
)

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from hicache_metadata_server.core.tenants import Tenants
    from hicache_metadata_server.shared.connection import RedisConnection

# In the order in which the script `register` compares them: it returns the index of the first that
# differs.
FIELDS: Final = ("slots", "slot_bytes", "geometry", "identity")
MICROSECONDS: Final = 1_000_000
BEYOND_QUOTA: Final = 5
"""Index that the script `register` returns, in the place of that of a field, beyond a quota."""
NO_LEASES: Final[Mapping[str, float]] = MappingProxyType({})


class KnownScope(NamedTuple):
    """A scope of the list."""

    geometry: p.ScopeGeometry
    keys: ScopeKeys
    tenant: str = ""


class ScriptTask(NamedTuple):
    """A script to run on a scope."""

    name: str
    scope: str
    field: str
    """Field of the request that names the scope, for error messages."""
    arguments: object = None
    pages: bytes = b""
    chunk: str = ""
    """Distinguishes it from other scripts of the same request under one idempotency key."""


class ScopeCatalog:
    """Cache of the list of scopes, and runner of scripts on scopes."""

    def __init__(self, connection: RedisConnection, limits: p.Limits, tenants: Tenants) -> None:
        self.connection = connection
        self.known: dict[str, KnownScope] = {}
        self._tenants = tenants
        self.clock_offset = 0
        """Microseconds that scripts add to the time of Redis, so that tests need not wait."""
        self._quarantine = round(limits.quarantine_seconds * MICROSECONDS)
        self._max_lease = limits.max_lease_seconds
        self._once_milliseconds = max(1, round(limits.idempotency_seconds * 1000))

    async def refresh(self) -> None:
        """Read the whole list again."""
        found: dict[bytes, bytes] | list[bytes] = await self.connection.command("HGETALL", SCOPES)
        pairs = (
            found.items() if isinstance(found, dict) else zip(found[::2], found[1::2], strict=True)
        )
        known = {name.decode(): record for name, record in pairs}
        # Replaced rather than updated: a scope that another server has dropped goes.
        self.known = {name: self._known(name, record) for name, record in known.items()}
        self._tenants.of_scope = {name: known.tenant for name, known in self.known.items()}

    async def find(self, names: Sequence[str], fields: Sequence[str]) -> list[KnownScope]:
        """Return scopes by their names.

        Args:
            names: names of scopes.
            fields: for each name its field in the request, for the error.

        Raises:
            RequestError: a scope does not exist.
        """
        await self.learn(names)
        for name, field in zip(names, fields, strict=True):
            if name not in self.known:
                raise unknown_scope(name, field)
        return [self.known[name] for name in names]

    async def learn(self, names: Iterable[str]) -> None:
        """Read those of these scopes from the list that are not cached."""
        # Only unknown names cost a round trip. A cached scope that is gone is found out by the
        # reply of the script that uses it.
        missing = [name for name in dict.fromkeys(names) if name not in self.known]
        if missing:
            records = await self.connection.command("HMGET", SCOPES, *missing)
            self._know(
                {
                    name: self._known(name, record)
                    for name, record in zip(missing, records, strict=True)
                    if record
                }
            )

    async def register(
        self,
        parts: Sequence[p.ScopeGeometry],
        idempotency_key: IdempotencyKey,
        max_scopes: int,
        caller: Caller = ANYBODY,
        quota: Quota = NO_QUOTA,
        earlier: Mapping[str, float] = NO_LEASES,
    ) -> list[bool]:
        """Create scopes for the caller, or check that they are as described: all or none.

        Returns:
            For each scope, true if it is new.

        Raises:
            RequestError: a scope is different or belongs to another tenant, or there are too many,
                in the store or of this tenant.
        """
        # The key of the answers has to be on the node of the list: a script uses one node.
        prefix = SCOPES + b":" if self.connection.is_cluster else b"hm:"
        tenant = caller.tenant
        limits = [
            -1 if limit is None else limit for limit in (quota.scopes, quota.slots, quota.bytes)
        ]
        arguments = (
            [part.scope for part in parts],
            [_record(part, tenant) for part in parts],
            max_scopes,
            tenant,
            caller.sees_all,
            limits,
        )
        call = ScriptCall(
            script("register"),
            (SCOPES, idempotency_redis_key(idempotency_key.key, prefix)),
            (packed(arguments), idempotency_key.digest, "register", self._once_milliseconds),
        )
        (reply,) = await self.connection.run([call])
        if reply[0] == REUSED:
            raise key_reused()
        if reply[0] == REFUSED:
            scope, at, known = value_of(reply)
            if at == BEYOND_QUOTA:
                places: list[int] = scope
                raise beyond_quota(
                    tenant, quota, TenantUsage(*map(int, known)), [parts[i] for i in places]
                )
            raise _mismatch(parts, scope, at, known, max_scopes)
        created: list[bool] = value_of(reply)
        # A scope that is not new may be one whose server died between its two scripts, so what this
        # server has not seen is made as well; `make` changes nothing of a scope that exists.
        new = [
            part
            for part, is_new in zip(parts, created, strict=True)
            if is_new or part.scope not in self.known
        ]
        entered = {part.scope for part, is_new in zip(parts, created, strict=True) if is_new}
        await self.make(new, tenant, earlier, entered=entered)
        return created

    async def make(
        self,
        parts: Sequence[p.ScopeGeometry],
        tenant: str = "",
        earlier: Mapping[str, float] = NO_LEASES,
        *,
        entered: Container[str] = (),
        is_lost: bool = False,
    ) -> None:
        """Create the keys of scopes that the list has, or will have; keep existing ones.

        Args:
            parts: the scopes.
            tenant: tenant of the scopes.
            earlier: remaining seconds, by scope, of leases from before the store lost them. The
                scope gives no slot until then.
            entered: scopes that this request has entered into the list. Their `earlier` replaces
                that of a server that has found no keys before this script and passed `is_lost`.
            is_lost: the keys are taken for lost, although a server may be about to create them.

        Raises:
            RequestError: a scope exists with other properties.
        """
        new = {part.scope: part for part in parts}
        if not new:
            return
        self._know({name: KnownScope(part, ScopeKeys(name), tenant) for name, part in new.items()})
        lasts = {
            name: round(min(earlier.get(name, 0.0), self._max_lease) * MICROSECONDS) for name in new
        }
        tasks = [
            ScriptTask(
                "make", name, "", [*_record(part, tenant), lasts[name], name in entered, is_lost]
            )
            for name, part in new.items()
        ]
        made = await self.connection.run([self._call(task, NO_IDEMPOTENCY_KEY) for task in tasks])
        for part, reply in zip(new.values(), made, strict=True):
            if value_of(reply) != _record(part, tenant):
                raise RequestError(
                    409,
                    "mismatch",
                    f"the list of scopes was lost, and {part.scope!r} has other properties "
                    f"than the request",
                    "scopes",
                )

    async def run(
        self, tasks: Sequence[ScriptTask], idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> list[list[Any]]:
        """Run scripts on known scopes; return their replies.

        Raises:
            RequestError: a scope is gone, or the idempotency key belongs to another request.
            StoreError: Redis was not reached, or did not answer; some of the scripts may have been
                executed.
        """
        replies = await self.connection.run([self._call(task, idempotency_key) for task in tasks])
        lost = [place for place, reply in enumerate(replies) if reply[0] == UNKNOWN]
        if lost:
            for place, reply in zip(
                lost,
                await self._run_again([tasks[place] for place in lost], idempotency_key),
                strict=True,
            ):
                replies[place] = reply
        if any(reply[0] == REUSED for reply in replies):
            raise key_reused()
        return replies

    async def used(self, name: str) -> int:
        """Return the number of slots that are not free; at 0 the scope can be removed."""
        used, _ = await self._drop(name, remove=False)
        return used

    async def remove(self, name: str) -> int:
        """Remove a scope unless slots of it are in use; return the number of those."""
        # Off the list first: other servers create the keys of a listed scope again.
        await self.connection.command("HDEL", SCOPES, name)
        used, record = await self._drop(name, remove=True)
        if used:
            # The record of the scope itself: the entry of the list may be missing, or describe a
            # scope of that name that was dropped meanwhile.
            await self.connection.command("HSET", SCOPES, name, packed(record))
        else:
            self.known.pop(name, None)
            self._tenants.of_scope.pop(name, None)
        return used

    async def _drop(self, name: str, *, remove: bool) -> tuple[int, list[str]]:
        (reply,) = await self.connection.run(
            [self._call(ScriptTask("drop", name, "", [remove]), NO_IDEMPOTENCY_KEY)]
        )
        found: tuple[int, list[str]] = (0, []) if reply[0] == UNKNOWN else tuple(value_of(reply))
        return found

    async def claim(self, idempotency_key: IdempotencyKey) -> bool:
        """Claim an idempotency key for a request; return True if it is new.

        Needed where the scopes of the request may be on other nodes than the key: each script then
        sees only the answers of its own scope.

        Raises:
            RequestError: it belongs to another request.
        """
        call = ScriptCall(
            script("claim"),
            (idempotency_redis_key(idempotency_key.key),),
            (idempotency_key.digest, self._once_milliseconds),
        )
        (held,) = await self.connection.run([call])
        if held == 0:
            raise key_reused()
        return bool(held == 2)

    async def unclaim(self, idempotency_key: IdempotencyKey) -> None:
        """Release the key of a request that was refused."""
        await self.connection.command("DEL", idempotency_redis_key(idempotency_key.key))

    async def _run_again(
        self, tasks: Sequence[ScriptTask], idempotency_key: IdempotencyKey
    ) -> list[list[Any]]:
        """Create listed scopes whose keys are missing, and run the scripts once more.

        A server that is killed between its two scripts leaves a scope in the list without keys. One
        that is still between them sets right what is assumed here, see `make`.
        """
        names = list(dict.fromkeys(task.scope for task in tasks))
        for name in names:
            self.known.pop(name, None)
        found = await self.find([task.scope for task in tasks], [task.field for task in tasks])
        for one in found:
            # Redis may also have lost the keys, and leases with them. The writers still hold these
            # leases, and the longest may last as long as any.
            lasts = {one.geometry.scope: self._max_lease}
            await self.make([one.geometry], one.tenant, lasts, is_lost=True)
        replies = await self.connection.run([self._call(task, idempotency_key) for task in tasks])
        for task, reply in zip(tasks, replies, strict=True):
            if reply[0] == UNKNOWN:
                raise unknown_scope(task.scope, task.field)
        return replies

    def _call(self, task: ScriptTask, idempotency_key: IdempotencyKey) -> ScriptCall:
        known = self.known.get(task.scope)
        keys = known.keys if known is not None else ScopeKeys(task.scope)
        arguments = (self._quarantine, self.clock_offset, packed(task.arguments), task.pages)
        if not idempotency_key.digest:
            return ScriptCall(script(task.name), keys.all, (*arguments, b""))
        kept = idempotency_redis_key(
            idempotency_key.key, keys.prefix if self.connection.is_cluster else b"hm:"
        )
        more = (idempotency_key.digest, f"{task.scope}/{task.chunk}", self._once_milliseconds)
        return ScriptCall(script(task.name), (*keys.all, kept), (*arguments, *more))

    def _know(self, found: Mapping[str, KnownScope]) -> None:
        self.known |= found
        self._tenants.of_scope |= {name: known.tenant for name, known in found.items()}

    def _known(self, name: str, record: bytes) -> KnownScope:
        cached = self.known.get(name)
        slots, slot_bytes, geometry, identity, tenant = unpacked(record)
        read = p.ScopeGeometry(
            scope=name,
            slots=int(slots),
            slot_bytes=int(slot_bytes),
            geometry=geometry,
            identity=identity,
        )
        # The same object for the same record, with its keys: `refresh` reads thousands of scopes.
        if cached is not None and (cached.geometry, cached.tenant) == (read, tenant):
            return cached
        return KnownScope(read, ScopeKeys(name), tenant)


def tasks_of(name: str, scopes: Iterable[str]) -> list[ScriptTask]:
    """Return one script for each of several scopes."""
    return [ScriptTask(name, scope, "scopes") for scope in scopes]


def is_refused(reply: list[Any]) -> bool:
    """Return True if a script has refused."""
    return bool(reply[0] != OK)


def _record(part: p.ScopeGeometry, tenant: str) -> list[str]:
    """Return the record of a scope in the list."""
    # Numbers as text: Lua's numbers are not exact beyond 2**53.
    return [str(part.slots), str(part.slot_bytes), part.geometry, part.identity, tenant]


def _mismatch(
    parts: Sequence[p.ScopeGeometry], scope: int, at: int, known: str, max_scopes: int
) -> RequestError:
    if scope < 0:
        return too_large(f"this server keeps {max_scopes} scopes", "scopes")
    if at == len(FIELDS):
        return RequestError(
            403,
            "forbidden",
            f"scope {parts[scope].scope!r} is another tenant's",
            f"scopes[{scope}]",
        )
    name, part = FIELDS[at], parts[scope]
    value: object = int(known) if name.startswith("slot") else known
    return mismatch(part.scope, name, value, getattr(part, name), f"scopes[{scope}].{name}")
