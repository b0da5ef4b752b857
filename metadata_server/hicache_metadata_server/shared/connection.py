"""Connections to Redis: one server, one that Sentinels name, or a cluster.

redis-py connects, logs in, pools connections, and finds the primary or the node of a key. With
`replicas`, an acknowledged change is one that so many replicas have. Redis has no option for that;
`RedisConnection` builds it from `WAIT`, see `_send_replicated`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import structlog
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AskError,
    ClusterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.shared.address import CLUSTER, SENTINEL, parse_address
from hicache_metadata_server.storage.store import redacted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server.shared.address import RedisAddress

ANSWER_SECONDS: Final = 2.0
"""Timeout of a connection, and of an answer. The commands may have been executed all the same."""
CONNECTIONS: Final = 32
"""Limit of concurrent uses. A pool has 100 connections, of which scripts keep as many."""
SENTINEL_SECONDS: Final = 0.5
"""Timeout of each Sentinel, to connect and to answer."""
REPLICA_SECONDS: Final = 1.0
"""Timeout of `WAIT`, less than that of the answer."""
MARK: Final = b"replicated"
"""Suffix of a key that is written last; in a cluster a key of the same node precedes it."""
UNREACHED: Final = (
    TimeoutError,
    RedisConnectionError,
    RedisTimeoutError,
    AskError,
    ClusterDownError,
)
"""Errors after which the primary, or the nodes of a cluster, may be others."""
STATES: Final = (AskError, ClusterDownError, OutOfMemoryError)
"""Errors of a Redis without memory, or of a cluster whose nodes change. They are states rather than
events: `store_failing` logs them once, not for each request."""

# The first version that removes entries of a stream by their ids.
_MIN_VERSION: Final = (6, 2)
_ORDER: Final = (StoreDurability.NONE, StoreDurability.PROCESS, StoreDurability.MACHINE)
_KEPT: Final = {"always": StoreDurability.MACHINE, "no": StoreDurability.PROCESS}
"""Durability of acknowledged changes by `appendfsync`. With `everysec` Redis may answer before it
has written a change, while an earlier fsync is in progress. With `no` it always writes first."""
_FIXES: Final = {
    StoreDurability.PROCESS: "`appendonly yes` and `appendfsync no` or `always`",
    StoreDurability.MACHINE: "`appendonly yes` and `appendfsync always`",
}
# asyncio has no event for the end of a TLS connection, hence a fixed wait.
TLS_END_SECONDS: Final = 0.05

_log = structlog.get_logger()


class ScriptCall(NamedTuple):
    """A script with its keys and arguments."""

    source: str
    keys: tuple[bytes, ...]
    arguments: tuple[bytes | int | str, ...]

    @property
    def command(self) -> tuple[bytes | int | str, ...]:
        """Return the command. Redis compiles each source once, and finds it by its digest."""
        return ("EVAL", self.source, len(self.keys), *self.keys, *self.arguments)


class RedisConnection:
    """Connections to one Redis or to a cluster, opened on demand and reopened when they break.

    For use from one event loop. An answer has `answer_seconds`. With `replicas`, as many replicas
    have all that an answer depends on, before it is returned. Methods raise `StoreError` if Redis
    is not reached, does not answer in time, or refuses.

    Raises:
        ValueError: the address is not valid.
    """

    def __init__(self, url: str, answer_seconds: float = ANSWER_SECONDS, replicas: int = 0) -> None:
        address = parse_address(url)
        self.redacted = redacted(url)
        self.replicas = replicas
        self._answer_seconds = answer_seconds
        self.is_cluster = address.kind == CLUSTER
        self._nodes_changed = False
        self._is_secure = "ssl" in address.options
        # The pools of redis-py fail at once when all of their connections are in use.
        self._free = asyncio.Semaphore(CONNECTIONS)
        self._wait = ("WAIT", replicas, round(1000 * min(REPLICA_SECONDS, answer_seconds / 2)))
        self._client, *self._sentinels = _clients_of(address, answer_seconds)
        self._kept = list[Any]()
        """Connections of the pool that no script uses."""

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Send scripts together, each of which is atomic; return their replies."""
        commands = [call.command for call in calls]
        if not commands:
            return []
        async with self._free:
            try:
                if not self.is_cluster:
                    answers = await self._send(commands)
                else:
                    # The scopes of a cluster are on several nodes, which work at the same time.
                    send = self._send_replicated if self.replicas else self._send_redirected
                    answers = list(await asyncio.gather(*map(send, commands)))
            except self._errors() as error:
                raise await self._failed(error) from error
        await self._raise_errors(answers)
        return answers

    async def command(self, *parts: bytes | int | str, **options: Any) -> Any:
        """Send a command; return its answer."""
        async with self._free:
            try:
                return await self._client.execute_command(*parts, **options)
            except self._errors() as error:
                raise await self._failed(error) from error

    async def on_each(self, *parts: str) -> list[Any]:
        """Send a command to every primary; return their answers."""
        if not self.is_cluster:
            return [await self.command(*parts)]
        found = await self.command(*parts, target_nodes="primaries")
        # For a cluster of one node redis-py returns that node's answer, not a dictionary of them.
        nodes = all(":" in str(name) for name in found)
        return list(found.values()) if nodes else [found]

    async def close(self) -> None:
        """Close all connections."""
        for client in (self._client, *self._sentinels):
            await client.aclose()
        if self._is_secure:
            # asyncio finishes the closing handshake of TLS after `close` has returned. An event
            # loop that ends before leaves the socket open.
            await asyncio.sleep(TLS_END_SECONDS)

    async def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send scripts on one connection, and wait until the replicas have what they have written
        and read.

        `WAIT` covers only the writes of its own connection. The reply of a script that has only
        read may depend on another connection's write, which no replica has yet. So a marker key is
        written behind the scripts: replication is in order, and a replica that has the marker has
        everything before it.
        """
        behind = [("SET", b"hm:" + MARK, b""), self._wait] if self.replicas else []
        pool = self._client.connection_pool
        # Kept out of the pool, which takes more CPU time than the command.
        connection = self._kept.pop() if self._kept else await pool.get_connection()
        try:
            # Reopens one that Redis has closed, or that has a reply that nobody has read.
            await pool.ensure_connection(connection)
            packed = connection.pack_commands([*commands, *behind])
            # One deadline for all: redis-py makes a task for each of its own.
            connection.socket_timeout = None
            async with asyncio.timeout(self._answer_seconds):
                await connection.send_packed_command(packed, check_health=False)
                answers = [await _reply(connection) for _ in (*commands, *behind)]
        finally:
            connection.socket_timeout = self._answer_seconds
            # After another error than a reply, redis-py has disconnected it.
            self._kept.append(connection)
        await self._check_replicas(answers[len(commands) :])
        return answers[: len(commands)]

    async def _send_redirected(self, command: tuple[Any, ...]) -> Any:
        return await self._client.execute_command(*command)

    async def _send_replicated(self, command: tuple[Any, ...]) -> Any:
        """Do as `_send` for one script in a cluster, on one connection to the node of its keys."""
        await self._client.initialize()
        if self._nodes_changed:
            # Cleared before the discovery: a failure meanwhile sets it again, since the list that is
            # being read may be older than the failure.
            self._nodes_changed = False
            await self._client.nodes_manager.initialize()
        key: bytes = command[3]
        node = self._client.get_node_from_key(key)
        pipeline = self._client.pipeline()
        for one in (command, ("SET", key + b":" + MARK, b""), self._wait):
            pipeline.execute_command(*one, target_nodes=node)
        # Without redirections: a redirected script would be executed on another connection than the
        # `WAIT` that covers it.
        answer, *marked = await pipeline.execute(raise_on_error=False, allow_redirections=False)
        if not isinstance(answer, Exception):
            await self._check_replicas(marked)
        return answer

    async def _check_replicas(self, marked: list[Any]) -> None:
        """Check the answers of the marker and of `WAIT`, which counts replicas."""
        await self._raise_errors(marked)
        if marked and marked[-1] < self.replicas:
            raise StoreError(
                f"{self.redacted}: {marked[-1]} of {self.replicas} replicas have it: it may be "
                f"lost if one takes over"
            )

    async def _raise_errors(self, answers: list[Any]) -> None:
        for answer in answers:
            if isinstance(answer, Exception):
                raise await self._failed(answer)

    def _errors(self) -> tuple[type[Exception], ...]:
        errors = (RedisError, RedisClusterException, OSError, TimeoutError)
        # redis-py's cluster client closes the connections of a node that has failed, and forgets
        # the nodes while it discovers them. The other requests under way then meet a `None` or an
        # empty list.
        return (*errors, AttributeError, IndexError) if self.is_cluster else errors

    async def _failed(self, error: Exception) -> StoreError:
        # Redis 6.2 quotes the error that has ended a script within another message.
        read_only = isinstance(error, ReadOnlyError) or "-READONLY" in str(error)
        if read_only or isinstance(error, UNREACHED):
            self._nodes_changed = True
            if not self.is_cluster:
                # After a restart or a takeover the idle connections are broken too, or lead to a
                # server that is no primary any more. Each of them would fail one more request.
                pool = self._client.connection_pool
                while self._kept:
                    await pool.release(self._kept.pop())
                await pool.disconnect(inuse_connections=False)
        is_state = isinstance(error, STATES) or str(error).startswith(("OOM", "MISCONF"))
        if isinstance(error, ResponseError) and not is_state:
            # An error of the set-up or of a script, not of the network: it needs the operator, and
            # a client's retries would hide it.
            _log.error("store_refuses", store=self.redacted, error=str(error))
        if isinstance(error, TimeoutError):
            return StoreError(f"{self.redacted}: no answer within {self._answer_seconds} s")
        return StoreError(f"{self.redacted}: {str(error) or type(error).__name__}")


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as error:
        return error


class _Sentinels(Sentinel):
    """Sentinels that are asked by one discovery at a time.

    redis-py swaps the one that has named the primary to the head of its list. Of two discoveries
    at once, one can overwrite an entry: that Sentinel is never asked again, and never closed.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._lock = asyncio.Lock()

    async def discover_master(self, service_name: str) -> tuple[str, int]:
        async with self._lock:
            return cast("tuple[str, int]", await super().discover_master(service_name))


def _clients_of(address: RedisAddress, answer_seconds: float) -> list[Any]:
    """Return a client that connects on demand, and behind it those of the Sentinels."""
    options = address.options | _timeouts(answer_seconds)
    if address.kind == CLUSTER:
        return [
            RedisCluster(startup_nodes=[ClusterNode(*host) for host in address.hosts], **options)
        ]
    if address.kind == SENTINEL:
        asked = address.sentinel_options | _timeouts(SENTINEL_SECONDS)
        sentinels = _Sentinels(list(address.hosts), sentinel_kwargs=asked)
        return [sentinels.master_for(address.name, **options), *sentinels.sentinels]
    for host, port in address.hosts:
        options |= {"host": host, "port": port}
    return [Redis(**options)]


def _timeouts(seconds: float) -> dict[str, Any]:
    return {
        # With RESP3, redis-py 8 follows notices of maintenance: it raises the timeout while a node
        # is replaced, and reuses a connection that has an unread reply, so that each later command
        # is answered with the reply to the one before it.
        "protocol": 2,
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        # No retries in the library: a command whose answer was lost may have been executed. Only a
        # caller with an idempotency key may repeat it.
        "retry": Retry(NoBackoff(), 0),
    }


def check_store(url: str, durability: StoreDurability, replicas: int = 0) -> None:
    """Check that every node of a store is reached, keeps changes as durably as stated, and evicts
    no keys.

    A wrong setting loses pages long after the start, and without an error.

    Raises:
        StoreError: a node does not, or is not reached; the message names the setting to change.
        ValueError: the address is not valid.
    """

    async def check() -> None:
        connection = RedisConnection(url, replicas=replicas)
        try:
            for info in await connection.on_each("INFO"):
                _check_node(connection, info)
            await _check_durability(connection, durability)
        finally:
            await connection.close()

    # A loop of its own: connections belong to the event loop that opened them, and the server's
    # does not run yet.
    asyncio.run(check())


def _check_node(connection: RedisConnection, info: dict[str, Any]) -> None:
    where = connection.redacted
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < _MIN_VERSION:
        raise StoreError(
            f"{where}: this is Redis {info['redis_version']}; 6.2 or later is needed, or Valkey"
        )
    if info.get("cluster_enabled") and not connection.is_cluster:
        raise StoreError(
            f"{where}: this is a node of a cluster: name it as redis+cluster://HOST:PORT,HOST:PORT"
        )
    # A replica answers reads, so that a server would start and fail at the first change.
    if info.get("role") != "master":
        raise StoreError(f"{where}: this is a replica, which cannot be written: name the primary")
    policy = info.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise StoreError(
            f"{where}: maxmemory-policy is {policy}, which would evict keys of the store: set it "
            f"to noeviction"
        )
    if int(info.get("connected_slaves", 0)) < connection.replicas:
        # No error: replicas may join later. Until then `WAIT` fails every change.
        _log.warning(
            "replicas_missing",
            store=where,
            wanted=connection.replicas,
            connected=info.get("connected_slaves"),
        )


async def _check_durability(connection: RedisConnection, wanted: StoreDurability) -> None:
    try:
        # One by one: Redis 6.2 takes no second name.
        files = await connection.on_each("CONFIG GET", "appendonly")
        fsyncs = await connection.on_each("CONFIG GET", "appendfsync")
    except StoreError as error:
        # Managed services forbid CONFIG. The operator has to know their settings.
        _log.warning(
            "store_settings_unknown",
            store=connection.redacted,
            durability=str(wanted),
            error=str(error),
        )
        return
    for file, fsync in zip(files, fsyncs, strict=True):
        settings, kept = "appendonly no", StoreDurability.NONE
        if file.get("appendonly") == "yes":
            settings = f"appendonly yes, appendfsync {fsync.get('appendfsync')}"
            kept = _KEPT.get(str(fsync.get("appendfsync")), StoreDurability.NONE)
        if _ORDER.index(kept) < _ORDER.index(wanted):
            raise StoreError(
                f"{connection.redacted}: its settings ({settings}) keep durability "
                f"{str(kept)!r}, not {str(wanted)!r}: "
                f"set {_FIXES[wanted]} there, or durability to {str(kept)!r} here"
            )
