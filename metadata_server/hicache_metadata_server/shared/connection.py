"""Connections to Redis: one server, one that Sentinels name, or a cluster.

With `replicas`, an acknowledged change is one that so many replicas have. Redis has no option for
that; `RedisConnection` builds it from `WAIT`, see `_send_replicated`.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.storage.address import AddressKind, parse_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_metadata_server.shared.pipeline import Pipeline

ANSWER_SECONDS: Final = 2.0
"""Timeout of an answer. The commands may have been executed all the same."""
REPLICA_SECONDS: Final = 1.0
"""Timeout of `WAIT`, less than that of the answer."""
MAX_KEPT: Final = 8
"""Connections that are kept out of the pool."""
REDIRECTIONS: Final = 5
"""Attempts to reach the node of a key that moves in a cluster, 50 ms apart."""
MARK: Final = b"replicated"
"""Suffix of a key that is written last; in a cluster a key of the same node precedes it."""

# asyncio has no event for the end of a TLS connection, hence a fixed wait.
TLS_END_SECONDS: Final = 0.05

_log = structlog.get_logger()


class Script(NamedTuple):
    """Source of a script, and the SHA-1 under which Redis caches it."""

    source: str
    sha: str


def new_script(source: str) -> Script:
    """Return a script with its digest."""
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


class ScriptCall(NamedTuple):
    """A script with its keys and arguments."""

    script: Script
    keys: tuple[bytes, ...]
    arguments: tuple[bytes | int | str, ...]

    @property
    def command(self) -> tuple[bytes | int | str, ...]:
        """Return the command for a Redis that has the script in its cache."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)

    @property
    def whole_command(self) -> tuple[bytes | int | str, ...]:
        """Return the command for a Redis that has not."""
        return ("EVAL", self.script.source, len(self.keys), *self.keys, *self.arguments)


def open_connection(url: str, replicas: int = 0) -> RedisConnection:
    """Return a connection to the store at an address; nothing is sent yet.

    Raises:
        StoreError: the client library is not installed.
        ValueError: the address is not valid.
    """
    try:
        return RedisConnection(url, replicas=replicas)
    except ImportError as error:
        raise StoreError(
            f"a shared store needs one more package: pip install 'hicache-storage[redis]' ({error})"
        ) from error


class RedisConnection:
    """Connections to one Redis or to a cluster, opened on demand and reopened when they break.

    For use from one event loop. Methods raise `StoreError` if Redis is not reached, does not answer
    in time, or refuses.

    Args:
        url: address of the store.
        answer_seconds: timeout of an answer, in seconds.
        replicas: number of replicas that must have all that an answer depends on, before it is
            returned.

    Raises:
        ImportError: the client library is not installed.
        ValueError: the address is not valid.
    """

    def __init__(self, url: str, answer_seconds: float = ANSWER_SECONDS, replicas: int = 0) -> None:
        # redis-py is an extra: a server on SQLite runs without it.
        from hicache_metadata_server.shared.pipeline import Pipeline
        from hicache_metadata_server.shared.redis_clients import client_of

        address = parse_address(url)
        self.redacted = address.redacted
        self.replicas = replicas
        self._answer_seconds = answer_seconds
        self.is_cluster = address.kind is AddressKind.CLUSTER
        self._nodes_changed = False
        self._is_secure = address.tls is not None
        self._discovery = asyncio.Lock()
        self._wait = ("WAIT", replicas, round(1000 * min(REPLICA_SECONDS, answer_seconds / 2)))
        client, close = client_of(address, answer_seconds)
        self._client = client
        self._close = close
        self._new_pipeline = Pipeline
        self._kept = list[Pipeline]()
        """Connections to a single server that no command is using."""

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Send scripts together, each of which is atomic; return their replies."""
        from redis.exceptions import NoScriptError

        if not calls:
            return []
        send = self._send_replicated if self.replicas else self._send
        answers = await send([call.command for call in calls])
        for place, call in enumerate(calls):
            if isinstance(answers[place], NoScriptError):
                # Redis was restarted, or another node has the keys now. EVAL puts the script into
                # the cache, so that the next call finds it.
                (answers[place],) = await send([call.whole_command])
        return await self._raise_errors(answers)

    async def command(self, *parts: bytes | int | str, **options: Any) -> Any:
        """Send a command; return its answer."""
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
        await self._release_kept()
        await self._close()
        if self._is_secure:
            # asyncio finishes the closing handshake of TLS after `close` has returned. An event
            # loop that ends before leaves the socket open.
            await asyncio.sleep(TLS_END_SECONDS)

    async def _raise_errors(self, answers: list[Any]) -> list[Any]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise await self._failed(answer)
        return answers

    async def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        if not self.is_cluster:
            return await self._pipelined(commands)
        if len(commands) == 1:
            # Most groups: without `gather`, which makes a task of it.
            return [await self._to_cluster(commands[0])]
        # The scopes of a cluster are on several nodes, which work at the same time.
        return list(await asyncio.gather(*(self._to_cluster(command) for command in commands)))

    async def _to_cluster(self, command: tuple[Any, ...]) -> Any:
        from redis.exceptions import NoScriptError

        try:
            return await self._client.execute_command(*command)
        except NoScriptError as error:
            return error
        except self._errors() as error:
            raise await self._failed(error) from error

    async def _pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send commands to a single server; an error that one is answered with is its answer."""
        kept: Pipeline | None = None
        try:
            # Kept between commands: to take a connection from the pool and to give it back costs
            # more than a command.
            while self._kept and kept is None:
                last = self._kept.pop()
                if last.is_closed:
                    await self._end(last)
                else:
                    kept = last
            if kept is None:
                connection = await self._client.connection_pool.get_connection()
                kept = self._new_pipeline(connection, self._answer_seconds)
            answers = await kept.send(commands)
        except BaseException as error:
            if kept is not None:
                # An answer may be under way.
                await self._end(kept)
            if isinstance(error, self._errors()):
                raise await self._failed(error) from error
            raise
        if len(self._kept) < MAX_KEPT:
            self._kept.append(kept)
        else:
            await self._end(kept)
        return answers

    async def _release_kept(self) -> None:
        """Close the connections that are kept."""
        while self._kept:
            await self._end(self._kept.pop())

    async def _end(self, kept: Pipeline) -> None:
        """Disconnect a connection that was kept, and return it to the pool."""
        await kept.disconnect()
        await self._client.connection_pool.release(kept.connection)

    async def _send_replicated(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send scripts, and wait until the replicas have what they have written and read.

        `WAIT` covers only the writes of its own connection. The reply of a script that has only
        read may depend on another connection's write, which no replica has yet. So a marker key is
        written behind the scripts: replication is in order, and a replica that has the marker has
        everything before it.
        """
        if self.is_cluster:
            return list(
                await asyncio.gather(*(self._send_replicated_one(command) for command in commands))
            )
        *answers, marked, replicas = await self._pipelined(
            [*commands, ("SET", b"hm:" + MARK, b""), self._wait]
        )
        await self._check_replicas(marked, replicas)
        return answers

    async def _send_replicated_one(self, command: tuple[Any, ...]) -> Any:
        """Do the same for one script in a cluster, on one connection to the node of its keys."""
        from redis.exceptions import AskError, ClusterDownError, TryAgainError

        key: bytes = command[3]
        # Only keys of idempotency keys have no hash tag. Their scripts write in any case, and a
        # marker behind such a key could belong to another node.
        marks = [("SET", key + b":" + MARK, b"")] if key.startswith(b"hm:{") else []
        answer: Any = None
        marked = list[Any]()
        for _ in range(REDIRECTIONS):
            answer, *marked = await self._on_node(key, [command, *marks, self._wait])
            if not isinstance(answer, (AskError, ClusterDownError, TryAgainError)):
                break
            # Not executed: the key has moved, or is about to.
            self._nodes_changed = True
            await asyncio.sleep(0.05)
        if not isinstance(answer, Exception):
            await self._check_replicas(*marked)
        return answer

    async def _on_node(self, key: bytes, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            await self._discover_nodes()
            node = self._client.get_node_from_key(key)
            pipeline = self._client.pipeline()
            for command in commands:
                pipeline.execute_command(*command, target_nodes=node)
            # Without redirections: a redirected script would be executed on another connection
            # than the `WAIT` that covers it.
            return list(await pipeline.execute(raise_on_error=False, allow_redirections=False))
        except self._errors() as error:
            raise await self._failed(error) from error

    async def _check_replicas(self, *marked: Any) -> None:
        """Check the answers of the marker and of `WAIT`, which counts replicas."""
        *_, replicas = await self._raise_errors(list(marked))
        if replicas < self.replicas:
            raise StoreError(
                f"{self.redacted}: {replicas} of {self.replicas} replicas have it: it may be "
                f"lost if one takes over"
            )

    def _errors(self) -> tuple[type[Exception], ...]:
        from redis.exceptions import RedisClusterException, RedisError

        errors = (RedisError, RedisClusterException, OSError, TimeoutError)
        # redis-py's cluster client closes the connections of a node that has failed, and forgets
        # the nodes while it discovers them. The other requests under way then meet a `None` or an
        # empty list.
        return (*errors, AttributeError, IndexError) if self.is_cluster else errors

    async def _failed(self, error: Exception) -> StoreError:
        from redis.exceptions import ConnectionError as RedisConnectionError
        from redis.exceptions import ReadOnlyError
        from redis.exceptions import TimeoutError as RedisTimeoutError

        # Redis 6.2 quotes the error that has ended a script within another message.
        read_only = isinstance(error, ReadOnlyError) or "-READONLY" in str(error)
        if read_only or isinstance(error, (RedisConnectionError, RedisTimeoutError)):
            self._nodes_changed = True
            if not self.is_cluster:
                # After a restart or a takeover the idle connections are broken too, or lead to a
                # server that is no primary any more. Each of them would fail one more request.
                await self._release_kept()
                await self._client.connection_pool.disconnect(inuse_connections=False)
        return self._error(error)

    async def _discover_nodes(self) -> None:
        """Read the list of nodes of a cluster, at first and after it may have changed."""
        await self._client.initialize()
        # One discovery at a time: of several concurrent ones redis-py keeps the connections of the
        # last, and never closes those of the others.
        async with self._discovery:
            if self._nodes_changed:
                # Cleared before the discovery: a failure meanwhile sets it again, since the list
                # that is being read may be older than the failure.
                self._nodes_changed = False
                try:
                    await self._client.nodes_manager.initialize()
                except BaseException:
                    self._nodes_changed = True
                    raise

    def _error(self, error: Exception) -> StoreError:
        from redis.exceptions import ResponseError

        if isinstance(error, ResponseError) and not _is_state(error):
            # An error of the set-up or of a script, not of the network: it needs the operator, and
            # a client's retries would hide it.
            _log.error("store_refuses", store=self.redacted, error=str(error))
        return StoreError(f"{self.redacted}: {str(error) or type(error).__name__}")


def _is_state(error: Exception) -> bool:
    """Return True if memory or disk of Redis is full, or a cluster lacks nodes.

    These are states rather than events: `store_failing` logs them once, not for each request.
    """
    from redis.exceptions import ClusterDownError, OutOfMemoryError

    return isinstance(error, (ClusterDownError, OutOfMemoryError)) or str(error).startswith(
        ("OOM", "MISCONF")
    )
