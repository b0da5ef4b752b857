"""Several pools in one storage: each has its own pages, its own geometry and its own answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.harness.storage_under_test import Share
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_storage.spec import PoolName, PoolTransfer

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.pools import PoolMemory
    from hicache_conformance.harness.storage_under_test import Subject

POOLS = [Level.POOLS]


class PoolCases:
    """GET-1, GET-3 and SET-1 for several pools."""

    @covers("GET-1", "SET-1", levels=POOLS)
    def test_pools_share_keys_and_nothing_else(self, lab: Lab) -> None:
        """The same keys in four pools, set in one call and read in one call."""
        subject, keys = lab.storage(pools=_four_pools()), lab.keys(8)
        pools = list(subject.memories)
        subject.store_many([Share(keys, pool) for pool in pools])
        found = subject.get_many([Share(keys, pool) for pool in reversed(pools)])
        for pool in pools:
            subject.compare(keys, found[pool], pool)

    @covers("GET-1", levels=POOLS)
    def test_a_page_exists_in_its_own_pool_only(self, lab: Lab) -> None:
        """A key that is stored in one pool is a miss in every other."""
        subject = lab.storage(pools=_four_pools())
        for pool in subject.memories:
            keys = lab.keys(3)
            subject.store(keys, pool)
            for other in subject.memories:
                if other != pool:
                    subject.expect_missing(keys, other, rule="GET-1", why=f"was set in pool {pool!r} only")

    @covers("GET-3", levels=POOLS)
    def test_each_pool_has_its_own_holes(self, lab: Lab) -> None:
        """Random holes in each pool and each of several transfers; every answer stands in its place."""
        subject = lab.storage(pools=_four_pools())
        pools, keys = list(subject.memories), lab.keys(12)
        stored = {pool: set(lab.random.sample(keys, 6)) for pool in pools}
        subject.store_many([Share(sorted(stored[pool]), pool) for pool in pools])
        for _ in range(10):
            shares = [Share(lab.random.sample(keys, lab.random.randint(0, 5)), pool) for pool in pools * 2]
            lab.random.shuffle(shares)
            _check_holes(subject, shares, stored)

    @covers("GET-1", "SET-1", levels=POOLS)
    def test_names_of_pools_and_keys_do_not_run_together(self, lab: Lab) -> None:
        """Pools and keys that would be one text if they were only written one after the other."""
        names = ["a", "a_b", "a_b_c", "b", "x" * 64]
        subject = lab.storage(pools={PoolName.KV: GuardedPool(pages=16), **{name: GuardedPool(pages=16) for name in names}})
        for pool in names:
            keys = ["b_c", "c", "_b_c", "a", f"{pool}_c", f"{pool}/c", f"c.{pool}"]
            subject.store(keys, pool)
        for pool in names:
            subject.expect(["b_c", "c", "_b_c", "a", f"{pool}_c", f"{pool}/c", f"c.{pool}"], pool)

    @covers("GET-1", "SET-1", levels=POOLS)
    def test_borrowed_indices(self, lab: Lab) -> None:
        """A transfer without indices of its own takes the keys and slots of the pool that it names."""
        subject = lab.storage(pools={PoolName.KV: GuardedPool(), "indexer": GuardedPool(components=(40,))})
        keys, pages = lab.keys(4), [9, 2, 30, 5]
        for pool in ("kv", "indexer"):
            subject.fill(Share(keys, pool), pages)
        transfers = [
            PoolTransfer(PoolName.INDEXER, indices_from_pool=PoolName.KV),
            PoolTransfer(PoolName.KV, slots_of(pages, 2), keys=keys),
        ]
        answer = subject.call("batch_set_v2", lambda: subject.storage.batch_set_v2(transfers))
        if answer != {"kv": [True] * 4, "indexer": [True] * 4}:
            raise Violation("SET-1", f"a set of kv and of indexer, which borrows kv's indices, answered {answer}")
        for pool in ("kv", "indexer"):
            subject.expect(keys, pool)

    @covers("GET-1", "SET-1", levels=POOLS)
    def test_pools_that_arrive_later(self, lab: Lab) -> None:
        """A pool may be registered after the first transfers, and registered again with other memory."""
        subject, keys = lab.storage(), lab.keys(4)
        subject.store(keys)
        later = lab.with_pool(subject, "draft", GuardedPool(components=(24, 24)))
        later.store(keys, "draft")
        again = lab.with_pool(later, PoolName.KV, GuardedPool(pages=8))
        again.expect(keys)
        again.expect(keys, "draft")


def _four_pools() -> dict[str, PoolMemory]:
    return {
        PoolName.KV: GuardedPool(components=(64, 64)),
        PoolName.MAMBA: GuardedPool(page_size=1, components=(200, 9, 31)),
        PoolName.SWA: GuardedPool(components=(64, 64)),
        PoolName.INDEXER: GuardedPool(components=(33,)),
    }


def _check_holes(subject: Subject, shares: list[Share], stored: dict[str, set[str]]) -> None:
    found = subject.get_many(shares)
    for pool, pages in found.items():
        keys = [key for share in shares if share.pool == pool for key in share.keys]
        for index, (key, content) in enumerate(zip(keys, pages, strict=True)):
            if content is not None and key not in stored[pool]:
                held = subject.explain(key, content, pool)
                raise Violation(
                    "GET-3", f"page {index} key {short(key)} of pool {pool!r} was never set, and a get delivers it: {held}"
                )
        present = [index for index, key in enumerate(keys) if key in stored[pool]]
        subject.compare([keys[index] for index in present], [pages[index] for index in present], pool, rule="GET-3")
