"""Pages in a Redis. What Redis does with them is in `store.lua`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import redis
from hicache_storage.objects import ObjectStorage
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from hicache_redis_driver.plugin import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.objects import Call, LookupBatch, Namespace, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity

    from hicache_redis_driver.config import RedisConfig

    Part = tuple[Namespace, Sequence[str], Sequence[bytes]]
    """Pages of one namespace, in the order of their chain: their keys, and payloads if any."""

SCRIPT: Final = Path(__file__).with_name("store.lua").read_text("utf-8")
SCRIPT_KEYS: Final = 4096
SCRIPT_BYTES: Final = 32 << 20
"""Pages that one script looks up, and moves, at most: Redis serves nobody else while it runs."""
LOADING_SECONDS: Final = 0.05
ATTEMPTS: Final = 3


class RedisStorage(ObjectStorage):
    """A call is one round trip, of as many scripts as its pages need."""

    def __init__(self, identity: StorageIdentity, config: RedisConfig) -> None:
        self._config, self._capacity = config, config.capacity_bytes
        promised = replace(CAPABILITIES, evicts=self._capacity > 0, durability=config.durability)
        super().__init__(identity, driver_name="redis", capabilities=promised)
        self._epochs = dict[str, int]()

    def connect(self) -> None:
        seconds = self._config.timeout_seconds
        # A Redis that has been restarted refuses all calls until it has loaded its pages.
        attempts, errors = int(seconds / LOADING_SECONDS), (redis.BusyLoadingError,)
        pool = redis.BlockingConnectionPool.from_url(
            self._config.url,
            # With RESP3, redis-py 8 reuses a connection that has an unread reply: each later call
            # would be answered with the reply to the call before it.
            protocol=2,
            max_connections=self._config.connections,
            timeout=seconds,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=Retry(ConstantBackoff(LOADING_SECONDS), attempts, supported_errors=errors),
        )
        self._redis = redis.Redis(connection_pool=pool)
        self._redis.ping()

    def disconnect(self) -> None:
        self._redis.connection_pool.disconnect()

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return _bools(self._run("exists", [(b.namespace, b.keys, ()) for b in batches], call))

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        parts = [(batch.namespace, [read.key for read in batch.reads], ()) for batch in batches]
        return [
            [read.fill(page) for read, page in zip(batch.reads, pages, strict=True)]
            for batch, pages in zip(batches, self._run("read", parts, call), strict=True)
        ]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        parts = [
            (
                batch.namespace,
                [write.key for write in batch.writes],
                [write.tobytes() for write in batch.writes],
            )
            for batch in batches
        ]
        stored = [[False] * len(batch.writes) for batch in batches]
        for _ in range(ATTEMPTS):
            # After the deadline the caller may have reused the memory before it was copied.
            if not call.expired() and not all(map(all, stored)):
                stored = _bools(self._run("write", parts, call))
        return stored

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return _bools(self._run("delete", [(b.namespace, b.keys, ()) for b in batches], call))

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        for batch in batches:
            keys = [read.key for read in batch.reads]
            envelopes = [bytes(read.envelope) for read in batch.reads]
            self._run("discard", [(batch.namespace, keys, envelopes)], call)
        return True

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        prefix, pipeline = self._config.prefix, self._redis.pipeline(transaction=True)
        for namespace in namespaces:
            pipeline.hincrby(f"{prefix}:epochs", namespace.name, 1)
            pipeline.hdel(f"{prefix}:bytes", namespace.name)
            pipeline.unlink(f"{prefix}:{namespace.name}", f"{prefix}:{namespace.name}:uses")
        pipeline.execute()

    def _run(self, operation: str, parts: Sequence[Part], call: Call) -> list[list[Any]]:
        """Run an operation on each page; the heads of chains come last, as they are used last."""
        pipeline = self._redis.pipeline(transaction=False)
        pieces = [(i, piece) for i, part in enumerate(parts) for piece in _pieces(part)]
        for i, piece in pieces:
            namespace, keys, payloads = parts[i]
            batch = {
                "operation": operation,
                "prefix": self._config.prefix,
                "namespace": namespace.name,
                "bytes": namespace.object_bytes,
                "capacity": self._capacity,
                "epoch": self._epochs.get(namespace.name, 0),
                "keys": keys[piece],
                "uses": call.lru_order(keys[piece]),
            }
            pipeline.eval(SCRIPT, 0, msgspec.msgpack.encode(batch), *payloads[piece])
        answers: list[list[Any]] = [[None] * len(keys) for _, keys, _ in parts]
        for (i, piece), reply in zip(pieces, pipeline.execute(), strict=True):
            namespace = parts[i][0]
            answers[i][piece], self._epochs[namespace.name], evicted = reply
            if evicted:
                self.recorder.count(namespace.pool, pages_evicted=evicted)
        return answers


def _pieces(part: Part) -> Iterator[slice]:
    length = max(1, min(SCRIPT_KEYS, SCRIPT_BYTES // part[0].object_bytes))
    return (slice(start, start + length) for start in reversed(range(0, len(part[1]), length)))


def _bools(answers: list[list[Any]]) -> list[list[bool]]:
    return [list(map(bool, one)) for one in answers]
