"""Drivers with one planted fault each in how they fold what is there into a hit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from drivers_plain import Plain

from hicache_storage.spec import (
    PoolHitPolicy,
    PoolName,
    PoolPresence,
    PoolTransferResult,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


class MinimumOfMaxima(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        right = super().fold(kv, pools)
        hit = min(right.extra_pool_hit_pages.values())
        return PoolTransferResult(hit, right.extra_pool_hit_pages, list(range(1, hit + 1)))


class TrailingAsAll(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        changed = [
            replace(pool, hit_policy=PoolHitPolicy.ALL_PAGES)
            if pool.hit_policy is PoolHitPolicy.TRAILING_PAGES
            else pool
            for pool in pools
        ]
        return super().fold(kv, changed)


class GroupsDecide(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        right = super().fold(kv, pools)
        bounds = [
            right.extra_pool_hit_pages[pool.name]
            for pool in pools
            if pool.hit_policy is PoolHitPolicy.BLOCK_GROUPS
        ]
        listed = [
            endpoint
            for endpoint in right.restorable_prefix_pages
            if endpoint <= min(bounds, default=1 << 30)
        ]
        return PoolTransferResult(listed[-1] if listed else 0, right.extra_pool_hit_pages, listed)


class NoList(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        right = super().fold(kv, pools)
        return replace(right, restorable_prefix_pages=right.restorable_prefix_pages[-1:])


class OmitsPools(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        right = super().fold(kv, pools)
        return replace(
            right,
            extra_pool_hit_pages={
                pool: hit for pool, hit in right.extra_pool_hit_pages.items() if hit
            },
        )


class CountsGapsAway(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        return super().fold([True] * sum(kv) + [False] * (len(kv) - sum(kv)), pools)


class RaisesOnUnknownPools(Plain):
    def _present(self, name: PoolName, keys: Sequence[str]) -> list[bool]:
        return [self.there(self.pools[name], key) for key in keys]


class FailsWithoutKeys(Plain):
    def fold(self, kv: Sequence[bool], pools: Sequence[PoolPresence]) -> PoolTransferResult:
        if not kv:
            raise ValueError("no keys")
        return super().fold(kv, pools)
