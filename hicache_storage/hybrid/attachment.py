"""A storage while it is attached: registered with all pools, called by workers, closed at the end."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from hicache_storage.hybrid.storage_calls import StorageCalls
from hicache_storage.hybrid.workers import StorageWorker
from hicache_storage.spec import HiCacheError, StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.hybrid.groups import HostPoolGroup
    from hicache_storage.hybrid.stats import StatsCounter
    from hicache_storage.spec import HiCacheStorage

logger = logging.getLogger(__name__)


class StorageAttachedError(HiCacheError, RuntimeError):
    """There is a storage already; detach it first."""

    code = "attached"


class Attachment:
    """A registered storage and the threads that call it: one each for lookups, reads and writes.

    Owns the storage. Made, expired and closed by one thread.

    Args:
        storage: the pools of `group` are registered with it.
        call_seconds: how long a call may take before it is left behind.
    """

    def __init__(self, storage: HiCacheStorage, group: HostPoolGroup, call_seconds: float, stats: StatsCounter) -> None:
        self.identity = storage.identity
        self.calls = StorageCalls(storage, group, call_seconds, stats)
        self._storage, self._stats = storage, stats
        self.query, self.read, self.backup = (
            StorageWorker(f"hicache-{name}", call_seconds, stats) for name in ("query", "read", "backup")
        )

    def expire(self) -> None:
        """Leave calls behind that take too long."""
        for worker in (self.query, self.read, self.backup):
            worker.expire()

    def close(self, seconds: float) -> None:
        """End the threads and close the storage; what does not end within so long each is left behind."""
        for worker in (self.query, self.read, self.backup):
            worker.stop(seconds)
        close_quietly(self._storage, seconds, self._stats)


def register(storage: HiCacheStorage, group: HostPoolGroup) -> None:
    """Open a storage and make all pools known to it, in the order of their names.

    Raises:
        StorageUnavailableError: it cannot be reached.
        InvalidPoolError: it cannot serve a pool.
    """
    storage.open()
    for entry in group.entries.values():
        storage.register_mem_host_pool_v2(entry.host_pool, entry.name)
    storage.on_host_pools_registered()


def bounded(what: str, call: Callable[[], None], seconds: float) -> None:
    """Make a call that may hang, in a thread that is left behind if it does.

    Raises:
        StorageTimeoutError: it did not come back in time.
        StorageUnavailableError: it raised what would end the caller, such as `SystemExit`.
        Exception: what the call raised.
    """
    errors = list[Exception]()

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)
        except BaseException as error:  # noqa: BLE001 - a driver must not end the engine
            errors.append(StorageUnavailableError(f"{what} raised {type(error).__name__}: {error}"))

    thread = threading.Thread(target=run, name=f"hicache-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise StorageTimeoutError(f"{what} did not come back within {seconds} s")
    if errors:
        raise errors[0]


def close_quietly(storage: HiCacheStorage, seconds: float, stats: StatsCounter) -> None:
    """Close a storage; nothing that goes wrong is raised."""
    try:
        bounded("close", storage.close, seconds)
    except Exception as error:  # noqa: BLE001 - whatever it is, the storage is given up
        stats.count(**{"abandoned_calls" if isinstance(error, StorageTimeoutError) else "storage_errors": 1})
        logger.warning("the storage was closed, but not cleanly: %s", error)
