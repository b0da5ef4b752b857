"""The way to Redis: one server, one that Sentinels know, or a cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import structlog

from hicache_metadata_server.shared.address import AddressKind, parse_address
from hicache_metadata_server.storage.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_metadata_server.shared.scripts import Script

ANSWER_SECONDS: Final = 2.0
"""Nobody waits longer for Redis. What it was asked may be done all the same."""
REPLICA_SECONDS: Final = 1.0
"""For replicas to say that they have a change; within the time for an answer."""
REDIRECTIONS: Final = 5
"""Times that a cluster is asked where a key is now, 50 ms apart."""
MARK: Final = b"replicated"
"""A key that is written last; in a cluster it is behind a key of the same node."""

TLS_END_SECONDS: Final = 0.05

_log = structlog.get_logger()


class ScriptCall(NamedTuple):
    """A script with what it is given."""

    script: Script
    keys: tuple[bytes, ...]
    arguments: tuple[bytes | int | str, ...]

    @property
    def command(self) -> tuple[bytes | int | str, ...]:
        """For a Redis that knows the script."""
        return ("EVALSHA", self.script.sha, len(self.keys), *self.keys, *self.arguments)

    @property
    def whole_command(self) -> tuple[bytes | int | str, ...]:
        """For one that does not."""
        return ("EVAL", self.script.source, len(self.keys), *self.keys, *self.arguments)


class RedisConnection:
    """Connections to one Redis or to a cluster; made when they are needed, and made again when they
    break.

    Used from one event loop. Methods raise `StoreError` where Redis is not reached, does not answer
    in time, or refuses.

    Args:
        url: of the store.
        answer_seconds: after which Redis is taken for gone.
        replicas: that must have whatever a script's answer tells, before it is told.

    Raises:
        ImportError: the library for it is missing.
        ValueError: the address is none.
    """

    def __init__(self, url: str, answer_seconds: float = ANSWER_SECONDS, replicas: int = 0) -> None:
        from hicache_metadata_server.shared.redis_clients import client_of

        address = parse_address(url)
        self.redacted, self.replicas = address.redacted, replicas
        self.is_cluster = address.kind is AddressKind.CLUSTER
        self._nodes_changed, self._is_secure = False, address.tls is not None
        self._learning = asyncio.Lock()
        self._wait = ("WAIT", replicas, round(1000 * min(REPLICA_SECONDS, answer_seconds / 2)))
        self._client, self._close = client_of(address, answer_seconds)

    async def run(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """What those scripts answer; they are sent together, and each is done as a whole."""
        from redis.exceptions import NoScriptError

        send = self._send_on if self.replicas else self._send
        answers = await send([call.command for call in calls])
        for place, call in enumerate(calls):
            if isinstance(answers[place], NoScriptError):
                # A Redis that was started again, or another node: it keeps the script from now on.
                (answers[place],) = await send([call.whole_command])
        return await self._seen(answers)

    async def command(self, *parts: bytes | int | str, **options: Any) -> Any:
        """What a command answers."""
        try:
            return await self._client.execute_command(*parts, **options)
        except _errors() as error:
            raise await self._failed(error) from error

    async def commands(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """What several commands answer, each on its own."""
        return await self._seen(await self._send(commands))

    async def probe_writes(self, keys: Iterable[bytes]) -> None:
        """Write a key that nothing reads, in a cluster on each node that has one of these keys: a
        Redis that is full answers reads."""
        if self.is_cluster:
            try:
                await self._learn_nodes()
                keys = {self._client.get_node_from_key(key).name: key for key in keys}.values()
            except _errors() as error:
                raise await self._failed(error) from error
        await self.commands([("SET", key + b":" + MARK, b"") for key in keys])

    async def on_each(self, *parts: str) -> list[Any]:
        """What a command answers on every node that is written to."""
        if not self.is_cluster:
            return [await self.command(*parts)]
        found = await self.command(*parts, target_nodes="primaries")
        # One node alone answers for itself.
        nodes = all(":" in str(name) for name in found)
        return list(found.values()) if nodes else [found]

    async def close(self) -> None:
        """End all connections."""
        await self._close()
        if self._is_secure:
            # asyncio ends a TLS connection behind its close; a loop that ends before it leaves the
            # socket open.
            await asyncio.sleep(TLS_END_SECONDS)

    async def _seen(self, answers: list[Any]) -> list[Any]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise await self._failed(answer)
        return answers

    async def _send(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        if len(commands) == 1 or self.is_cluster:
            return list(await asyncio.gather(*(self._one(command) for command in commands)))
        return await self._together(commands)

    async def _one(self, command: tuple[Any, ...]) -> Any:
        from redis.exceptions import NoScriptError

        try:
            return await self._client.execute_command(*command)
        except NoScriptError as error:
            return error
        except _errors() as error:
            raise await self._failed(error) from error

    async def _together(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return list(await pipeline.execute(raise_on_error=False))
        except _errors() as error:
            raise await self._failed(error) from error

    async def _send_on(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Send scripts, and wait until replicas have what they have done and seen.

        `WAIT` promises something about what its own connection has written alone. A script that has
        only looked may tell what another connection has written, so that something is written
        behind it.
        """
        if self.is_cluster:
            return list(await asyncio.gather(*(self._one_on(command) for command in commands)))
        *answers, marked, replicas = await self._together(
            [*commands, ("SET", b"hm:" + MARK, b""), self._wait]
        )
        await self._check_replicas(marked, replicas)
        return answers

    async def _one_on(self, command: tuple[Any, ...]) -> Any:
        """The same for one script in a cluster, on one connection to the node that has its keys."""
        from redis.exceptions import AskError, ClusterDownError, TryAgainError

        key: bytes = command[3]
        # Keys without a hash tag are those of requests that are held once; their scripts write by
        # themselves.
        marks = [("SET", key + b":" + MARK, b"")] if key.startswith(b"hm:{") else []
        answer: Any = None
        marked = list[Any]()
        for _ in range(REDIRECTIONS):
            answer, *marked = await self._on_node(key, [command, *marks, self._wait])
            if not isinstance(answer, (AskError, ClusterDownError, TryAgainError)):
                break
            # Not done: the key has moved, or is about to.
            self._nodes_changed = True
            await asyncio.sleep(0.05)
        if not isinstance(answer, Exception):
            await self._check_replicas(*marked)
        return answer

    async def _on_node(self, key: bytes, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        try:
            await self._learn_nodes()
            node = self._client.get_node_from_key(key)
            pipeline = self._client.pipeline()
            for command in commands:
                pipeline.execute_command(*command, target_nodes=node)
            # Not redirected one by one: they belong on one connection.
            return list(await pipeline.execute(raise_on_error=False, allow_redirections=False))
        except _errors() as error:
            raise await self._failed(error) from error

    async def _check_replicas(self, *marked: Any) -> None:
        """What is behind a script's answer: at the end, how many replicas have it."""
        *_, replicas = await self._seen(list(marked))
        if replicas < self.replicas:
            raise StoreError(
                f"{self.redacted}: {replicas} of {self.replicas} replicas have it: it may be lost if "
                f"one takes over"
            )

    async def _failed(self, error: Exception) -> StoreError:
        from redis.exceptions import ConnectionError as RedisConnectionError
        from redis.exceptions import ReadOnlyError
        from redis.exceptions import TimeoutError as RedisTimeoutError

        # Redis 6.2 tells within another message what has ended a script.
        read_only = isinstance(error, ReadOnlyError) or "-READONLY" in str(error)
        if read_only or isinstance(error, (RedisConnectionError, RedisTimeoutError)):
            self._nodes_changed = True
            if not self.is_cluster:
                # Those that lie idle are broken as well, if Redis was started again, or lead to a
                # primary that is none any more: each would be a request that fails.
                await self._client.connection_pool.disconnect(inuse_connections=False)
        return self._error(error)

    async def _learn_nodes(self) -> None:
        """See which nodes a cluster has, at first and when they may have changed.

        One at a time: redis-py leaves the connections open of all but the last who look at the same
        time.
        """
        await self._client.initialize()
        async with self._learning:
            if self._nodes_changed:
                # What fails meanwhile is a reason to look once more.
                self._nodes_changed = False
                try:
                    await self._client.nodes_manager.initialize()
                except BaseException:
                    self._nodes_changed = True
                    raise

    def _error(self, error: Exception) -> StoreError:
        from redis.exceptions import ResponseError

        if isinstance(error, ResponseError) and not _takes_no_writes(error):
            # It was reached and refuses: not allowed, or a script of ours at fault.
            _log.error("store_refuses", store=self.redacted, error=str(error))
        return StoreError(f"{self.redacted}: {str(error) or type(error).__name__}")


def _takes_no_writes(error: Exception) -> bool:
    """Whether its memory or its disk is full: a state, which `store_failing` tells once and not for
    each request."""
    from redis.exceptions import OutOfMemoryError

    return isinstance(error, OutOfMemoryError) or str(error).startswith(("OOM", "MISCONF"))


def _errors() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisClusterException, RedisError

    return (RedisError, RedisClusterException, OSError, TimeoutError)
