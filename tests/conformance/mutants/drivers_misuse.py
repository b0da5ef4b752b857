"""Drivers with one planted fault each in what they say to misuse, and in what they log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from drivers_plain import Plain, PlainConfig

from hicache_storage.spec import (
    PoolName,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects.requests import RegisteredPool
    from hicache_storage.spec import (
        HiCacheStorageExtraInfo,
        PoolTransfer,
        PoolTransferResult,
        StorageIdentity,
    )


class SwallowsMisuse(Plain):
    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[PoolName, list[bool]]:
        try:
            return super().batch_get_v2(transfers)
        except ValueError:
            return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class ForeignErrors(Plain):
    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[PoolName, list[bool]]:
        for transfer in transfers:
            self.pools[transfer.name]
        return super().batch_set_v2(transfers)


class WritesBeforeItChecks(Plain):
    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: object = None
    ) -> dict[PoolName, list[bool]]:
        answer = dict[PoolName, list[bool]]()
        for transfer in transfers:
            for name, done in super().batch_set_v2([transfer]).items():
                answer.setdefault(name, []).extend(done)
        return answer


class CountsMisuse(Plain):
    """Takes five calls in a row that were refused for a store that does not work."""

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.row = 0

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        self.row += 1
        found = super().batch_exists_v2(keys, pool_transfers, extra_info)
        self.row = 0
        return found

    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        return self.row < 5 and super().take(pool, key, page)


class LogsMisses(Plain):
    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        done = super().take(pool, key, page)
        if not done:
            logging.getLogger("sample").warning("page %s is not there", key)
        return done
