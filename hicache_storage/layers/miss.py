"""Misses that a layer answers in place of the storage, after the usual checks of the arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.layers.base import StorageLayer
from hicache_storage.objects.requests import (
    RegisteredPool,
    check_transfers,
    pool_requests,
    registered_pool,
)
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import PoolName, PoolPresence, PoolTransferResult, UnknownPoolError
from hicache_storage.spec.arguments import check_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.spec import HiCacheStorage, PoolTransfer, StorageIdentity


class MissAnswers:
    """Checks a call as a storage would.

    So misuse raises also while the store is unreachable (rule FT-2).
    """

    def __init__(self) -> None:
        self._pools: dict[PoolName, RegisteredPool] = {}

    def register(self, identity: StorageIdentity, host_pool: object, name: str) -> None:
        """Remember a pool that the wrapped storage has accepted."""
        access, pool = page_access(host_pool), PoolName(name)
        # A new dict: calls in other threads iterate over the old one.
        self._pools = {
            **self._pools,
            pool: registered_pool(identity, pool, access),
        }

    def exists(
        self, keys: Sequence[str], transfers: Sequence[PoolTransfer] | None
    ) -> PoolTransferResult:
        """Answer that nothing exists.

        Raises:
            InvalidTransferError: the arguments are invalid, as for the storage.
        """
        check_keys(keys)
        check_transfers(transfers or (), "pool_transfers")
        absent = [False] * len(keys)
        asked = [
            PoolName.KV,
            *(PoolPresence.of(transfer, absent).name for transfer in transfers or ()),
        ]
        return PoolTransferResult(0, dict.fromkeys(asked, 0), [])

    def presence(self, keys: Sequence[str], pool: str) -> list[bool]:
        """Answer that no page exists.

        Raises:
            InvalidTransferError: the arguments are invalid, as for the storage.
        """
        check_keys(keys)
        PoolName(pool)
        return [False] * len(keys)

    def removal(self, keys: Sequence[str], pool: str) -> list[bool]:
        """Answer that no page was removed.

        Raises:
            InvalidTransferError: the arguments are invalid, as for the storage.
            UnknownPoolError: the pool was never registered.
        """
        check_keys(keys)
        if PoolName(pool) not in self._pools:
            raise UnknownPoolError(f"pool {pool!r} is not registered")
        return [False] * len(keys)

    def pages(
        self, transfers: Sequence[PoolTransfer], *, reads: bool
    ) -> dict[PoolName, list[bool]]:
        """Answer that no page was moved.

        Raises:
            InvalidTransferError: the arguments are invalid, as for the storage.
        """
        requests = pool_requests(transfers, self._pools, distinct_slots=reads)
        return {name: [False] * len(request.keys) for name, request in requests.items()}


class MissAnsweringLayer(StorageLayer):
    """A layer that can answer a miss without calling the storage that it wraps."""

    def __init__(self, inner: HiCacheStorage) -> None:
        super().__init__(inner)
        self._misses = MissAnswers()

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._misses.register(self.identity, host_pool, host_pool_name)
