"""Metrics can be switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_conformance.harness.driver_calls import has_steps
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import check
from hicache_storage.layers import StorageOptions, innermost
from hicache_storage.spec import PoolStats

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest


class MetricsCases:
    """OB-2."""

    @covers("OB-2", levels=[Level.BUDGET])
    def test_metrics_can_be_switched_off(self, context: CaseContext) -> None:
        """With metrics off nothing is counted but faults."""
        sut, keys = context.storage(options=StorageOptions(metrics=False)), context.keys(4)
        sut.store(keys)
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
