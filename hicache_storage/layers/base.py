"""Base class of layers: storages that wrap another one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.spec import HiCacheStorage, PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.spec import (
        Capabilities,
        Health,
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
        Removals,
        StorageIdentity,
        StorageStats,
    )


class StorageLayer(HiCacheStorage):
    """A storage that forwards every call; a layer overrides those it changes.

    Closing a layer closes the inner storage.
    """

    def __init__(self, inner: HiCacheStorage) -> None:
        self.inner = inner

    @property
    def identity(self) -> StorageIdentity:
        return self.inner.identity

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        self.inner.register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        self.inner.on_host_pools_registered()

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        return self.inner.batch_exists_v2(keys, pool_transfers, extra_info)

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        return self.inner.batch_present(keys, pool=pool, extra_info=extra_info)

    # `answers_from_memory` is not forwarded: a layer between the deadline layer and the driver, such
    # as one that injects faults, may hang by itself.
    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self.inner.batch_get_v2(transfers, extra_info)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self.inner.batch_set_v2(transfers, extra_info)

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        return self.inner.delete(keys, pool=pool)

    def clear(self) -> None:
        self.inner.clear()

    def removals(
        self, since: int | None = None, *, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> Removals:
        return self.inner.removals(since, extra_info=extra_info)

    def get_stats(self) -> StorageStats:
        return self.inner.get_stats()

    def fault_count(self) -> int:
        return self.inner.fault_count()

    @property
    def notes_faults(self) -> bool:
        return self.inner.notes_faults

    def health(self) -> Health:
        return self.inner.health()

    def open(self) -> None:
        self.inner.open()

    def close(self) -> None:
        self.inner.close()


def innermost(storage: HiCacheStorage) -> HiCacheStorage:
    """Return the driver below all layers."""
    while isinstance(storage, StorageLayer):
        storage = storage.inner
    return storage
