"""One server among several: its heartbeats, the scopes that it takes, and those that it gives back.

docs/design/metadata-scopes.md has the keys and the steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from typing import TYPE_CHECKING, Any, Final

import msgspec
import structlog

from hicache_metadata_server.core.errors import StoreError, moving
from hicache_metadata_server.core.restore import trim_heap
from hicache_metadata_server.protocol import ScopeStatus, ServerState
from hicache_metadata_server.shared.connection import ScriptCall
from hicache_metadata_server.shared.ownership import (
    DECODE_SCOPE,
    DECODE_SERVER,
    LEASE_SECONDS,
    Incarnation,
    Observer,
    ScopeEntry,
    ServerRecord,
    boot_time,
    homes,
    placement,
    process_has_ended,
    ready_servers,
    surplus,
    this_process,
)
from hicache_metadata_server.shared.scope_log import (
    ENTRIES,
    IDLE_LOG_BYTES,
    ScopeLog,
    ScopeLogStore,
    load,
    log_of,
    read_head,
    release,
    remove,
    restored,
    revoke,
    take,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.protocol import ScopeGeometry
    from hicache_metadata_server.shared.connection import RedisConnection

BEAT_SECONDS: Final = 0.25
"""Interval of heartbeats."""
FORGET_LEASES: Final = 20
"""Leases after which the record of an ended incarnation is removed."""
TAKES: Final = 8
"""Scopes that a server takes at the same time."""
STATUS_SECONDS: Final = 1.0
"""Interval in which a server publishes the slots of its scopes by state."""
SHORTEN_ROUNDS: Final = 40
"""Tenths of a heartbeat, for which logs of scopes are compacted before these are given back."""
IDLE_SECONDS: Final = 3.0
"""Time without a request after which a scope may go to a server with fewer scopes."""
OFFER_SECONDS: Final = 30.0
"""Interval in which a scope that no other server has taken is offered again."""
UNREADABLE_SECONDS: Final = 10.0
"""Interval in which a scope that cannot be read is tried again."""
WAIT_SECONDS: Final = 1.0
"""Longest time for which a request waits for a scope that is about to get an owner."""
SERVERS: Final = b"hm:{map}:servers"
VERSION: Final = b"hm:{map}:version"
STATUSES: Final = b"hm:{map}:statuses"

# The record of this server, and in return everybody's; the map only if it has changed.
_BEAT: Final = """
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2])
local version, entries = redis.call('GET', KEYS[3]) or '', {}
local run_id = string.match(redis.call('INFO', 'server'), 'run_id:(%x+)')
if version ~= ARGV[3] or run_id ~= ARGV[4] then entries = redis.call('HGETALL', KEYS[2]) end
return {run_id, redis.call('HGETALL', KEYS[1]), version, entries}
"""
# Lookups go on while Redis has no memory for changes. Redis 6.2 has no such flag.
_BEAT_WITHOUT_MEMORY: Final = "#!lua flags=allow-oom\n" + _BEAT
_PUBLISH: Final = """
if ARGV[1] ~= 'any' and ARGV[1] ~= (redis.call('GET', KEYS[2]) or '') then return 0 end
for i = 2, #ARGV, 2 do
  if ARGV[i + 1] == '' then redis.call('HDEL', KEYS[1], ARGV[i])
  else redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
end
return redis.call('INCR', KEYS[2])
"""
_ENCODE: Final = msgspec.msgpack.Encoder().encode

_log = structlog.get_logger()


class ScopeOwner:
    """The scopes that one server owns, and the map of all others.

    For use from one event loop, as its connection. `beat` is called every `BEAT_SECONDS`, and never
    by two tasks at once. `now` is the clock of service and store, and `clock` a monotonic one for
    leases.
    """

    def __init__(
        self,
        connection: RedisConnection,
        service: MetadataService,
        store: ScopeLogStore,
        *,
        url: str,
        now: Callable[[], float],
        lease_seconds: float = LEASE_SECONDS,
        clock: Callable[[], float] = boot_time,
    ) -> None:
        self.url = url
        self.servers: dict[str, ServerRecord] = {}
        """All incarnations with a record, ended ones too."""
        self.entries: dict[str, ScopeEntry] = {}
        """All scopes of the store."""
        self.flush: Callable[[], Awaitable[None] | None] = lambda: None
        """Writes all changes of the service."""
        self.discarded: Callable[[Sequence[str]], None] = lambda names: None
        """Called after unwritten changes of scopes were discarded."""
        self.wanted = asyncio.Event()
        """A request waits for a scope without owner: the next heartbeat should be soon."""
        self.incarnation = Incarnation(lease_seconds)
        self._connection = connection
        self._service = service
        self._store = store
        self._now = now
        self._clock = clock
        self._process = this_process()
        self._lease_seconds = lease_seconds
        self._observer = Observer(lease_seconds)
        self._ended = set[str]()
        """Ended incarnations of this process, for whose end it need not wait."""
        self._leaving = set[str]()
        """Scopes that are about to be given back."""
        self.dropping = set[str]()
        """Scopes that a request is dropping. Heartbeats do not take them for scopes without owner."""
        self._created: dict[str, ScopeLog | None] = {}
        """Logs of scopes that the service is about to make; None before they have one."""
        self._beats = 0
        self._version = b""
        self._run_id = b""
        self._unverified = False
        """Another Redis answers than before, and not all of its heads were compared with the logs
        of this server."""
        self._primary_since = -math.inf
        """When another Redis than before has first answered."""
        self._polled = -math.inf
        """When the map was read last."""
        self._next_statuses = -math.inf
        self._unreadable: dict[str, float] = {}
        """When each scope was last found that cannot be read."""
        self._free_since: dict[str, float] = {}
        """When this server has first found a group without owner."""
        self._used: dict[str, tuple[tuple[int, ...], float]] = {}
        """Counts of the requests of each owned scope, and since when they are these."""
        self._offered: dict[str, float] = {}
        """When each group was given back for a server with fewer scopes."""
        self._polling = asyncio.Lock()
        service.url = url
        service.log_bytes = store.log_bytes

    @property
    def has_lost_lease(self) -> bool:
        """True if the lease has ended, and nothing may be answered before Redis has given another."""
        return self.incarnation.has_ended(self._clock())

    def serves(self, names: Iterable[str]) -> bool:
        """True if this server may answer requests about these scopes now."""
        scopes, leaving = self._service.scopes, self._leaving
        return self.incarnation.holds(self._clock()) and all(
            name in scopes and name not in leaving for name in names
        )

    def drop(self, names: Iterable[str]) -> None:
        """Forget scopes that another server may own by now."""
        there = [name for name in names if name in self._service.scopes]
        for name in there:
            self._store.detach(self._service.scopes[name].number)
            self._service.release(name)
            _log.warning("scope_lost", scope=name)
        if there:
            self.discarded(there)

    async def beat(self) -> None:
        """Renew the lease, read the map, take scopes for this server, and give others back.

        A scope that cannot be read is logged, and tried again later; all others are served.

        Raises:
            StoreError: Redis was not reached.
        """
        await self.poll()
        await self._verify()
        for name in list(self._store.lost):
            # Leases that were given may be missing in the log: the scope gives no slot for a time.
            await revoke(self._connection, name, self._service.max_hold_seconds)
            self._store.lost.discard(name)
        await self._publish_statuses()
        # The others see no record of an incarnation before its first heartbeat, and might take from
        # it what it takes before.
        if not self.incarnation.holds(self._clock()):
            return
        taking, leaving = self._wanted()
        scopes = len(self._service.scopes)
        try:
            for begin in range(0, len(taking), TAKES):
                some = [self._take(name) for name in taking[begin : begin + TAKES]]
                for failed in await asyncio.gather(*some, return_exceptions=True):
                    if failed is not None:
                        raise failed
        finally:
            if len(self._service.scopes) > scopes:
                await asyncio.to_thread(trim_heap)
        if leaving:
            await self.give_back(leaving)

    async def poll(self) -> None:
        """Renew the lease and read the map.

        Raises:
            StoreError: Redis was not reached. The lease goes on until its end.
        """
        async with self._polling:
            if self.incarnation.has_ended(self._clock()):
                self._begin_anew()
            self._beats += 1
            mine = ServerRecord(
                self.url,
                self._beats,
                self._lease_seconds,
                len(self._service.scopes),
                self._service.draining,
                self._process,
            )
            sent = self._clock()
            run_id, records, version, entries = await self._send_beat(
                self.incarnation.id, _ENCODE(mine), self._version, self._run_id
            )
            received = self._polled = self._clock()
            if self._run_id not in (b"", run_id):
                self._primary_since = received
                self._unverified = True
            if not self.incarnation.renew(sent, received):
                self._begin_anew()
            found = _pairs(records)
            self._observer.observe(found, run_id, sent, received)
            self.servers = {name: DECODE_SERVER(record) for name, record in found.items()}
            if (version, run_id) != (self._version, self._run_id):
                self._version = version
                self._run_id = run_id
                self.entries = {
                    name: DECODE_SCOPE(record) for name, record in _pairs(entries).items()
                }
                self._service.elsewhere = {
                    name: (entry.geometry, entry.tenant) for name, entry in self.entries.items()
                }

    async def admit(self, names: Sequence[str]) -> str:
        """Wait until this server serves scopes, or return the address of the server that does.

        Returns "" if this server serves them, or if one of them does not exist.

        Raises:
            RequestError: 503, the scopes have no owner yet, or several.
            StoreError: Redis was not reached.
        """
        begin = self._clock()
        until = begin + WAIT_SECONDS
        while not self.serves(names):
            if not self.incarnation.holds(begin) and self._alive().keys() - {self.incarnation.id}:
                # This server may be cut off from Redis, and another one have them.
                raise moving()
            # Another server may just have made it, taken it, or given it back.
            unknown = not all(name in self.entries for name in names)
            if unknown or self._clock() - self._polled >= BEAT_SECONDS / 5:
                await self.poll()
            if not all(name in self.entries for name in names):
                return ""
            owners = {self._owner_of(name) for name in names}
            if len(owners) == 1 and (owner := owners.pop()) not in ("", self.incarnation.id):
                record = self.servers.get(owner)
                if record is not None and record.url != self.url:
                    return record.url
                # The process that was killed here: its scopes are free once its lease has ended.
                until = max(until, begin + self._lease_seconds + WAIT_SECONDS)
            if len({self.entries[name].group for name in names}) > 1:
                await self._join(names)
            if self._clock() >= until:
                raise moving()
            self.wanted.set()
            await asyncio.sleep(BEAT_SECONDS / 5)
        return ""

    def less_loaded(self) -> str:
        """Address of a server that should make new scopes, since it has fewer; "" for this one."""
        alive = self._alive()
        ready, me = ready_servers(alive), self.incarnation.id
        best = min(ready, key=lambda name: alive[name].scopes, default=me)
        fewer = me not in ready or alive[best].scopes < len(self._service.scopes)
        return alive[best].url if best != me and fewer else ""

    async def create(
        self, geometries: Sequence[ScopeGeometry], tenant: str, group: str = ""
    ) -> bool:
        """Become the owner of scopes that nobody has made, before the service makes them.

        `attach` follows once it has.

        Returns:
            False if the map has changed since it was read: the caller has to check again whether
            they may be made.

        Raises:
            RequestError: 503, this server has no lease.
            StoreError: Redis was not reached.
        """
        if not self.incarnation.holds(self._clock()):
            raise moving()
        me, group = self.incarnation.id, group or geometries[0].scope
        entries = {one.scope: ScopeEntry(one, me, group, tenant) for one in geometries}
        # Until they have a log, no heartbeat may take them for scopes that were lost.
        self._created |= dict.fromkeys(entries)
        if not await self.publish(entries, expected=self._version):
            return False
        known = dict[str, ScopeEntry | None]()
        for name, entry in entries.items():
            token, head = await take(self._connection, name, b"", me)
            if token:
                # Redis had lost it, and this server still has it from before. Kept, it would go on
                # without its record and its slots in the new log.
                self.drop([name])
                number = self._service.new_number()
                self._created[name] = log_of(name, number, token, head, self._now())
            else:
                # The map had lost it.
                known[name] = msgspec.structs.replace(entry, owner=head.owner)
        if known:
            await self.publish(known)
        return not known

    def attach(self) -> None:
        """Begin to write the logs of created scopes that the service has made."""
        for name, log in self._created.items():
            if log is not None and name in self._service.scopes:
                log.number = self._service.scopes[name].number
                self._store.attach(log)
        self._created = {}

    async def give_back(self, names: Sequence[str]) -> None:
        """Give scopes back, with everything written, for another server to take at once.

        Raises:
            StoreError: some were not given back. Their leases end.
        """
        # Their next owner has little to replay then. A number of rounds, since heartbeats wait.
        logs = [log for log in self._store.logs() if log.name in names]
        for log in logs:
            log.limit = IDLE_LOG_BYTES
        for _ in range(SHORTEN_ROUNDS):
            if any(log.log_bytes > log.limit for log in logs):
                await asyncio.sleep(BEAT_SECONDS / 10)
        self._leaving |= set(names)
        try:
            # The others have to see that it drains before they see that the scopes are free.
            await self.poll()
            if (written := self.flush()) is not None:
                await written
            there = [name for name in names if name in self._service.scopes]
            given = [self._store.detach(self._service.scopes[name].number) for name in there]
            for name in there:
                self._service.release(name)
            await release(self._connection, [log for log in given if log is not None])
            entries = {name: self.entries[name] for name in there if name in self.entries}
            if entries:
                await self.publish(
                    {
                        name: msgspec.structs.replace(entry, owner="")
                        for name, entry in entries.items()
                    }
                )
        finally:
            self._leaving -= set(names)

    async def other_statuses(self) -> list[ScopeStatus]:
        """Scopes of the other servers, as these have published them."""
        records = await self._connection.command("HGETALL", STATUSES)
        published = {
            status.scope: status
            for record in records.values()
            for status in msgspec.msgpack.decode(record, type=list[ScopeStatus])
            # A server that has lost a scope publishes it no more, but a killed one does.
            if status.scope in self.entries
        }
        # Its owner is the one of now: a killed server has published itself.
        return [
            msgspec.structs.replace(
                published.get(name) or _unpublished(entry), owner=self._owner_url(name)
            )
            for name, entry in self.entries.items()
            if name not in self._service.scopes
        ]

    def members(self) -> dict[str, ServerState]:
        """States of all servers of this store, by their addresses."""
        found = dict[str, ServerState]()
        for incarnation, record in self.servers.items():
            state = ServerState.DRAINING if record.draining else ServerState.SERVING
            if not self._is_over(incarnation):
                found[record.url] = state
            else:
                # Unless it was started again.
                found.setdefault(record.url, ServerState.SILENT)
        return found

    def unowned(self) -> int:
        """Number of scopes that no server owns, as far as this server knows."""
        owned = self._service.scopes
        return sum(name not in owned and not self._owner_of(name) for name in self.entries)

    async def close(self) -> None:
        """Remove the record of this server, which owns nothing any more, and close connections."""
        try:
            with contextlib.suppress(StoreError):
                await self._remove([self.incarnation.id, *self._ended])
        finally:
            await self._connection.close()

    # Implementation.

    async def _send_beat(self, *arguments: bytes | str) -> Any:
        call = ScriptCall(_BEAT, (SERVERS, ENTRIES, VERSION), arguments)
        try:
            (answer,) = await self._connection.run([call])
        except StoreError as error:
            if "maxmemory" not in str(error):
                raise
            call = call._replace(source=_BEAT_WITHOUT_MEMORY)
            (answer,) = await self._connection.run([call])
        return answer

    async def _publish_statuses(self) -> None:
        now = self._clock()
        if now < self._next_statuses:
            return
        self._next_statuses = now + STATUS_SECONDS
        mine = self._service.list_scopes(now=self._now()).scopes
        await self._connection.command("HSET", STATUSES, self.incarnation.id, _ENCODE(mine))
        owners = {entry.owner for entry in self.entries.values()}
        for name in self.servers:
            if name not in owners and self._observer.silence(name) >= FORGET_LEASES:
                await self._remove([name])

    async def _remove(self, incarnations: Iterable[str]) -> None:
        for key in (SERVERS, STATUSES):
            await self._connection.command("HDEL", key, *incarnations)

    def _begin_anew(self) -> None:
        self._ended.add(self.incarnation.id)
        self.incarnation = Incarnation(self._lease_seconds)
        self.drop(list(self._service.scopes))

    def _owner_of(self, name: str) -> str:
        """The incarnation that owns a scope, as far as this server knows; "" for none."""
        owner = self.entries[name].owner
        return "" if not owner or self._is_over(owner) else owner

    def _owner_url(self, name: str) -> str:
        record = self.servers.get(self._owner_of(name))
        return record.url if record is not None else ""

    def _is_over(self, incarnation: str) -> bool:
        """True if an incarnation has ended for certain."""
        record = self.servers.get(incarnation)
        return (
            incarnation in self._ended
            or self._observer.is_gone(incarnation)
            or (record is not None and process_has_ended(record.process))
        )

    def _alive(self) -> dict[str, ServerRecord]:
        """Servers that may take scopes."""
        me = self.incarnation.id
        return {
            name: record
            for name, record in self.servers.items()
            if not self._is_over(name)
            # A process that was killed here. Its lease has to end all the same: two processes may
            # have been given one address.
            and (name == me or record.url != self.url)
        }

    def _wanted(self) -> tuple[list[str], list[str]]:
        """Scopes that this server should take, and those that it should give back."""
        me, owned, alive = self.incarnation.id, self._service.scopes, self._alive()
        owners = {name: self._owner_of(name) for name in self.entries}
        group_homes = homes(owners, self.entries)
        taking, leaving, free = list[str](), list[str](), dict[str, list[str]]()
        # Alone, a draining server keeps its scopes: all but new leases goes on.
        drains = self._service.draining and me not in ready_servers(alive)
        tried_after = self._clock() - UNREADABLE_SECONDS
        for name, entry in self.entries.items():
            if name in owned:
                if drains or group_homes.get(entry.group, me) != me:
                    leaving.append(name)
            elif (
                name in self._created
                or name in self.dropping
                or self._unreadable.get(name, tried_after) > tried_after
            ):
                continue
            elif entry.owner == me or entry.owner in self._ended:
                # Only this server knows that scopes of its ended incarnations are free.
                taking.append(name)
            elif not owners[name]:
                free.setdefault(entry.group, []).append(name)
        now, since = self._clock(), self._free_since
        if now - self._primary_since < self._lease_seconds:
            # This Redis may have lost that another server has taken them.
            return [], leaving
        chosen = placement(free, alive, group_homes) if free else {}
        self._free_since = {group: since.get(group, now) for group in free}
        for group, server in chosen.items():
            # The other may not know yet that they are free: it has seen their owner more lately.
            late = now - self._free_since[group] >= 2 * BEAT_SECONDS and not self._service.draining
            if server == me or late:
                taking += free[group]
        # One at a time: the next choice depends on the server that takes it.
        if not (taking or leaving or free or self._service.draining):
            leaving = self._surplus(owners, alive)
        return taking, leaving

    def _surplus(self, owners: Mapping[str, str], alive: Mapping[str, ServerRecord]) -> list[str]:
        """Scopes of one idle group, if a server with fewer scopes should have them."""
        now, idle = self._clock(), self._idle()
        groups = surplus(owners, self.entries, alive, self.incarnation.id)
        for group, names in groups.items():
            # A server that cannot read them leaves them to this one again.
            is_due = now - self._offered.get(group, -math.inf) >= OFFER_SECONDS
            if is_due and idle.issuperset(names):
                self._offered[group] = now
                _log.info("scopes_offered", scopes=names)
                return names
        return []

    def _idle(self) -> set[str]:
        """Owned scopes that have not been asked for a while."""
        now, before = self._clock(), self._used
        self._used = {}
        for log in self._store.logs():
            if (scope := self._service.scopes.get(log.name)) is not None:
                counts = (scope.hits, scope.misses, log.seq)
                known = before.get(log.name)
                self._used[log.name] = known if known and known[0] == counts else (counts, now)
        return {name for name, (_, since) in self._used.items() if now - since >= IDLE_SECONDS}

    async def _verify(self) -> None:
        """Drop scopes that Redis gives to another server, or has lost.

        Where another Redis answers than before, those that the map gives to this server are
        compared too, until a comparison of all has succeeded.
        """
        every, run_id = self._unverified, self._run_id
        for log in self._store.logs():
            entry = self.entries.get(log.name)
            if log.name not in self._service.scopes or not (
                every or entry is None or entry.owner != self.incarnation.id
            ):
                continue
            confirmed, head = log.confirmed, await read_head(self._connection, log.name)
            is_mine = head.token == log.token
            if head.token and (head.seq if is_mine else head.taken) < confirmed:
                self._store.lost.add(log.name)
                self.drop([log.name])
            elif not is_mine:
                self.drop([log.name])
            elif entry is None or entry.owner != self.incarnation.id:
                # Another server has changed its group by an older entry, or the map has lost it.
                await self._publish_owned(log.name)
        if run_id == self._run_id:
            self._unverified = False

    async def _join(self, names: Sequence[str]) -> None:
        """Make one group of the groups of these scopes: they are asked for together."""
        groups = {self.entries[name].group for name in names}
        group = self.entries[names[0]].group
        await self.publish(
            {
                name: msgspec.structs.replace(entry, group=group)
                for name, entry in self.entries.items()
                if entry.group in groups
            }
        )

    async def _take(self, name: str) -> None:
        incarnation, head = self.incarnation, await read_head(self._connection, name)
        if head.owner and head.owner != incarnation.id and not self._is_over(head.owner):
            return
        token, head = await take(self._connection, name, head.token, incarnation.id)
        if not token:
            return
        log = log_of(name, self._service.new_number(), token, head, self._now())
        loaded = await load(self._connection, name, token)
        try:
            found, scope = await asyncio.to_thread(
                restored, self._service, log, loaded, self._now()
            )
        except Exception as error:  # noqa: BLE001 - a damaged block may raise anything
            if name not in self._unreadable:
                is_defect = not isinstance(error, StoreError)
                _log.error("scope_unreadable", scope=name, error=str(error), exc_info=is_defect)
            self._unreadable[name] = self._clock()
            # A server of another version may be able to read it.
            await release(self._connection, [log])
            return
        self._unreadable.pop(name, None)
        if scope is None:
            # Its first owner has died before it acknowledged anything, or Redis has lost what was.
            # A client makes it again.
            if loaded.rest or loaded.groups:
                _log.error("scope_without_record", scope=name, groups=len(loaded.groups))
            await remove(self._connection, log)
            await self.publish({name: None})
            return
        if head.closed > head.clock:
            scope.closed_until = head.closed - log.offset
        # Fenced in any case; but a scope that was lost meanwhile would be dropped at once.
        if incarnation is not self.incarnation:
            return
        self._service.adopt(scope, found)
        self._store.attach(log)
        _log.info("scope_taken", scope=name, pages=len(scope.lru))
        # Served already: until the others see the entry, the head tells them.
        await self._publish_owned(name)

    async def _publish_owned(self, name: str) -> None:
        """Write the entry of a scope that this server owns."""
        entry, scope = self.entries.get(name), self._service.scopes[name]
        group, me = entry.group if entry else name, self.incarnation.id
        await self.publish({name: ScopeEntry(scope.geometry, me, group, scope.tenant)})

    async def publish(
        self, entries: Mapping[str, ScopeEntry | None], *, expected: bytes = b"any"
    ) -> bool:
        """Write entries of the map; None removes one.

        Returns False, and writes nothing, if the version of the map is not the expected one.
        """
        arguments = [
            part
            for name, entry in entries.items()
            for part in (name, b"" if entry is None else _ENCODE(entry))
        ]
        call = ScriptCall(_PUBLISH, (ENTRIES, VERSION), (expected, *arguments))
        (version,) = await self._connection.run([call])
        if not version:
            return False
        for name, entry in entries.items():
            if entry is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = entry
        return True


def _unpublished(entry: ScopeEntry) -> ScopeStatus:
    """Status of a scope that no server has published: without owner, it gives no slot."""
    geometry, slots = msgspec.structs.asdict(entry.geometry), entry.geometry.slots
    return ScopeStatus(**geometry, free=0, leased=0, live=0, quarantined=slots, tenant=entry.tenant)


def _pairs(flat: Any) -> dict[str, bytes]:
    return {name.decode(): record for name, record in zip(flat[::2], flat[1::2], strict=True)}
