"""The store of one of several servers: a log and a snapshot in Redis for each scope it owns.

Each write is a script that writes only while this server's fencing token is the scope's.
docs/design/metadata-scopes.md has the keys, and why no acknowledged change is lost.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from array import array
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from hicache_metadata_server.core.changes import Changes, ScopeRecord
from hicache_metadata_server.core.codec import (
    BLOCK,
    SlotChanges,
    SlotColumns,
    changed_blocks,
    columns_of,
)
from hicache_metadata_server.core.errors import FencedError, StoreError
from hicache_metadata_server.core.service import LONGEST, MetadataService
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.shared.connection import RedisConnection, ScriptCall
from hicache_metadata_server.storage.store import (
    BATCH_BLOCKS,
    CompactionBatch,
    DirtyBlocks,
    MetadataStore,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from hicache_metadata_server.core.scope import Scope

MAX_LOG_BYTES: Final = 10 << 20
"""Length of a scope's log from which each write also compacts. A takeover replays it in 0.5 s."""
IDLE_LOG_BYTES: Final = 1 << 20
"""The same in an idle server, and before a scope is given back. A takeover replays it in 30 ms."""
PAGE_BLOCKS: Final = 64
"""Blocks that a takeover reads with one command: less than a megabyte."""
PAGE_GROUPS: Final = 512
"""Entries of the log that it reads with one command: most logs."""
COMPRESSION: Final = 1
READS: Final = 3
"""Attempts to read a scope between two writes of its owner, which serves it meanwhile."""
ENTRIES: Final = b"hm:{map}:scopes"
"""Key of the map of all scopes."""
SCOPE: Final = b"scope"
"""Field of `rest` with the scope's record and its counters; the other fields are windows."""
_ENCODER: Final = msgspec.msgpack.Encoder()
_CHANGES: Final = msgspec.msgpack.Decoder(Changes)

_CHECKED: Final = """
local head = redis.call('HMGET', KEYS[1], 'token', 'seq', 'taken')
local seq = tonumber(head[2] or '0')
if head[1] ~= ARGV[1] then
  -- Taken without writes that this owner knows to be confirmed: a failover has lost them.
  if head[3] and tonumber(head[3]) < tonumber(ARGV[3]) then return 'LOST' end
  return 'FENCED'
end
if seq >= tonumber(ARGV[2]) then return 'LATE' end
if seq < tonumber(ARGV[3]) then return 'LOST' end
redis.call('HSET', KEYS[1], 'seq', ARGV[2], 'clock', ARGV[4])
"""
"""Begin of each write: the token, and the number of the write, must be greater than all before."""


_APPEND: Final = _CHECKED + "redis.call('XADD', KEYS[2], ARGV[2] .. '-0', 'c', ARGV[5]) return 'OK'"
_COMPACT: Final = (
    _CHECKED
    + """
local blocks, rest = 7 + ARGV[6], 7 + ARGV[6] + ARGV[7]
if blocks > 7 then redis.call('HSET', KEYS[3], unpack(ARGV, 8, blocks)) end
if rest > blocks then redis.call('HSET', KEYS[4], unpack(ARGV, blocks + 1, rest)) end
if #ARGV > rest then redis.call('HDEL', KEYS[4], unpack(ARGV, rest + 1, #ARGV)) end
if ARGV[5] ~= '' then redis.call('XTRIM', KEYS[2], 'MINID', ARGV[5]) end
return 'OK'
"""
)
_DROP: Final = _CHECKED + "redis.call('DEL', unpack(KEYS)) return 'OK'"
_TAKE: Final = """
local head = redis.call('HMGET', KEYS[1], 'token', 'owner', 'seq', 'clock', 'closed', 'taken')
for i = 1, 6 do head[i] = head[i] or '' end
if head[1] ~= ARGV[1] then return {'', unpack(head)} end
local token = string.format('%.0f-%s', (string.match(head[1], '^%d+') or 0) + 1, ARGV[2])
local taken = head[3] ~= '' and head[3] or '0'
redis.call('HSET', KEYS[1], 'token', token, 'owner', ARGV[3], 'taken', taken)
return {token, unpack(head)}
"""
# The token was written by the take, so a Redis that has it has everything before.
_READ: Final = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return {0, ''} end
return {1, redis.call(ARGV[2], KEYS[2], unpack(ARGV, 3))}
"""
_REVOKE: Final = """
local head = redis.call('HMGET', KEYS[1], 'token', 'seq', 'clock', 'closed')
if not head[1] then return 'GONE' end
local token = string.format('%.0f-%s', string.match(head[1], '^%d+') + 1, ARGV[1])
redis.call('HSET', KEYS[1], 'token', token, 'taken', head[2] or '0')
if tonumber(head[4] or '0') < (head[3] or 0) + ARGV[2] then
  redis.call('HSET', KEYS[1], 'closed', string.format('%.6f', (head[3] or 0) + ARGV[2]))
end
return 'OK'
"""
_RELEASE: Final = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 'FENCED' end
redis.call('HSET', KEYS[1], 'owner', '')
return 'OK'
"""


class ScopeHead(NamedTuple):
    """Owner of a scope, and the last write."""

    token: bytes
    """Empty for a scope without owner that never had one."""
    owner: str
    """Incarnation of a server; empty for none."""
    seq: int
    clock: float
    """Scope time of the last write."""
    closed: float
    """Scope time before which no slot is given; 0 for none."""
    taken: int
    """Number of the last write before the owner took it."""


@dataclass(slots=True)
class ScopeLog:
    """Log of one scope that this server owns."""

    name: str
    keys: tuple[bytes, ...] = field(init=False)
    """Head, log, blocks and rest."""
    number: int
    """Number of the scope in this server's service."""
    token: bytes
    seq: int
    """Number of the last write, confirmed or not."""
    offset: float
    """Scope time minus the time of this server."""
    confirmed: int = 0
    """Number of the last write that Redis has confirmed."""
    record: ScopeRecord | None = None
    counters: dict[str, int] = field(default_factory=dict[str, int])
    """Counters in the log."""
    dirty: DirtyBlocks = field(default_factory=DirtyBlocks)
    log_bytes: int = 0
    windows: deque[tuple[int, float]] = field(default_factory=deque[tuple[int, float]])
    """Windows in `rest`, with the scope time at which all their answers have ended."""
    limit: int = MAX_LOG_BYTES
    """Length from which each write also compacts it."""

    def __post_init__(self) -> None:
        self.keys = scope_keys(self.name)

    def note(self, size: int, group: int, changes: Changes) -> None:
        """Record a group that is in the log."""
        self.log_bytes += size
        self.counters |= changes.counters
        if changes.scopes:
            self.record = changes.scopes[-1]
        places = [block for slots in changes.slots.values() for block in changed_blocks(slots)]
        self.dirty.mark(places, group, size, changes)


def log_of(name: str, number: int, token: bytes, head: ScopeHead, now: float) -> ScopeLog:
    """Return the log of a scope that was taken, with its head as it was before."""
    offset = head.clock - now if head.clock else 0.0
    return ScopeLog(name, number, token, head.seq, offset, head.seq)


class LoadedScope(NamedTuple):
    """Snapshot and log of a scope, as Redis has them."""

    blocks: dict[int, bytes]
    rest: dict[bytes, bytes]
    groups: list[tuple[int, bytes]]


def scope_keys(name: str) -> tuple[bytes, ...]:
    """Keys of a scope: head, log, blocks and rest."""
    return tuple(f"hm:{{{name}}}:{part}".encode() for part in ("head", "log", "blocks", "rest"))


# What an owner does to the head, on a connection of the event loop.


async def take(
    connection: RedisConnection, name: str, expected: bytes, owner: str
) -> tuple[bytes, ScopeHead]:
    """Make `owner` the owner of a scope whose token is `expected`.

    Returns its token, empty if it is not the owner, and the head as it was before.
    """
    # A failover can take the count of a token back; the random part is never drawn again.
    call = ScriptCall(_TAKE, scope_keys(name)[:1], (expected, secrets.token_hex(8), owner))
    ((token, *head),) = await connection.run([call])
    return token, _head_of(head)


async def revoke(connection: RedisConnection, name: str, seconds: int) -> None:
    """Let a scope that has lost writes give no slot for a time.

    Its owner finds another token with its next write, and takes the scope again.
    """
    call = ScriptCall(_REVOKE, scope_keys(name)[:1], (secrets.token_hex(8), seconds))
    await connection.run([call])


async def read_head(connection: RedisConnection, name: str) -> ScopeHead:
    """Read the head of a scope."""
    key = scope_keys(name)[0]
    return _head_of(await connection.command("HMGET", key, *ScopeHead._fields))


def _head_of(values: Sequence[bytes | None]) -> ScopeHead:
    token, owner, *numbers = (value or b"" for value in values)
    seq, clock, closed, taken = (number or b"0" for number in numbers)
    return ScopeHead(token, owner.decode(), int(seq), float(clock), float(closed), int(taken))


async def remove(connection: RedisConnection, log: ScopeLog) -> None:
    """Remove a scope that was taken and holds nothing."""
    log.seq += 1
    arguments = (log.token, log.seq, log.confirmed, "0")
    await connection.run([ScriptCall(_DROP, log.keys, arguments)])


async def release(connection: RedisConnection, logs: Iterable[ScopeLog]) -> None:
    """Give scopes back, after their last write."""
    await connection.run([ScriptCall(_RELEASE, log.keys[:1], (log.token,)) for log in logs])


async def load(connection: RedisConnection, name: str, token: bytes) -> LoadedScope:
    """Read a scope that was taken: nobody else writes it any more.

    Raises:
        FencedError: the token is not the scope's where it was read. It belongs to another server by
            now, or a connection has led to a Redis that is no primary any more.
    """
    keys = scope_keys(name)

    async def read(place: int, *command: bytes | int | str) -> Any:
        call = ScriptCall(_READ, (keys[0], keys[place]), (token, *command))
        ((found, answer),) = await connection.run([call])
        if not found:
            raise FencedError([name])
        return answer

    rest = await read(3, "HGETALL")
    blocks, cursor = dict[int, bytes](), b"0"
    while True:
        cursor, found = await read(2, "HSCAN", cursor, "COUNT", PAGE_BLOCKS)
        blocks |= {int(number): blob for number, blob in _paired(found)}
        if cursor == b"0":
            break
    groups, first = list[tuple[int, bytes]](), b"-"
    while page := await read(1, "XRANGE", first, "+", "COUNT", PAGE_GROUPS):
        groups += [(int(key.partition(b"-")[0]), fields[1]) for key, fields in page]
        first = b"(" + page[-1][0]
    return LoadedScope(blocks, dict(_paired(rest)), groups)


def _paired(flat: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    return zip(flat[::2], flat[1::2], strict=True)


def restored(
    service: MetadataService, log: ScopeLog, loaded: LoadedScope, now: float
) -> tuple[Changes, Scope | None]:
    """Restore a scope from its snapshot and log, for `MetadataService.adopt`.

    Returns everything but slots, in the time of this server, and the scope; None if its first group
    was never written.

    Raises:
        StoreError: snapshot or log cannot be read.
    """
    everything, slots = Changes(), list[SlotChanges]()
    try:
        for key in sorted(loaded.rest, key=lambda key: -1 if key == SCOPE else int(key)):
            window = _CHANGES.decode(loaded.rest[key])
            everything.add_all_but_slots(window)
            if key != SCOPE:
                log.windows.append((int(key), _end_of(window)))
        for group, payload in loaded.groups:
            changes = _CHANGES.decode(payload)
            everything.add_all_but_slots(changes)
            slots += changes.slots.values()
            log.note(len(payload), group, changes)
        log.counters = dict(everything.counters)
        if not everything.scopes:
            return everything, None
        log.record = everything.scopes[-1]
        blocks = (
            (number, SlotColumns.decode(zlib.decompress(blob)))
            for number, blob in loaded.blocks.items()
        )
        columns = columns_of(log.record.geometry.slots, blocks, slots)
    except (msgspec.DecodeError, ValueError, zlib.error) as error:
        raise StoreError(f"scope {log.name} cannot be read: {error}") from error
    columns.until = _moved(columns.until, -log.offset)
    found = _shifted(everything, -log.offset, log.number).folded(now)
    longest = found.counters.get(LONGEST, 0)
    return found, service.restored_scope(found.scopes[-1], columns, now, longest)


def _end_of(window: Changes) -> float:
    """Scope time at which the answers of a window have ended; 0 without any."""
    return max((answer.until for answer in window.answers), default=0.0)


def _compressed(batch: CompactionBatch) -> list[bytes]:
    """Places of blocks, each followed by the block."""
    return [
        part
        for place, blob in batch.blocks
        for part in (b"%d" % place, zlib.compress(blob, COMPRESSION))
    ]


def _moved(until: array[float], offset: float) -> array[float]:
    found = array("d")
    for first in range(0, len(until), BLOCK):
        part = until[first : first + BLOCK]
        # The usual case: leases of one request end together.
        times = len(part) if part.tobytes() == part[:1].tobytes() * len(part) else 1
        # 0 is the end of slots that have none.
        ends = [end + offset if end else 0.0 for end in (part[:1] if times > 1 else part)]
        found += array("d", ends) * times
    return found


def _shifted(changes: Changes, offset: float, number: int) -> Changes:
    """Changes of one scope, under another number and with times of another clock."""
    return Changes(
        scopes=[
            replace(
                one,
                number=number,
                cleared_until=one.cleared_until + offset if one.cleared_until else 0.0,
            )
            for one in changes.scopes
        ],
        slots={number: _shifted_slots(one, offset) for one in changes.slots.values()},  # noqa: B035 - one at most
        answers=[
            msgspec.structs.replace(answer, until=answer.until + offset)
            for answer in changes.answers
        ],
        counters=changes.counters,
    )


def _shifted_slots(changes: SlotChanges, offset: float) -> SlotChanges:
    states = changes.states
    if not states.until or not offset:
        return changes
    until = _moved(array("d", states.until), offset).tobytes()
    return changes._replace(states=states._replace(until=until))


class ScopeLogStore(MetadataStore):
    """The logs of the scopes that one server owns, as the store of its group commit.

    It recovers nothing, since scopes are taken one by one, and is written by coroutines alone. The
    times in changes are those of `clock`, in seconds.
    """

    durability = StoreDurability.PROCESS
    """Redis has what the process has written. What Redis itself survives is its setting."""
    is_quick = False

    def __init__(self, connection: RedisConnection, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._clock = clock
        self._logs: dict[int, ScopeLog] = {}
        """By the number of the scope in this server."""
        self._counters: dict[str, int] = {}
        self.lost = set[str]()
        """Scopes whose log has lost writes that were acknowledged."""

    # Called by the owner, in the event loop.

    def attach(self, log: ScopeLog) -> None:
        """Write changes of a scope to its log from now on."""
        self._logs[log.number] = log

    def detach(self, number: int) -> ScopeLog | None:
        """Write nothing to a scope any more; returns its log."""
        return self._logs.pop(number, None)

    def logs(self) -> list[ScopeLog]:
        """Logs of all owned scopes."""
        return list(self._logs.values())

    def log_bytes(self, number: int) -> int:
        """Length of the log of a scope."""
        log = self._logs.get(number)
        return log.log_bytes if log is not None else 0

    # `MetadataStore`.

    async def append(self, changes: Changes) -> None:
        """Append to the log of each changed scope.

        Raises:
            FencedError: another server owns some of the scopes.
            StoreError: some of the scopes may not have it.
        """
        self._counters |= changes.counters
        now = self._clock()
        for record in changes.scopes:
            if record.number not in self._logs:
                raise StoreError(f"scope {record.geometry.scope} has no log")
        split, logs = self._split(changes), self._logs.copy()
        parts = [(logs[number], part) for number, part in split.items() if number in logs]
        # The first entry carries the scope: without it, nothing after it could be read again.
        if unread := [log.name for log, part in parts if not (log.record or part.scopes)]:
            raise FencedError(unread)
        calls = list[ScriptCall]()
        written = list[tuple[ScopeLog, int, Changes]]()
        for log, part in parts:
            part.counters = {
                name: ceiling
                for name, ceiling in self._counters.items()
                if log.counters.get(name) != ceiling
            }
            there = _shifted(part, log.offset, 0)
            payload = _ENCODER.encode(there)
            log.seq += 1
            calls.append(self._call(_APPEND, log, log.keys[:2], now, payload))
            written.append((log, len(payload), there))
        dropped = [logs[number] for number in changes.dropped if number in logs]
        for log in dropped:
            log.seq += 1
            calls.append(self._call(_DROP, log, log.keys, now))
        answers = await self._connection.run(calls) if calls else []
        for (log, size, there), answer in zip(written, answers, strict=False):
            if answer == b"OK":
                log.confirmed = log.seq
                log.note(size, log.seq, there)
        for log, answer in zip(dropped, answers[len(written) :], strict=True):
            if answer == b"OK":
                self.detach(log.number)
        self._check([*(log for log, _, _ in written), *dropped], answers)
        if len(parts) < len(split):
            # Detached since the changes were taken, so they are nowhere.
            raise FencedError([])

    def wants_compaction(self, *, idle: bool) -> bool:
        """True if the log of a scope is long; shorter ones count in an idle server."""
        return self._longest(idle=idle) is not None

    def collect(self, scope_of: Callable[[int], Scope]) -> CompactionBatch:
        """Encode the next dirty blocks of the scope with the longest log."""
        log = self._longest(idle=True)
        assert log is not None, "asked `wants_compaction` before"

        def read(place: int) -> bytes:
            block = SlotColumns.of(scope_of(log.number), place)
            block.until = _moved(block.until, log.offset)
            return block.encode()

        batch = log.dirty.take(BATCH_BLOCKS * (1 + log.log_bytes // log.limit), read)
        return batch._replace(scope=log.number)

    async def replace_blocks(self, batch: CompactionBatch, now: float) -> None:
        """Write blocks, and with the last ones of a window everything else of it."""
        log = self._logs.get(batch.scope)
        if log is None:
            # Another server owns it by now.
            return
        blocks = await asyncio.to_thread(_compressed, batch)
        rest, gone, kept = list[bytes](), list[bytes](), b""
        ended = 0
        if batch.last_group:
            kept = b"%d-0" % (batch.last_group + 1)
            scopes = [log.record] if log.record else []
            rest += [SCOPE, _ENCODER.encode(Changes(scopes=scopes, counters=log.counters))]
            if batch.rest.answers:
                window = Changes(answers=batch.rest.answers)
                rest += [b"%d" % batch.last_group, _ENCODER.encode(window)]
            while ended < len(log.windows) and log.windows[ended][1] <= now + log.offset:
                gone.append(b"%d" % log.windows[ended][0])
                ended += 1
        parts: list[bytes | int] = [kept, len(blocks), len(rest), *blocks, *rest, *gone]
        log.seq += 1
        try:
            answers = await self._connection.run([self._call(_COMPACT, log, log.keys, now, *parts)])
            self._check([log], answers)
        except BaseException:
            log.dirty.put_back(batch)
            raise
        log.confirmed = log.seq
        log.log_bytes -= batch.log_bytes
        for _ in range(ended):
            log.windows.popleft()
        if len(rest) > 2:
            log.windows.append((batch.last_group, _end_of(batch.rest)))

    def put_back(self, batch: CompactionBatch) -> None:
        """Queue the blocks of a batch again."""
        if log := self._logs.get(batch.scope):
            log.dirty.put_back(batch)

    def sizes(self) -> dict[str, int]:
        """Bytes of all logs that are not compacted."""
        return {"log": sum(log.log_bytes for log in self.logs())}

    # Implementation.

    def _split(self, changes: Changes) -> dict[int, Changes]:
        """Changes by scope."""
        parts = {number: Changes(slots={number: one}) for number, one in changes.slots.items()}

        def part(number: int) -> Changes:
            return parts.setdefault(number, Changes())

        for record in changes.scopes:
            part(record.number).scopes.append(record)
        if changes.answers:
            numbers = {log.name: log.number for log in self.logs()}
            for answer in changes.answers:
                if answer.scope in numbers:
                    part(numbers[answer.scope]).answers.append(answer)
        for number in changes.dropped:
            parts.pop(number, None)
        return parts

    def _call(
        self,
        script: str,
        log: ScopeLog,
        keys: tuple[bytes, ...],
        now: float,
        *arguments: bytes | int,
    ) -> ScriptCall:
        clock = repr(now + log.offset)
        return ScriptCall(script, keys, (log.token, log.seq, log.confirmed, clock, *arguments))

    def _check(self, logs: list[ScopeLog], answers: list[Any]) -> None:
        refused = [log for log, answer in zip(logs, answers, strict=True) if answer != b"OK"]
        self.lost |= {
            log.name for log, answer in zip(logs, answers, strict=True) if answer == b"LOST"
        }
        if refused:
            # Not those that this server has taken again meanwhile.
            raise FencedError([log.name for log in refused if self._logs.get(log.number) is log])

    def _longest(self, *, idle: bool) -> ScopeLog | None:
        due = [
            log for log in self.logs() if log.log_bytes > (IDLE_LOG_BYTES if idle else log.limit)
        ]
        return max(due, key=lambda log: log.log_bytes, default=None)


def restored_service(url: str, now: float) -> MetadataService:
    """Restore a service with all scopes of a Redis, without a server. Nothing is written.

    Raises:
        StoreError: Redis is not reached, a scope cannot be read, or a server changes it meanwhile.
        ValueError: the address is not valid.
    """

    async def read() -> MetadataService:
        connection, service = RedisConnection(url), MetadataService()
        try:
            for name in sorted(map(bytes.decode, await connection.command("HGETALL", ENTRIES))):
                head, loaded = await load_unchanged(connection, name)
                if loaded is None:
                    continue
                log = log_of(name, service.new_number(), head.token, head, now)
                found, scope = restored(service, log, loaded, now)
                if scope is not None:
                    service.adopt(scope, found)
        finally:
            await connection.close()
        return service

    return asyncio.run(read())


async def load_unchanged(
    connection: RedisConnection, name: str
) -> tuple[ScopeHead, LoadedScope | None]:
    """Read snapshot and log of a scope as they were at one time; None for one without a head."""
    for _ in range(READS):
        head = await read_head(connection, name)
        if not head.token:
            return head, None
        with suppress(FencedError):
            loaded = await load(connection, name, head.token)
            # Each write changes the head.
            if await read_head(connection, name) == head:
                return head, loaded
    raise StoreError(
        f"{connection.redacted}: a server changes scope {name}: let it check the scope (--url), or "
        f"stop it"
    )
