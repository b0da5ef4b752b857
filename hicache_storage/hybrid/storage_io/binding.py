"""Binding of a storage to a controller: its registration and worker threads."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from hicache_storage.hybrid.storage_io.calls import StorageCalls
from hicache_storage.hybrid.storage_io.workers import StorageWorker
from hicache_storage.spec import HiCacheError, StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.hybrid.pools.group import HostPoolGroup
    from hicache_storage.hybrid.stats import StatsCounter
    from hicache_storage.spec import HiCacheStorage

logger = logging.getLogger(__name__)


class StorageAttachedError(HiCacheError, RuntimeError):
    """A storage is attached already; detach it first."""

    code = "attached"


class StorageBinding:
    """A registered storage and its worker threads for lookups, reads and writes.

    Owns the storage. Made, expired and closed by one thread.

    Args:
        storage: the pools of `group` are registered with it.
        call_seconds: how long a call may take before it is abandoned.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        group: HostPoolGroup,
        call_seconds: float,
        stats: StatsCounter,
    ) -> None:
        self.identity = storage.identity
        self.calls = StorageCalls(storage, group, call_seconds, stats)
        self._storage = storage
        self._stats = stats
        # One thread for each kind of call, so that long reads and backups do not delay lookups.
        self.query = StorageWorker("hicache-query", call_seconds, stats)
        self.read = StorageWorker("hicache-read", call_seconds, stats)
        self.backup = StorageWorker("hicache-backup", call_seconds, stats)

    def expire(self) -> None:
        """Abandon calls that take too long."""
        for worker in (self.query, self.read, self.backup):
            worker.expire()

    def close(self, seconds: float) -> None:
        """End the threads and close the storage; waits for each at most so long."""
        # Workers first: a storage must not be closed under a call that still runs, unless it hangs.
        for worker in (self.query, self.read, self.backup):
            worker.stop(seconds)
        close_quietly(self._storage, seconds, self._stats)


def register(storage: HiCacheStorage, group: HostPoolGroup) -> None:
    """Open a storage and register all pools, in the order of their names.

    Raises:
        StorageUnavailableError: it cannot be reached.
        InvalidPoolError: it cannot serve a pool.
    """
    storage.open()
    for entry in group.entries.values():
        storage.register_mem_host_pool_v2(entry.host_pool, entry.name)
    # After the last pool, as the contract says; drivers may check the complete set here.
    storage.on_host_pools_registered()


def call_with_timeout(what: str, call: Callable[[], None], seconds: float) -> None:
    """Make a call in a thread of its own, which is abandoned if it does not return.

    Raises:
        StorageTimeoutError: the call did not return in time.
        StorageUnavailableError: it raised an error that would end the caller, such as `SystemExit`.
        Exception: the error of the call.
    """
    errors = list[Exception]()

    def run() -> None:
        try:
            call()
        except Exception as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)
        except BaseException as error:  # noqa: BLE001 - a driver must not end the engine
            message = f"{what} raised {type(error).__name__}: {error}"
            errors.append(StorageUnavailableError(message))

    # A daemon: a call that hangs for ever must not keep the process from exiting.
    thread = threading.Thread(target=run, name=f"hicache-{what}", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise StorageTimeoutError(f"{what} did not return within {seconds} s")
    if errors:
        raise errors[0]


def close_quietly(storage: HiCacheStorage, seconds: float, stats: StatsCounter) -> None:
    """Close a storage; errors are logged and counted, not raised."""
    try:
        call_with_timeout("close", storage.close, seconds)
    except Exception as error:  # noqa: BLE001 - the storage is given up, whatever the error
        timed_out = isinstance(error, StorageTimeoutError)
        stats.count(**{"abandoned_calls" if timed_out else "storage_errors": 1})
        logger.warning("the storage was closed, but not cleanly: %s", error)
