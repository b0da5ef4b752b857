"""Several pools in one storage: each has its own pages, its own geometry and its own answer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicache_conformance.harness.page_patterns import spent
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.harness.storage_under_test import PageGroup
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import check
from hicache_storage.spec import PoolName, PoolTransfer

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.pools import PoolMemory

POOLS = [Level.POOLS]


class PoolCases:
    """GET-1, GET-3 and SET-1 for several pools."""

    @covers("GET-1", "SET-1", levels=POOLS)
    def test_pools_share_keys_and_nothing_else(self, context: CaseContext) -> None:
        """The same keys in four pools, set in one call and read in one call."""
        sut, keys = context.storage(pools=_four_pools()), context.keys(8)
        pools = list(sut.memories)
        sut.store_many([PageGroup(keys, pool) for pool in pools])
        found = sut.get_many([PageGroup(keys, pool) for pool in reversed(pools)])
        for pool in pools:
            sut.compare(keys, found[pool], pool)

    @covers("GET-1", levels=POOLS)
    def test_a_page_exists_in_its_own_pool_only(self, context: CaseContext) -> None:
        """A key that is stored in one pool is a miss in every other."""
        sut = context.storage(pools=_four_pools())
        for pool in sut.memories:
            keys = context.keys(3)
            sut.store(keys, pool)
            for other in sut.memories:
                if other != pool:
                    sut.expect_missing(
                        keys, other, rule="GET-1", why=f"was set in pool {pool!r} only"
                    )

    @covers("GET-3", levels=POOLS)
    def test_each_pool_has_its_own_holes(self, context: CaseContext) -> None:
        """Random holes in each pool and each of several transfers.

        Every answer stands in its place.
        """
        sut = context.storage(pools=_four_pools())
        pools, keys = list(sut.memories), context.keys(12)
        stored = {pool: set(context.random.sample(keys, 6)) for pool in pools}
        sut.store_many([PageGroup(sorted(stored[pool]), pool) for pool in pools])
        for _ in range(10):
            shares = [
                PageGroup(context.random.sample(keys, context.random.randint(0, 5)), pool)
                for pool in pools * 2
            ]
            context.random.shuffle(shares)
            for pool, pages in sut.get_many(shares).items():
                asked = [key for share in shares if share.pool == pool for key in share.keys]
                sut.compare_holed(asked, pages, stored[pool], pool, unset="GET-3")

    @covers("GET-1", "SET-1", levels=POOLS)
    def test_names_of_pools_and_keys_do_not_run_together(self, context: CaseContext) -> None:
        """Pools and keys that would be one text if they were only written one after the other."""
        names = ["a", "a_b", "a_b_c", "b", "x" * 64]
        sut = context.storage(
            pools={
                PoolName.KV: GuardedPool(pages=16),
                **{name: GuardedPool(pages=16) for name in names},
            }
        )
        for pool in names:
            keys = ["b_c", "c", "_b_c", "a", f"{pool}_c", f"{pool}/c", f"c.{pool}"]
            sut.store(keys, pool)
        for pool in names:
            sut.expect(["b_c", "c", "_b_c", "a", f"{pool}_c", f"{pool}/c", f"c.{pool}"], pool)

    @covers("SET-1", levels=POOLS, needs=["deletes"])
    def test_a_delete_is_of_one_pool(self, context: CaseContext) -> None:
        """A key is deleted from one pool, and stays in the others."""
        sut, keys = context.storage(pools=_four_pools()), context.keys(3)
        pools = list(sut.memories)
        sut.store_many([PageGroup(keys, pool) for pool in pools])
        doomed = PoolName.MAMBA
        sut.delete(keys, doomed)
        sut.expect_missing(keys, doomed, rule="SET-1", why="was deleted from this pool")
        for pool in pools:
            if pool != doomed:
                sut.expect(keys, pool)

    @covers("GET-1", "GET-3", "SET-1", levels=POOLS)
    def test_borrowed_indices(self, context: CaseContext) -> None:
        """A transfer without own indices takes the keys and slots of the pool that it names."""
        sut = context.storage(
            pools={PoolName.KV: GuardedPool(), "indexer": GuardedPool(components=(40,))}
        )
        keys, pages = context.keys(4), [9, 2, 30, 5]
        for pool in sut.memories:
            sut.fill(PageGroup(keys, pool), pages)
        indexer = PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV)
        holed = [*context.keys(1), *keys[1:]]
        # In both orders: the one that borrows may come first.
        for name, rule, there, transfers in (
            ("batch_set_v2", "SET-1", [True] * 4, [indexer, _kv(pages, keys)]),
            ("batch_get_v2", "GET-3", [False, True, True, True], [_kv(pages, holed), indexer]),
        ):
            answer = sut.call(name, partial(getattr(sut.storage, name), transfers))
            check(
                answer == {"kv": there, "indexer": there},
                rule,
                f"{name} of kv and of indexer, which borrows kv's indices, answered {answer}",
            )
            for pool, memory in sut.memories.items():
                sut.compare(keys[1:], [memory.read(page) for page in pages[1:]], pool)
                memory.fill(pages, spent(memory.page_bytes))
        for pool in sut.memories:
            sut.expect(keys, pool)

    @covers("GET-1", "SET-1", levels=POOLS)
    def test_pools_that_arrive_later(self, context: CaseContext) -> None:
        """A pool may be registered after the first transfers, and again with other memory."""
        sut, keys = context.storage(), context.keys(4)
        sut.store(keys)
        later = context.with_pool(sut, "draft", GuardedPool(components=(24, 24)))
        later.store(keys, "draft")
        again = context.with_pool(later, PoolName.KV, GuardedPool(pages=8))
        again.expect(keys)
        again.expect(keys, "draft")


def _kv(pages: list[int], keys: list[str]) -> PoolTransfer:
    return PoolTransfer(PoolName.KV, slots_of(pages, 2), keys=keys)


def _four_pools() -> dict[str, PoolMemory]:
    return {
        PoolName.KV: GuardedPool(components=(64, 64)),
        PoolName.MAMBA: GuardedPool(page_size=1, components=(200, 9, 31)),
        PoolName.SWA: GuardedPool(components=(64, 64)),
        PoolName.INDEXER: GuardedPool(components=(33,)),
    }
