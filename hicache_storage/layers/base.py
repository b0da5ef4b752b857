"""Base class of layers around a storage: one guard for its calls, and misses in their place."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeVar

from hicache_storage.objects.recorder import StatsRecorder
from hicache_storage.objects.requests import (
    RegisteredPool,
    asked_pools,
    common_answer,
    pool_requests,
    registered_pool,
)
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import (
    HiCacheStorage,
    MissReason,
    PoolName,
    PoolStats,
    RemovalScope,
    UnknownPoolError,
    with_call_info,
)
from hicache_storage.spec.arguments import check_keys
from hicache_storage.spec.removals import no_removals

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.spec import (
        Capabilities,
        Health,
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
        Removals,
        StorageIdentity,
        StorageStats,
        StorageUnavailableError,
    )

AnswerT = TypeVar("AnswerT")
PagesT = TypeVar("PagesT", bound="Sequence[object]")


class StorageLayer(HiCacheStorage):
    """A storage that makes each call of the data path of another one through `guard`.

    The misses check a call as the storage would, so that misuse raises also while the store is
    unreachable (rule FT-2). They are counted here, since the storage does not meet the call.

    Closing a layer closes the inner storage.
    """

    miss_reason: ClassVar[MissReason]
    """Reason of this layer's misses."""

    def __init__(self, inner: HiCacheStorage) -> None:
        self.inner = inner
        self._misses = StatsRecorder(type(self).__name__)
        self._pools: dict[PoolName, RegisteredPool] = {}

    def guard(
        self,
        operation: str,
        ask: Callable[[HiCacheStorageExtraInfo | None], AnswerT],
        miss: Callable[[StorageUnavailableError], AnswerT],
        info: HiCacheStorageExtraInfo | None = None,
    ) -> AnswerT:
        """Make a call, or answer a miss in its place.

        Args:
            operation: "lookup", "read", "write" or "delete".
            ask: calls the storage below.
            miss: answers without it, and is told why. A clear raises then.
            info: of the call.
        """
        return ask(info)

    @property
    def identity(self) -> StorageIdentity:
        return self.inner.identity

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        self.inner.register_mem_host_pool_v2(host_pool, host_pool_name)
        access, name = page_access(host_pool), PoolName(host_pool_name)
        # A new dict: calls in other threads iterate over the old one.
        self._pools = {**self._pools, name: registered_pool(self.identity, name, access)}

    def on_host_pools_registered(self) -> None:
        self.inner.on_host_pools_registered()

    # `answers_from_memory` is not forwarded: a layer between the deadline layer and the driver, such
    # as one that injects faults, may hang by itself.
    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        def miss(_: StorageUnavailableError) -> PoolTransferResult:
            self._count("absent", dict.fromkeys(asked_pools(keys, pool_transfers), keys))
            return common_answer(keys, pool_transfers, {})

        return self.guard(
            "lookup",
            lambda info: self.inner.batch_exists_v2(keys, pool_transfers, info),
            miss,
            extra_info,
        )

    def batch_present(
        self,
        keys: Sequence[str],
        *,
        pool: str = PoolName.KV,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        def miss(_: StorageUnavailableError) -> list[bool]:
            return self._count("absent", {PoolName(pool): no_pages(keys, pool)})[PoolName(pool)]

        return self.guard(
            "lookup",
            lambda info: self.inner.batch_present(keys, pool=pool, extra_info=info),
            miss,
            extra_info,
        )

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self.guard(
            "read",
            lambda info: self.inner.batch_get_v2(transfers, info),
            lambda _: self._count("missed", self.none_moved(transfers, reads=True)),
            extra_info,
        )

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        return self.guard(
            "write",
            lambda info: self.inner.batch_set_v2(transfers, info),
            lambda _: self.none_moved(transfers, reads=False),
            extra_info,
        )

    def get_stats(self) -> StorageStats:
        stats, mine = self.inner.get_stats(), self._misses.snapshot().pools
        # Only of pools that the storage counts: metrics may be off.
        counted = {name: mine.pop(name, PoolStats()) for name in stats.pools}
        for name, pool in stats.pools.items():
            counted[name].add(pool)
        return replace(stats, pools=counted)

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        if not self.capabilities.deletes:
            return self.inner.delete(keys, pool=pool)

        def miss(_: StorageUnavailableError) -> list[bool]:
            absent = no_pages(keys, pool)
            if PoolName(pool) not in self._pools:
                raise UnknownPoolError(f"pool {pool!r} is not registered")
            return absent

        return self.guard(
            "delete",
            lambda info: with_call_info(info, lambda: self.inner.delete(keys, pool=pool)),
            miss,
        )

    def clear(self) -> None:
        def refuse(error: StorageUnavailableError) -> None:
            raise type(error)(f"{error}; repeat the clear before relying on it")

        if not self.capabilities.clears:
            self.inner.clear()
        else:
            ask = partial(with_call_info, call=self.inner.clear)
            self.guard("delete", ask, refuse)

    def removals(
        self, since: int | None = None, *, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> Removals:
        if self.capabilities.removals is RemovalScope.NONE:
            return self.inner.removals(since, extra_info=extra_info)
        return self.guard(
            "lookup",
            lambda info: self.inner.removals(since, extra_info=info),
            lambda _: no_removals(since),
            extra_info,
        )

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

    def none_moved(
        self, transfers: Sequence[PoolTransfer], *, reads: bool
    ) -> dict[PoolName, list[bool]]:
        """Answer that no page was moved.

        Raises:
            InvalidTransferError: the arguments are invalid, as for the storage.
        """
        requests = pool_requests(transfers, self._pools, distinct_slots=reads)
        return {name: [False] * len(request.keys) for name, request in requests.items()}

    def _count(self, counter: str, pools: dict[PoolName, PagesT]) -> dict[PoolName, PagesT]:
        """Count the pages of pools as misses, and return them."""
        for name, pages in pools.items():
            self._misses.count(name, **{counter: Counter({self.miss_reason: len(pages)})})
        return pools


def innermost(storage: HiCacheStorage) -> HiCacheStorage:
    """Return the driver below all layers."""
    while isinstance(storage, StorageLayer):
        storage = storage.inner
    return storage


def no_pages(keys: Sequence[str], pool: str) -> list[bool]:
    """Answer that no page exists, or was removed.

    Raises:
        InvalidTransferError: the arguments are invalid, as for the storage.
    """
    check_keys(keys)
    PoolName(pool)
    return [False] * len(keys)
