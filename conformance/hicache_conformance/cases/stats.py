"""Counters of get_stats(), and their switch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_conformance.harness.driver_calls import has_steps
from hicache_conformance.harness.pools import GuardedPool, PoolMemory
from hicache_conformance.harness.storage_under_test import PageGroup, StorageUnderTest
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import check
from hicache_storage.layers import StorageOptions, innermost
from hicache_storage.spec import PoolName, PoolStats
from hicache_storage.spec.stats import OPERATIONS

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext


class StatsCases:
    """OB-1 and OB-2."""

    @covers("OB-1")
    def test_counters(self, context: CaseContext) -> None:
        """Pages set, read, found and missed, in one transfer and in several."""
        sut, keys, missing = context.storage(), context.keys(5), context.keys(2)
        page_bytes = sut.memories[PoolName.KV].page_bytes
        groups = [PageGroup(keys[:2]), PageGroup(keys[2:3]), PageGroup(keys[3:])]
        sut.store_many(groups)
        _check(sut, pages_written=5, bytes_written=5 * page_bytes, pages_read=0, pages_refused=0)
        sut.exists([*keys[:3], *missing])
        _check(sut, pages_hit=3, pages_absent=2, pages_missed=0, pages_read=0)
        sut.get([*keys[:4], *missing])
        _check(sut, pages_read=4, bytes_read=4 * page_bytes, pages_missed=2, pages_damaged=0)
        sut.get_many(groups)
        _check(sut, pages_read=9, bytes_read=9 * page_bytes, pages_missed=2)
        _check(sut, pages_hit=3, pages_absent=2, pages_written=5)

    @covers("OB-1")
    def test_each_pool_is_counted_by_itself(self, context: CaseContext) -> None:
        """Two pools in one call, with pages of different lengths and different holes."""
        pools: dict[str, PoolMemory] = {
            PoolName.KV: GuardedPool(),
            PoolName.INDEXER: GuardedPool(components=(40,)),
        }
        sut, keys = context.storage(pools=pools), context.keys(4)
        sut.store_many([PageGroup(keys[:3]), PageGroup(keys[:1], PoolName.INDEXER)])
        sut.get_many([PageGroup(keys), PageGroup(keys, PoolName.INDEXER)])
        for pool, stored in ((PoolName.KV, 3), (PoolName.INDEXER, 1)):
            length = pools[pool].page_bytes
            _check(
                sut,
                pool,
                pages_written=stored,
                bytes_written=stored * length,
                pages_read=stored,
                bytes_read=stored * length,
                pages_missed=4 - stored,
            )

    @covers("OB-1")
    def test_latencies(self, context: CaseContext) -> None:
        """Each call is observed once, under its operation and pool."""
        sut, keys = context.storage(), context.keys(2)
        for _ in range(3):
            sut.set(keys)
            sut.get(keys)
            sut.exists(keys)
        for operation in OPERATIONS:
            latency = sut.stats().latency[operation]
            check(
                latency.calls == 3 and sum(latency.buckets) == 3 and latency.seconds >= 0,
                "OB-1",
                f"3 calls of {operation} left latency {latency}",
            )

    @covers("OB-1")
    def test_a_snapshot_stays_what_it_is(self, context: CaseContext) -> None:
        """get_stats() is a copy, is not drained by reading it, and can be asked after close()."""
        sut, keys = context.stored(3)
        first = sut.call("get_stats", sut.storage.get_stats)
        sut.get(keys)
        kept = first.pools[PoolName.KV].pages_read == 0
        check(kept, "OB-1", "a snapshot changed after it was taken")
        sut.call("close", sut.storage.close)
        for _ in range(2):
            _check(sut, pages_written=3, pages_read=3)

    @covers("OB-2", levels=Level.BUDGET)
    def test_metrics_can_be_switched_off(self, context: CaseContext) -> None:
        """With metrics off nothing is counted but faults."""
        sut, keys = context.stored(4, options=StorageOptions(metrics=False))
        sut.expect(keys)
        sut.exists(keys)
        sut.get(context.keys(2))
        _check_silence(sut)
        driver: Any = innermost(sut.storage)
        if has_steps(driver):
            faults = sut.storage.fault_count()
            # On the instance; of a driver that reads from memory, too.
            driver.read_objects = _fails
            driver.read_objects_cached = _fails
            sut.get(keys)
            told = sut.call("get_stats", sut.storage.get_stats).faults
            check(
                told > faults,
                "OB-2",
                f"with metrics off, get_stats() tells {told} faults after {faults} and one more",
            )
            _check_silence(sut)


def _check(sut: StorageUnderTest, pool: str = PoolName.KV, **wanted: int) -> None:
    stats = sut.stats(pool)
    for name, count in wanted.items():
        check(
            getattr(stats, name) == count,
            "OB-1",
            f"{name} of pool {str(pool)!r} is {getattr(stats, name)}, must be {count}",
        )


def _check_silence(sut: StorageUnderTest) -> None:
    counted_pools = sut.call("get_stats", sut.storage.get_stats).pools
    for pool, stats in counted_pools.items():
        check(
            stats == PoolStats(),
            "OB-2",
            f"metrics are off, and get_stats() counts for pool {pool!r}: {stats!r:.300}",
        )


def _fails(*_: object) -> list[list[bool]]:
    raise OSError("the suite lets this read fail")
