"""Metrics: their cost, and switching them off."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.fixtures.large_batches import BATCH, large_batches, move
from hicache_conformance.harness.driver_calls import has_steps
from hicache_conformance.harness.timing import min_cpu_seconds, seconds, significantly_slower
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Inconclusive, Violation, check, checked
from hicache_storage.layers import StorageOptions, innermost
from hicache_storage.spec import PoolName, PoolStats, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest

PAGE_BYTES: Final = 64 << 10
METRICS_SHARE: Final = 0.02
METRICS_FACTOR: Final = 1.25
"""Whole calls are not compared more finely than this: what is behind the API varies by more than 2%
by itself."""
STORAGES: Final = 2
"""Storages with metrics, and as many without. One may be slower than another of its kind for as
long as it lives (where its memory lies, which core its threads are on), so metrics are blamed only
where every storage with them is slower than every one without."""
ATTEMPTS: Final = 4
"""How often what looks too dear is measured again before it is held against the driver."""


class MetricsCases:
    """OB-2."""

    @covers("OB-2", levels=[Level.BUDGET])
    def test_metrics_cost_little(self, context: CaseContext) -> None:
        """Metrics add less than 2% of the time to get 128 pages of 64 KiB to a call."""
        counting, silent = (
            [_Loaded(context, StorageOptions(metrics=metrics)) for _ in range(STORAGES)]
            for metrics in (True, False)
        )
        _check_short_call("exists", _Loaded.exists_few, counting, silent)
        _check_short_call("get", _Loaded.get_few, counting, silent)
        _check_short_call("set", _Loaded.set_few, counting, silent)
        _check_whole_call(counting, silent)

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


class _Loaded:
    """A storage with 128 pages of 64 KiB, and calls of it that repeat exactly."""

    def __init__(self, context: CaseContext, options: StorageOptions) -> None:
        sut, (transfers, *_) = large_batches(
            context, page_bytes=PAGE_BYTES, batches=1, options=options
        )
        self.sut = sut
        self._transfers = transfers
        move(self.sut, "batch_set_v2", self._transfers)
        (whole,) = self._transfers
        assert whole.host_indices is not None
        assert whole.keys is not None
        few = whole.host_indices[: 8 * len(whole.host_indices) // BATCH]
        self._missing = context.keys(8)
        self._misses = [PoolTransfer(PoolName.KV, few, keys=self._missing)]
        self._stored = [PoolTransfer(PoolName.KV, few, keys=whole.keys[:8])]

    def exists_few(self) -> None:
        """A short call."""
        self.sut.storage.batch_exists_v2(self._missing)

    def get_few(self) -> None:
        """A short call, of pages that are not there."""
        self.sut.storage.batch_get_v2(self._misses)

    def set_few(self) -> None:
        """A short call, of pages that are there already."""
        self.sut.storage.batch_set_v2(self._stored)

    def get(self) -> None:
        """The call that the cost of metrics is measured against."""
        move(self.sut, "batch_get_v2", self._transfers)


def _check_short_call(
    name: str,
    short_call: Callable[[_Loaded], None],
    counting: Sequence[_Loaded],
    silent: Sequence[_Loaded],
) -> None:
    """Compare what metrics add to a short call with the time of a whole batch.

    Both in CPU time.
    """
    checked("OB-2")
    told = ""
    for _ in range(ATTEMPTS):
        taken = min_cpu_seconds(*[partial(short_call, loaded) for loaded in (*counting, *silent)])
        added = min(taken[:STORAGES]) - max(taken[STORAGES:])
        whole = min(seconds(silent[0].get)[0])
        if added <= METRICS_SHARE * whole:
            return
        told = f"metrics add {added * 1e6:.0f} us to a short {name}: {added / whole:.1%} of the {whole * 1e3:.2f} ms"
    raise Violation("OB-2", f"{told} that a get of {BATCH} pages of {PAGE_BYTES >> 10} KiB takes")


def _check_whole_call(counting: Sequence[_Loaded], silent: Sequence[_Loaded]) -> None:
    """Compare whole batches, where metrics may do something to each page."""
    checked("OB-2")
    factor = 0.0
    for _ in range(ATTEMPTS):
        taken = seconds(*[loaded.get for loaded in (*counting, *silent)])
        factor = min(
            significantly_slower(slow, fast)
            for slow in taken[:STORAGES]
            for fast in taken[STORAGES:]
        )
        if factor <= METRICS_FACTOR:
            return
    told = (
        f"a get of {BATCH} pages of {PAGE_BYTES >> 10} KiB takes {factor:.2f} times as long with "
        f"metrics as without"
    )
    # Other processes lengthen a call, but do not make it compute more.
    computing = min_cpu_seconds(*[loaded.get for loaded in (*counting, *silent)])
    if min(computing[:STORAGES]) <= METRICS_FACTOR * max(computing[STORAGES:]):
        raise Inconclusive(f"{told}, and no more CPU time: the machine may be busy")
    raise Violation("OB-2", told)


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
