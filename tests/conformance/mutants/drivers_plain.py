"""A right driver without `ObjectStorage`, made of small steps, so that each can be made wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache_storage.objects.namespace import Namespace
from hicache_storage.objects.requests import RegisteredPool, pool_requests
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import (
    Capabilities,
    DriverConfig,
    Durability,
    Health,
    HiCacheStorage,
    PoolName,
    PoolPresence,
    Sharing,
    StorageClosedError,
    StorageStats,
    UnknownPoolError,
    common_hit,
)
from hicache_storage.spec.arguments import check_keys

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects.requests import PoolRequest
    from hicache_storage.spec import (
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
        StorageIdentity,
    )

CAPABILITIES = Capabilities(
    sharing=Sharing.PROCESS, durability=Durability.REOPEN, deletes=True, clears=True, may_hang=False
)


class PlainConfig(DriverConfig, frozen=True, kw_only=True):
    store: str = "default"


class FileControlConfig(PlainConfig, frozen=True, kw_only=True):
    path: str


class Plain(HiCacheStorage):
    """Keeps the bytes of each page in a dictionary, without an envelope.

    So nothing notices what a fault does to them.
    """

    promises: ClassVar[Capabilities] = CAPABILITIES
    stores: ClassVar[dict[str, dict[tuple[object, ...], bytes]]] = {}

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        self._identity = identity
        self.pages = self.stores.setdefault(f"{type(self).__name__}/{config.store}", {})
        self.pools: dict[PoolName, RegisteredPool] = {}
        self.closed = False

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def place(self, pool: RegisteredPool, key: str) -> tuple[object, ...]:
        return (pool.namespace.name, key)

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        self.pages.setdefault(self.place(pool, key), b"".join(page))
        return True

    def there(self, pool: RegisteredPool, key: str) -> bool:
        return self.place(pool, key) in self.pages

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        stored = self.pages.get(self.place(pool, key))
        if stored is None or len(stored) != sum(map(len, page)):
            return False
        start = 0
        for buffer in page:
            buffer[:] = stored[start : start + len(buffer)]
            start += len(buffer)
        return True

    def read(self, request: PoolRequest) -> list[bool]:
        try:
            return self.deliver(request)
        except RuntimeError:
            # The engine's pool failed.
            return [False] * len(request.keys)

    def deliver(self, request: PoolRequest) -> list[bool]:
        targets = request.pool.access.targets(request.slots)
        done = [
            self.take(request.pool, key, page)
            for key, page in zip(request.keys, targets, strict=True)
        ]
        request.pool.access.deliver(request.slots, targets, done)
        return done

    def write(self, request: PoolRequest) -> list[bool]:
        if not self._identity.is_writer(request.pool.name):
            return [self.there(request.pool, key) for key in request.keys]
        try:
            sources = request.pool.access.sources(request.slots)
        except RuntimeError:
            return [False] * len(request.keys)
        return [
            self.put(request.pool, key, page)
            for key, page in zip(request.keys, sources, strict=True)
        ]

    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        return common_hit(kv, pools)

    def doomed(self) -> list[tuple[object, ...]]:
        own = {pool.namespace.name for pool in self.pools.values()}
        return [place for place in list(self.pages) if place[0] in own]

    # The contract
    # ------------------------------------------------------------------------------------------------

    @property
    def identity(self) -> StorageIdentity:
        return self._identity

    @property
    def capabilities(self) -> Capabilities:
        return self.promises

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        name, access = PoolName(host_pool_name), page_access(host_pool)
        self.pools[name] = RegisteredPool(
            name, access, Namespace(self._identity, name, access.geometry)
        )

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        self._check_open()
        check_keys(keys)
        transfers = pool_transfers or ()
        asked = [
            PoolPresence.of(transfer, self._present(transfer.name, keys)) for transfer in transfers
        ]
        return self.fold(self._present(PoolName.KV, keys), asked)

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        self._check_open()
        requests = pool_requests(transfers, self.pools, distinct_slots=True)
        return {name: self.read(request) for name, request in requests.items()}

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        self._check_open()
        requests = pool_requests(transfers, self.pools, distinct_slots=False)
        return {name: self.write(request) for name, request in requests.items()}

    def delete(self, keys: Sequence[str], *, pool: str = PoolName.KV) -> list[bool]:
        if not self.capabilities.deletes:
            return super().delete(keys, pool=pool)
        self._check_open()
        if PoolName(pool) not in self.pools:
            raise UnknownPoolError(f"pool {pool!r} is not registered")
        check_keys(keys)
        registered = self.pools[PoolName(pool)]
        return [self.pages.pop(self.place(registered, key), None) is not None for key in keys]

    def clear(self) -> None:
        if not self.capabilities.clears:
            super().clear()
        self._check_open()
        for place in self.doomed():
            self.pages.pop(place, None)

    def get_stats(self) -> StorageStats:
        return StorageStats(type(self).__name__)

    def health(self) -> Health:
        return Health(ok=not self.closed)

    def open(self) -> None:
        self._check_open()

    def close(self) -> None:
        self.closed = True

    def _check_open(self) -> None:
        if self.closed:
            raise StorageClosedError("closed")

    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        pool = self.pools.get(name)
        return [pool is not None and self.there(pool, key) for key in keys]
