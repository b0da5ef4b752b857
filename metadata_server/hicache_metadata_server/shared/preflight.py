"""Preflight check of a Redis: version, role, eviction and durability.

A wrong setting loses pages long after the start, and without an error. So a server does not start
on a Redis with such a setting.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import structlog

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.shared.connection import RedisConnection

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

_log = structlog.get_logger()


def check_store(url: str, durability: StoreDurability, replicas: int = 0) -> None:
    """Check that every node of a store is reached, keeps changes as durably as stated, and evicts
    no keys.

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
