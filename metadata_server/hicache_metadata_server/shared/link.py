"""The way to Redis: one server, or a cluster."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

import structlog

from hicache_metadata_server.stores.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from redis.asyncio import Redis
    from redis.asyncio.cluster import RedisCluster

    from hicache_metadata_server.shared.scripts import Script

SCHEMES: Final = (
    "redis",
    "rediss",
    "unix",
    "valkey",
    "valkeys",
    "redis+cluster",
    "rediss+cluster",
    "valkey+cluster",
    "valkeys+cluster",
)
ANSWER_SECONDS: Final = 2.0
"""Nobody waits longer for Redis. What it was asked may be done all the same."""
CONNECT_SECONDS: Final = 1.0
CONNECTIONS: Final = 64
"""At most, of one server process."""


_log = structlog.get_logger()


class Call(NamedTuple):
    """A script with what it is given."""

    script: Script
    keys: tuple[bytes, ...]
    arguments: tuple[bytes | int | str, ...]


def is_shared(url: str) -> bool:
    """Whether an address is one of Redis or Valkey."""
    return "://" in url and url.partition("://")[0] in SCHEMES


def shown(url: str) -> str:
    """An address without its password."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return urlunsplit(parts._replace(netloc="***@" + parts.netloc.rpartition("@")[2]))


class Link:
    """Connections to one Redis or to a cluster; made when they are needed, and made again when they break.

    Used from one event loop. Methods raise `StoreError` where Redis is not reached, does not answer in time, or refuses.
    """

    def __init__(self, url: str, answer_seconds: float = ANSWER_SECONDS) -> None:
        self.shown = shown(url)
        self.is_cluster = "+cluster" in url.partition("://")[0]
        self._client: Any = _cluster(url, answer_seconds) if self.is_cluster else _single(url, answer_seconds)

    async def run(self, calls: Sequence[Call]) -> list[Any]:
        """What those scripts answer; they are sent together, and each is done as a whole."""
        from redis.exceptions import NoScriptError

        answers = await self._send([("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.arguments) for call in calls])
        for place, call in enumerate(calls):
            if isinstance(answers[place], NoScriptError):
                # A Redis that was started again, or another node: it keeps the script from now on.
                command = ("EVAL", call.script.source, len(call.keys), *call.keys, *call.arguments)
                (answers[place],) = await self._send([command])
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._error(answer)
        return answers

    async def command(self, *parts: bytes | int | str, **options: Any) -> Any:
        """What a command answers."""
        try:
            return await self._client.execute_command(*parts, **options)
        except _errors() as error:
            raise await self._failed(error) from error

    async def commands(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        """What several commands answer, each on its own."""
        answers = await self._send(commands)
        for answer in answers:
            if isinstance(answer, Exception):
                raise self._error(answer)
        return answers

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
        await self._client.aclose()

    async def _send(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        if len(commands) == 1 or self.is_cluster:
            return list(await asyncio.gather(*(self._one(command) for command in commands)))
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            return list(await pipeline.execute(raise_on_error=False))
        except _errors() as error:
            raise await self._failed(error) from error

    async def _one(self, command: tuple[Any, ...]) -> Any:
        from redis.exceptions import NoScriptError

        try:
            return await self._client.execute_command(*command)
        except NoScriptError as error:
            return error
        except _errors() as error:
            raise await self._failed(error) from error

    async def _failed(self, error: Exception) -> StoreError:
        from redis.exceptions import ConnectionError as RedisConnectionError

        if isinstance(error, RedisConnectionError) and not self.is_cluster:
            # Those that lie idle are broken as well, if Redis was started again: each would be a request that fails.
            await self._client.connection_pool.disconnect(inuse_connections=False)
        return self._error(error)

    def _error(self, error: Exception) -> StoreError:
        from redis.exceptions import ResponseError

        if isinstance(error, ResponseError):
            # It was reached and refuses: out of memory, not allowed, or a script of ours at fault.
            _log.error("store_refuses", store=self.shown, error=str(error))
        return StoreError(f"{self.shown}: {str(error) or type(error).__name__}")


def _errors() -> tuple[type[Exception], ...]:
    from redis.exceptions import RedisError

    return (RedisError, OSError, TimeoutError)


def _single(url: str, answer_seconds: float) -> Redis:
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    pool = BlockingConnectionPool.from_url(
        "redis" + url.removeprefix("valkey") if url.startswith("valkey") else url, max_connections=CONNECTIONS, timeout=answer_seconds, socket_timeout=answer_seconds,
        socket_connect_timeout=CONNECT_SECONDS,
        # What was sent may have been done: only whoever has an idempotency key may send it again.
        retry=Retry(NoBackoff(), 0),
    )  # fmt: skip
    return Redis.from_pool(pool)


def _cluster(url: str, answer_seconds: float) -> RedisCluster:
    from redis.asyncio.cluster import ClusterNode, RedisCluster
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff

    parts = urlsplit(url.replace("+cluster", "", 1))
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    nodes = list[ClusterNode]()
    for host in hosts.split(","):
        name, _, port = host.rpartition(":")
        if not name or not port.isdecimal():
            raise ValueError(f"store: {host!r} is no HOST:PORT; a cluster is redis+cluster://HOST:PORT,HOST:PORT")
        nodes.append(ClusterNode(name.strip("[]"), int(port)))
    return RedisCluster(
        startup_nodes=nodes, username=user or None, password=password or None, ssl=parts.scheme in ("rediss", "valkeys"),
        socket_timeout=answer_seconds, socket_connect_timeout=CONNECT_SECONDS, max_connections=CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
    )  # fmt: skip
