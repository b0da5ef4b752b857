"""Preflight check of a Redis: version, role, eviction and durability.

A wrong setting loses pages long after the start, and without an error. So a server does not start
on a Redis with such a setting.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import structlog

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.shared.connection import open_connection

if TYPE_CHECKING:
    from hicache_metadata_server.shared.connection import RedisConnection

_OLD_STORE: Final = b"hm:{scopes}"
"""List of scopes of servers whose state machine ran in Redis."""
# The first version that removes entries of a stream by their ids.
_MIN_VERSION: Final = (6, 2)
_ORDER: Final = (StoreDurability.NONE, StoreDurability.PROCESS, StoreDurability.MACHINE)
_FIXES: Final = {
    StoreDurability.PROCESS: "`appendonly yes` and `appendfsync no` or `always`",
    StoreDurability.MACHINE: "`appendonly yes` and `appendfsync always`",
}

_log = structlog.get_logger()


def check_store(url: str, durability: StoreDurability, replicas: int = 0) -> None:
    """Check that the store is reached and keeps changes as durably as stated.

    Raises:
        StoreError: it is not reached, or does not keep them.
        ValueError: the address is not valid.
    """

    async def check() -> None:
        connection = open_connection(url, replicas)
        try:
            await check_redis(connection, durability)
        finally:
            await connection.close()

    # A loop of its own: connections belong to the event loop that opened them, and the server's
    # does not run yet.
    asyncio.run(check())


async def check_redis(connection: RedisConnection, wanted: StoreDurability) -> None:
    """Check that every node keeps changes as durably as wanted, and evicts no keys.

    Raises:
        StoreError: a node does not, or is not reached; the message names the setting to change.
    """
    for info in await connection.on_each("INFO"):
        _check_node(connection, info)
        if int(info.get("connected_slaves", 0)) < connection.replicas:
            # No error: replicas may join later. Until then `WAIT` fails every change.
            _log.warning(
                "replicas_missing",
                store=connection.redacted,
                wanted=connection.replicas,
                connected=info.get("connected_slaves"),
            )
    if await connection.command("EXISTS", _OLD_STORE):
        raise StoreError(
            f"{connection.redacted}: this store was written by an earlier version of this server: "
            f"empty it (FLUSHDB); the cache then begins empty"
        )
    try:
        policies = await _config(connection, "maxmemory-policy")
        files, fsyncs = (
            await _config(connection, "appendonly"),
            await _config(connection, "appendfsync"),
        )
    except StoreError as error:
        # Managed services forbid CONFIG. The operator has to know their settings.
        _log.warning(
            "store_settings_unknown",
            store=connection.redacted,
            durability=str(wanted),
            error=str(error),
        )
        return
    for policy in policies:
        if policy != "noeviction":
            raise StoreError(
                f"{connection.redacted}: maxmemory-policy is {policy}, which would evict keys "
                f"of the store: set it to noeviction"
            )
    for file, fsync in zip(files, fsyncs, strict=True):
        kept = kept_by(file, fsync)
        if _ORDER.index(kept) < _ORDER.index(wanted):
            settings = f"appendonly {file}" + (f", appendfsync {fsync}" if file == "yes" else "")
            raise StoreError(
                f"{connection.redacted}: its settings ({settings}) keep durability "
                f"{str(kept)!r}, not {str(wanted)!r}: "
                f"set {_FIXES[wanted]} there, or durability to {str(kept)!r} here"
            )


def kept_by(appendonly: str, appendfsync: str) -> StoreDurability:
    """Return the durability of acknowledged changes under two settings of Redis.

    With `everysec` Redis may answer before it has written a change, while an earlier fsync is in
    progress. With `no` it always writes first.
    """
    if appendonly != "yes":
        return StoreDurability.NONE
    return {"always": StoreDurability.MACHINE, "no": StoreDurability.PROCESS}.get(
        appendfsync, StoreDurability.NONE
    )


async def _config(connection: RedisConnection, name: str) -> list[str]:
    return [_text(found, name) for found in await connection.on_each("CONFIG GET", name)]


def _text(found: Any, name: str) -> str:
    values = {_plain(key): _plain(value) for key, value in found.items()}
    if name not in values:
        raise StoreError(f"it does not report {name}")
    return values[name]


def _plain(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_node(connection: RedisConnection, info: dict[str, Any]) -> None:
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < _MIN_VERSION:
        raise StoreError(
            f"{connection.redacted}: this is Redis {info['redis_version']}; 6.2 or later is "
            f"needed, or Valkey"
        )
    if info.get("cluster_enabled") and not connection.is_cluster:
        raise StoreError(
            f"{connection.redacted}: this is a node of a cluster: name it as "
            f"redis+cluster://HOST:PORT,HOST:PORT"
        )
    # A replica answers reads, so that a server would start and fail at the first change.
    if info.get("role") != "master":
        raise StoreError(
            f"{connection.redacted}: this is a replica, which cannot be written: name the primary"
        )
