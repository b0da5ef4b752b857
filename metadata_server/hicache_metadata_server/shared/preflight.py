"""Whether a Redis is one that can be relied upon, seen before the first request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import structlog

from hicache_metadata_server.protocol import StoreDurability
from hicache_metadata_server.storage.store import StoreError

if TYPE_CHECKING:
    from hicache_metadata_server.shared.connection import Link

_MIN_VERSION: Final = (6, 2)
_ORDER: Final = (StoreDurability.NONE, StoreDurability.PROCESS, StoreDurability.MACHINE)
_FIXES: Final = {
    StoreDurability.PROCESS: "`appendonly yes` and `appendfsync no` or `always`",
    StoreDurability.MACHINE: "`appendonly yes` and `appendfsync always`",
}

_log = structlog.get_logger()


async def check_redis(link: Link, wanted: StoreDurability) -> None:
    """See that every node keeps what is promised, and throws nothing away.

    Raises:
        StoreError: one does not, or is not reached; the message says which setting is to be
        changed.
    """
    for info in await link.on_each("INFO"):
        _check_node(link, info)
        if int(info.get("connected_slaves", 0)) < link.replicas:
            # They may come; until then changes are refused.
            _log.warning(
                "replicas_missing",
                store=link.shown,
                wanted=link.replicas,
                connected=info.get("connected_slaves"),
            )
    try:
        policies = await _config(link, "maxmemory-policy")
        files, fsyncs = await _config(link, "appendonly"), await _config(link, "appendfsync")
    except StoreError as error:
        # Some that are run by others do not tell.
        _log.warning(
            "store_settings_unknown", store=link.shown, durability=str(wanted), error=str(error)
        )
        return
    for policy in policies:
        if policy != "noeviction":
            raise StoreError(
                f"{link.shown}: maxmemory-policy is {policy}, which would throw keys of ours away: "
                f"set it to noeviction"
            )
    for file, fsync in zip(files, fsyncs, strict=True):
        kept = kept_by(file, fsync)
        if _ORDER.index(kept) < _ORDER.index(wanted):
            settings = f"appendonly {file}" + (f", appendfsync {fsync}" if file == "yes" else "")
            raise StoreError(
                f"{link.shown}: its settings ({settings}) keep durability {str(kept)!r}, not "
                f"{str(wanted)!r}: "
                f"set {_FIXES[wanted]} there, or durability to {str(kept)!r} here"
            )


def kept_by(appendonly: str, appendfsync: str) -> StoreDurability:
    """What acknowledged changes survive.

    With `everysec` Redis may answer before it has written, while an earlier fsync lasts; with `no`
    it always writes first.
    """
    if appendonly != "yes":
        return StoreDurability.NONE
    return {"always": StoreDurability.MACHINE, "no": StoreDurability.PROCESS}.get(
        appendfsync, StoreDurability.NONE
    )


async def _config(link: Link, name: str) -> list[str]:
    return [_text(found, name) for found in await link.on_each("CONFIG GET", name)]


def _text(found: Any, name: str) -> str:
    values = {_plain(key): _plain(value) for key, value in found.items()}
    if name not in values:
        raise StoreError(f"it does not tell {name}")
    return values[name]


def _plain(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _check_node(link: Link, info: dict[str, Any]) -> None:
    version = tuple(int(part) for part in str(info["redis_version"]).split(".")[:2])
    if version < _MIN_VERSION:
        raise StoreError(
            f"{link.shown}: this is Redis {info['redis_version']}; 6.2 or later is needed, or "
            f"Valkey"
        )
    if info.get("cluster_enabled") and not link.is_cluster:
        raise StoreError(
            f"{link.shown}: this is a node of a cluster: name it as "
            f"redis+cluster://HOST:PORT,HOST:PORT"
        )
    if info.get("role") != "master":
        raise StoreError(
            f"{link.shown}: this is a replica, which cannot be written: name the primary"
        )
