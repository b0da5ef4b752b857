"""What metrics cost, and whether they can be switched off."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from hicache_conformance.fixtures.large_batches import BATCH, move, whole_batches
from hicache_conformance.harness.driver_calls import has_steps
from hicache_conformance.harness.timing import least_cpu_seconds, seconds, surely_slower
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Violation
from hicache_storage.layers import StorageOptions, innermost
from hicache_storage.spec import PoolName, PoolStats, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject

PAGE_BYTES: Final = 64 << 10
METRICS_SHARE: Final = 0.02
METRICS_FACTOR: Final = 1.25
"""Whole calls are not compared more finely than this: what is behind the API varies by more than 2% by itself."""
ATTEMPTS: Final = 4
"""How often what looks too dear is measured again before it is held against the driver."""


class MetricsCases:
    """OB-2."""

    @covers("OB-2", levels=[Level.BUDGET])
    def test_metrics_cost_little(self, lab: Lab) -> None:
        """What metrics add to a call is less than 2% of the time to get 128 pages of 64 KiB."""
        counting, silent = (_Loaded(lab, StorageOptions(metrics=metrics)) for metrics in (True, False))
        _check_short_call("exists", _Loaded.exists_few, counting, silent)
        _check_short_call("get", _Loaded.get_few, counting, silent)
        _check_short_call("set", _Loaded.set_few, counting, silent)
        _check_whole_call(counting, silent)

    @covers("OB-2", levels=[Level.BUDGET])
    def test_metrics_can_be_switched_off(self, lab: Lab) -> None:
        """With metrics off nothing is counted but faults."""
        subject, keys = lab.storage(options=StorageOptions(metrics=False)), lab.keys(4)
        subject.store(keys)
        subject.expect(keys)
        subject.exists(keys)
        subject.get(lab.keys(2))
        _check_silence(subject)
        driver: Any = innermost(subject.storage)
        if has_steps(driver):
            faults = subject.storage.fault_count()
            driver.read_objects = _fails  # on the instance
            subject.get(keys)
            told = subject.call("get_stats", subject.storage.get_stats).faults
            if told <= faults:
                raise Violation("OB-2", f"with metrics off, get_stats() tells {told} faults after {faults} and one more")
            _check_silence(subject)


class _Loaded:
    """A storage with 128 pages of 64 KiB, and calls of it that repeat exactly."""

    def __init__(self, lab: Lab, options: StorageOptions) -> None:
        self.subject, (self._transfers, *_) = whole_batches(lab, page_bytes=PAGE_BYTES, batches=1, options=options)
        move(self.subject, "batch_set_v2", self._transfers)
        (whole,) = self._transfers
        assert whole.host_indices is not None
        assert whole.keys is not None
        few = whole.host_indices[: 8 * len(whole.host_indices) // BATCH]
        self._missing = lab.keys(8)
        self._misses = [PoolTransfer(PoolName.KV, few, keys=self._missing)]
        self._stored = [PoolTransfer(PoolName.KV, few, keys=whole.keys[:8])]

    def exists_few(self) -> None:
        """A short call."""
        self.subject.storage.batch_exists_v2(self._missing)

    def get_few(self) -> None:
        """A short call, of pages that are not there."""
        self.subject.storage.batch_get_v2(self._misses)

    def set_few(self) -> None:
        """A short call, of pages that are there already."""
        self.subject.storage.batch_set_v2(self._stored)

    def get(self) -> None:
        """The call that the cost of metrics is measured against."""
        move(self.subject, "batch_get_v2", self._transfers)


def _check_short_call(name: str, short_call: Callable[[_Loaded], None], counting: _Loaded, silent: _Loaded) -> None:
    """Compare in CPU time what metrics add to a call that does little else with the time of a whole batch."""
    told = ""
    for _ in range(ATTEMPTS):
        dear, cheap = least_cpu_seconds(lambda: short_call(counting), lambda: short_call(silent), repeat=20)
        added, whole = dear - cheap, min(seconds(silent.get)[0])
        if added <= METRICS_SHARE * whole:
            return
        told = f"metrics add {added * 1e6:.0f} us to a short {name}: {added / whole:.1%} of the {whole * 1e3:.2f} ms"
    raise Violation("OB-2", f"{told} that a get of {BATCH} pages of {PAGE_BYTES >> 10} KiB takes")


def _check_whole_call(counting: _Loaded, silent: _Loaded) -> None:
    """Compare whole batches, where metrics may do something to each page."""
    factor = 0.0
    for _ in range(ATTEMPTS):
        factor = surely_slower(*seconds(counting.get, silent.get))
        if factor <= METRICS_FACTOR:
            return
    raise Violation(
        "OB-2", f"a get of {BATCH} pages of {PAGE_BYTES >> 10} KiB takes {factor:.2f} times as long with metrics as without"
    )


def _check_silence(subject: Subject) -> None:
    counted_pools = subject.call("get_stats", subject.storage.get_stats).pools
    for pool, stats in counted_pools.items():
        if stats != PoolStats():
            raise Violation("OB-2", f"metrics are off, and get_stats() counts for pool {pool!r}: {stats!r:.300}")


def _fails(*_: object) -> list[list[bool]]:
    raise OSError("the suite lets this read fail")
