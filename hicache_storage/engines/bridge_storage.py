"""The storage of a bridge: its opening, the calls that are refused, and the engine's version."""

from __future__ import annotations

import logging
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from hicache_storage.layers.stack import StorageOptions
from hicache_storage.objects.lifecycle import ForkAware
from hicache_storage.plugins import create_storage
from hicache_storage.spec import ConfigError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.engines.bridge_config import BridgeConfig
    from hicache_storage.spec import HiCacheStorage, StorageIdentity

logger = logging.getLogger(__name__)

MAX_REASONS = 64
"""Limit of the reasons that are logged as errors.

Further ones are counted, and logged at debug level.
"""


class RefusedCalls(ForkAware):
    """Counter and log of the calls that were answered without the storage. Thread-safe."""

    def __init__(self, engine: str) -> None:
        self.count = 0
        self._engine = engine
        self._reasons: set[tuple[str, str, str]] = set()
        super().__init__()

    def note(self, call: str, pool: str, error: BaseException) -> None:
        """Count a refused call, and log a reason that is new."""
        reason = (call, pool, f"{type(error).__name__}: {error}")
        with self._lock:
            self.count += 1
            # An engine repeats a refused call for every batch: one line for each reason, and no
            # more reasons than the set may hold.
            is_new = reason not in self._reasons and len(self._reasons) < MAX_REASONS
            if is_new:
                self._reasons.add(reason)
        level = logging.ERROR if is_new else logging.DEBUG
        where = f"{call}, pool {pool}" if pool else call
        logger.log(level, "hicache bridge for %s: refused %s: %s", self._engine, where, reason[2])


def open_storage(
    config: BridgeConfig,
    identity: StorageIdentity,
    pools: Mapping[str, object],
    *,
    complete: bool = True,
    metrics: bool = True,
) -> HiCacheStorage:
    """Create the storage of a bridge, register host pools by their names, and open it.

    An unreachable store is no error: the storage retries, and answers misses until then.

    Args:
        config: the bridge's options.
        identity: of the pages.
        pools: by name.
        complete: no more pools follow.
        metrics: as of `StorageOptions`.

    Raises:
        ConfigError: the driver refuses its configuration, or stores no shards of KV heads where the
            identity asks for them.
        InvalidPoolError: a pool cannot be served.
    """
    options = StorageOptions(deadline_seconds=config.deadline_seconds, metrics=metrics)
    storage = create_storage(config.driver, identity, config.driver_config, options=options)
    try:
        if identity.store_tp_size and not storage.capabilities.head_shards:
            raise ConfigError(
                f"hicache bridge: driver {config.driver!r} does not declare 'head_shards', so that "
                "TP sizes cannot share pages; leave tp_lcm_size out"
            )
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool, name)
        if complete:
            storage.on_host_pools_registered()
        storage.open()
    except StorageUnavailableError as error:
        logger.error("hicache bridge: driver %r cannot be opened yet: %s", config.driver, error)
    except BaseException:
        storage.close()
        raise
    return storage


def minor_version(*distributions: str) -> str:
    """Return `X.Y` of the first distribution that is installed; `unknown` if none is."""
    for name in distributions:
        with suppress(PackageNotFoundError):
            return ".".join(version(name).split(".")[:2])
    return "unknown"
