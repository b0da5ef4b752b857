"""Drivers with one planted fault each in what they say to misuse, and in what they log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from control_plain import Plain

from hicache_storage.spec import (
    PoolName,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects.requests import RegisteredPool
    from hicache_storage.spec import PoolTransfer


class SwallowsMisuse(Plain):
    def batch_get_v2(self, transfers: Sequence[PoolTransfer], extra_info: object = None) -> dict[PoolName, list[bool]]:
        try:
            return super().batch_get_v2(transfers)
        except ValueError:
            return {transfer.name: [False] * len(transfer.keys or ()) for transfer in transfers}


class ForeignErrors(Plain):
    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: object = None) -> dict[PoolName, list[bool]]:
        for transfer in transfers:
            self.pools[transfer.name]
        return super().batch_set_v2(transfers)


class WritesBeforeItChecks(Plain):
    def batch_set_v2(self, transfers: Sequence[PoolTransfer], extra_info: object = None) -> dict[PoolName, list[bool]]:
        answer = dict[PoolName, list[bool]]()
        for transfer in transfers:
            for name, done in super().batch_set_v2([transfer]).items():
                answer.setdefault(name, []).extend(done)
        return answer


class LogsMisses(Plain):
    def take(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        done = super().take(pool, key, page)
        if not done:
            logging.getLogger("control").warning("page %s is not there", key)
        return done
