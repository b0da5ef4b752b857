"""The contract: the abstract storage. `docs/spec.md` has its rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from hicache_storage.spec.arguments import check_keys
from hicache_storage.spec.errors import UnsupportedOperationError
from hicache_storage.spec.transfers import PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from hicache_storage.spec.calls import HiCacheStorageExtraInfo
    from hicache_storage.spec.capabilities import Capabilities
    from hicache_storage.spec.identity import StorageIdentity
    from hicache_storage.spec.removals import Removals
    from hicache_storage.spec.stats import StorageStats
    from hicache_storage.spec.transfers import PoolTransferResult


@dataclass(frozen=True, slots=True)
class Health:
    """Answer of `health()`."""

    ok: bool
    """False only where nothing can be served: what is there cannot be read."""
    detail: str = ""
    writable: bool = True
    """False where sets are refused, as by a full or read-only store; `detail` has the reason."""


class HiCacheStorage(ABC):
    """The third tier: pages of host pools, stored and found by key.

    All calls block, may come from any thread, and may overlap. The data path (`batch_*_v2`) never
    raises for a fault of the outside world: a fault is a miss, counted in `get_stats()`. It raises
    a `HiCacheError` for misuse, before any I/O, and `StorageClosedError` after `close()`.

    Constructing a storage connects to nothing; `open()` does, or the first call.
    """

    @property
    @abstractmethod
    def identity(self) -> StorageIdentity:
        """Identity of the pages that this storage reads and writes."""

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Capabilities of this instance: those that its driver declares, or fewer."""

    @abstractmethod
    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        """Register a host pool under a name, before any transfer that names it.

        Registering the same name again replaces the pool. The storage keeps a reference, so that
        the memory stays valid until `close()`.

        Raises:
            InvalidPoolError: the pool cannot be served (rule GET-8).
            InvalidTransferError: the name is not a legal pool name.
        """

    def on_host_pools_registered(self) -> None:  # noqa: B027 - optional on purpose
        """Handle the end of the initial registrations; pools may still be added one by one."""

    @abstractmethod
    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Find the longest prefix of the chain `keys` that all pools together can restore.

        The KV pool is asked for all of `keys`; each transfer adds a side pool with its policy,
        asked for the same chain. Of `transfer.keys` only the number counts. Pages may be evicted
        between this answer and a get, which then answers `False`. An unknown pool makes the hit 0.

        Raises:
            InvalidTransferError: a key or a policy's geometry is illegal.
        """

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Find out which pages exist; one answer for each key, in the order of the keys.

        For engines that apply their own hit policy, and ask for pages in any order. A pool that was
        never registered has no pages. Pages may be evicted between this answer and a get, which
        then answers `False`.

        Here it calls `batch_exists_v2` for each key; `ObjectStorage` makes one lookup of them.

        Raises:
            InvalidTransferError: a key or the name of the pool is illegal.
        """
        check_keys(keys)
        name = PoolName(pool)
        side = [] if name == PoolName.KV else [PoolTransfer(name)]
        return [
            self.batch_exists_v2([key], side, extra_info).extra_pool_hit_pages.get(name, 0) == 1
            for key in keys
        ]

    @abstractmethod
    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        """Read pages into the host pools; one answer for each key, in the order of the keys.

        `True`: the page holds exactly the bytes that a completed set stored. `False`: not
        delivered, and the destination page may hold anything; no other page is touched. Two
        transfers of one pool answer in one list, one after the other.

        Raises:
            InvalidTransferError: indices do not fit the keys or the pool; nothing has been read.
            UnknownPoolError: a pool was never registered.
        """

    def answers_from_memory(self, operation: str) -> bool:
        """Return True if calls with `from_memory` are worth a try.

        Args:
            operation: "lookup" or "read".
        """
        return False

    @abstractmethod
    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        """Store pages of the host pools; one answer for each key, in the order of the keys.

        `True`: every storage of equal identity finds the page until it is evicted, deleted or
        cleared; also for a page that was there already, which is not written again. A rank that is
        not the writer of a replicated pool writes nothing and answers what exists. The host pages
        may be reused when the call returns.

        Raises:
            InvalidTransferError: indices do not fit the keys or the pool; nothing has been written.
            UnknownPoolError: a pool was never registered.
        """

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        """Remove pages; `True` where one was removed.

        `False`: no page was removed, as far as is known. It was not there, or the store failed or
        was late, and the page may still exist or may still be removed; such a failure is counted as
        those of the data path are.

        Raises:
            UnsupportedOperationError: `capabilities.deletes` is not declared.
        """
        raise UnsupportedOperationError(
            f"{type(self).__name__} does not declare the capability 'deletes'"
        )

    def clear(self) -> None:
        """Remove all pages of this identity's registered pools, and nothing else (rule LC-4).

        Returns once none of them exists for any storage. After an error all, some or none of them
        may still exist, and the caller repeats the call before relying on it (rule LC-7).

        Raises:
            StorageUnavailableError: it did not happen, or only in part.
            StorageTimeoutError: it was not over at the deadline; it may have happened, and may
                still happen.
            UnsupportedOperationError: `capabilities.clears` is not declared.
        """
        raise UnsupportedOperationError(
            f"{type(self).__name__} does not declare the capability 'clears'"
        )

    def removals(
        self, since: int | None = None, *, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> Removals:
        """Report the pages that have ceased to exist since an earlier call.

        The first call begins the watch. Each listener keeps a cursor of its own. A page that was
        reported may have been stored again since: a listener that stores pages itself asks
        `batch_present` for those that it has stored since its last call. After a fault the answer
        is empty and has the cursor of the call, so that the next call catches up.

        Args:
            since: the `cursor` of the listener's last answer; None begins with what is removed from
                now on.
            extra_info: deadline and request id.

        Raises:
            InvalidTransferError: `since` is neither None nor an integer.
            UnsupportedOperationError: `capabilities.removals` is `none`.
        """
        raise UnsupportedOperationError(
            f"{type(self).__name__} does not declare the capability 'removals'"
        )

    @abstractmethod
    def get_stats(self) -> StorageStats:
        """A snapshot of the counters; also after `close()`."""

    def fault_count(self) -> int:
        """Return the number of calls that have failed so far.

        Cheap enough to be read around each call.
        """
        return self.get_stats().faults

    @property
    def notes_faults(self) -> bool:
        """True if faults are reported to the call that meets them (`note_fault`).

        Otherwise only by `fault_count`.
        """
        return False

    @abstractmethod
    def health(self) -> Health:
        """Check that the storage can serve, and store; never raises for a fault of the environment."""

    @abstractmethod
    def open(self) -> None:
        """Connect. Idempotent.

        Raises:
            StorageUnavailableError: the outside world did not answer within the deadline; may be
                tried again.
            StorageClosedError: `close()` has been called.
        """

    @abstractmethod
    def close(self) -> None:
        """Finish the calls that run, and release everything. Idempotent.

        No thread, descriptor, socket or registration is left behind, and the host pools are let go.
        """

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
