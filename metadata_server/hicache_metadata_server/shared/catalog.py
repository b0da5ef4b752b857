"""The scopes that there are: one list in Redis, and scripts that are run on one of them."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import (
    RefusedError,
    key_reused,
    mismatch,
    too_large,
    unknown_scope,
)
from hicache_metadata_server.core.tenants import (
    ANYBODY,
    NO_QUOTA,
    Caller,
    Holding,
    Quota,
    beyond_quota,
)
from hicache_metadata_server.shared.connection import ScriptCall
from hicache_metadata_server.shared.names import SCOPES, ScopeKeys, idempotency_redis_key
from hicache_metadata_server.shared.script_results import (
    NO_IDEMPOTENCY_KEY,
    OK,
    REFUSED,
    REUSED,
    UNKNOWN,
    IdempotencyKey,
    packed,
    unpacked,
    value_of,
)
from hicache_metadata_server.shared.scripts import script

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_metadata_server.core.tenants import Tenants
    from hicache_metadata_server.shared.connection import RedisConnection

FIELDS: Final = ("slots", "slot_bytes", "geometry", "identity")
MICROSECONDS: Final = 1_000_000
BEYOND_QUOTA: Final = 5
"""In the place of a field that differs."""
NO_LEASES: Final[Mapping[str, float]] = MappingProxyType({})


class KnownScope(NamedTuple):
    """A scope that the list has."""

    geometry: p.ScopeGeometry
    keys: ScopeKeys
    tenant: str = ""


class ScriptTask(NamedTuple):
    """A script that is to be run on a scope."""

    name: str
    scope: str
    field: str
    """Of the request that names the scope."""
    arguments: object = None
    pages: bytes = b""
    piece: str = ""
    """Tells it from others of the same request under one idempotency key."""


class ScopeCatalog:
    """What this server knows of the list, and the way to run scripts on a scope."""

    def __init__(self, connection: RedisConnection, limits: p.Limits, tenants: Tenants) -> None:
        self.connection = connection
        self.known: dict[str, KnownScope] = {}
        self._tenants = tenants
        self.clock_offset = 0
        """Microseconds that the scripts add to Redis' time: for tests, which cannot wait."""
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
        self.known = {name: self._known(name, record) for name, record in known.items()}
        self._tenants.of_scope = {name: known.tenant for name, known in self.known.items()}

    async def find(self, names: Sequence[str], fields: Sequence[str]) -> list[KnownScope]:
        """ScopeCatalog by their names.

        Raises:
            RefusedError: there is none of one of the names, which stands in that field.
        """
        await self.learn(names)
        for name, field in zip(names, fields, strict=True):
            if name not in self.known:
                raise unknown_scope(name, field)
        return [self.known[name] for name in names]

    async def learn(self, names: Iterable[str]) -> None:
        """See which of these scopes the list has."""
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
        most: int,
        caller: Caller = ANYBODY,
        quota: Quota = NO_QUOTA,
        earlier: Mapping[str, float] = NO_LEASES,
    ) -> list[bool]:
        """Make scopes of the caller's, or see that they are as they are said to be: all or none;
        which of them are new.

        Raises:
            RefusedError: one is otherwise, or another tenant's, or there are too many, for all or
            for this tenant.
        """
        prefix = SCOPES + b":" if self.connection.is_cluster else b"hm:"
        tenant, limits = (
            caller.tenant,
            [-1 if some is None else some for some in (quota.scopes, quota.slots, quota.bytes)],
        )
        arguments = (
            [part.scope for part in parts],
            [_record(part, tenant) for part in parts],
            most,
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
                    tenant, quota, Holding(*map(int, known)), [parts[i] for i in places]
                )
            raise _mismatch(parts, scope, at, known, most)
        created: list[bool] = value_of(reply)
        new = [
            part
            for part, is_new in zip(parts, created, strict=True)
            if is_new or part.scope not in self.known
        ]
        await self.make(new, tenant, earlier)
        return created

    async def make(
        self,
        parts: Sequence[p.ScopeGeometry],
        tenant: str = "",
        earlier: Mapping[str, float] = NO_LEASES,
    ) -> None:
        """See that scopes are there that the list has, or will have.

        Args:
            parts: the scopes.
            tenant: whose they are.
            earlier: how long leases of a scope last that nobody knows of here, by its name: it
                gives no slot before.

        Raises:
            RefusedError: one is there, and is another.
        """
        new = {part.scope: part for part in parts}
        if not new:
            return
        self._know({name: KnownScope(part, ScopeKeys(name), tenant) for name, part in new.items()})
        lasts = {
            name: round(min(earlier.get(name, 0.0), self._max_lease) * MICROSECONDS) for name in new
        }
        tasks = [
            ScriptTask("make", name, "", [*_record(part, tenant), lasts[name]])
            for name, part in new.items()
        ]
        made = await self.connection.run([self._call(task, NO_IDEMPOTENCY_KEY) for task in tasks])
        for part, reply in zip(new.values(), made, strict=True):
            if value_of(reply) != _record(part, tenant):
                raise RefusedError(
                    409,
                    "mismatch",
                    f"the list of scopes was lost, and {part.scope!r} is another than it says",
                    "scopes",
                )

    async def run(
        self, tasks: Sequence[ScriptTask], idempotency_key: IdempotencyKey = NO_IDEMPOTENCY_KEY
    ) -> list[list[Any]]:
        """Run scripts on scopes that were found; what each answers.

        Raises:
            RefusedError: a scope is there no longer, or the idempotency key belongs to another
            request. StoreError: Redis was not reached, or did not answer; some may have been done.
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
        """How many slots of a scope are not free; one that has none can be removed."""
        used, _ = await self._drop(name, remove=False)
        return used

    async def remove(self, name: str) -> int:
        """Remove a scope, unless slots of it are in use; how many are."""
        # Off the list first: another server makes anew what is on it.
        await self.connection.command("HDEL", SCOPES, name)
        used, record = await self._drop(name, remove=True)
        if used:
            # As the scope itself has it: what the list had may be of one that was dropped
            # meanwhile, or be missing.
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
        """Hold an idempotency key for a request, where the keys of its scopes may lie on other
        nodes; whether it was nobody's.

        Raises:
            RefusedError: it belongs to another request.
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
        """Let it go: the request was refused."""
        await self.connection.command("DEL", idempotency_redis_key(idempotency_key.key))

    async def _run_again(
        self, tasks: Sequence[ScriptTask], idempotency_key: IdempotencyKey
    ) -> list[list[Any]]:
        """A server that is killed while it initializes leaves scopes that the list has and that
        were not made."""
        names = list(dict.fromkeys(task.scope for task in tasks))
        for name in names:
            self.known.pop(name, None)
        found = await self.find([task.scope for task in tasks], [task.field for task in tasks])
        for one in found:
            # Or Redis has lost what was in them, leases as well: nobody knows how long the longest
            # was.
            await self.make([one.geometry], one.tenant, {one.geometry.scope: self._max_lease})
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
        more = (idempotency_key.digest, f"{task.scope}/{task.piece}", self._once_milliseconds)
        return ScriptCall(script(task.name), (*keys.all, kept), (*arguments, *more))

    def _know(self, found: Mapping[str, KnownScope]) -> None:
        self.known |= found
        self._tenants.of_scope |= {name: known.tenant for name, known in found.items()}

    def _known(self, name: str, record: bytes) -> KnownScope:
        there = self.known.get(name)
        slots, slot_bytes, geometry, identity, tenant = unpacked(record)
        read = p.ScopeGeometry(
            scope=name,
            slots=int(slots),
            slot_bytes=int(slot_bytes),
            geometry=geometry,
            identity=identity,
        )
        if there is not None and (there.geometry, there.tenant) == (read, tenant):
            return there
        return KnownScope(read, ScopeKeys(name), tenant)


def tasks_of(name: str, scopes: Iterable[str]) -> list[ScriptTask]:
    """One script on several scopes."""
    return [ScriptTask(name, scope, "scopes") for scope in scopes]


def is_refused(reply: list[Any]) -> bool:
    """Whether a script has not done what it was to do."""
    return bool(reply[0] != OK)


def _record(part: p.ScopeGeometry, tenant: str) -> list[str]:
    """As the list keeps it: numbers as text, since Lua's are not exact."""
    return [str(part.slots), str(part.slot_bytes), part.geometry, part.identity, tenant]


def _mismatch(
    parts: Sequence[p.ScopeGeometry], scope: int, at: int, known: str, most: int
) -> RefusedError:
    if scope < 0:
        return too_large(f"this server keeps {most} scopes", "scopes")
    if at == len(FIELDS):
        return RefusedError(
            403,
            "forbidden",
            f"scope {parts[scope].scope!r} is another tenant's",
            f"scopes[{scope}]",
        )
    name, part = FIELDS[at], parts[scope]
    value: object = int(known) if name.startswith("slot") else known
    return mismatch(part.scope, name, value, getattr(part, name), f"scopes[{scope}].{name}")
