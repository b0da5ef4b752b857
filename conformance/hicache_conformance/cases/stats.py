"""What get_stats() counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.model.case import covers
from hicache_conformance.model.violation import Violation
from hicache_storage.spec import PoolName
from hicache_storage.spec.stats import OPERATIONS

if TYPE_CHECKING:
    from hicache_conformance.fixtures.context import Lab
    from hicache_conformance.harness.storage_under_test import Subject


class StatsCases:
    """OB-1."""

    @covers("OB-1")
    def test_counters(self, lab: Lab) -> None:
        """Pages and bytes set, read, found and missed are counted, no more and no fewer."""
        subject, keys, missing = lab.storage(), lab.keys(5), lab.keys(2)
        page_bytes = subject.memories[PoolName.KV].page_bytes
        subject.store(keys)
        _check(subject, pages_written=5, bytes_written=5 * page_bytes, pages_read=0, pages_refused=0)
        subject.exists(keys[:3])
        _check(subject, pages_hit=3, pages_read=0)
        subject.get([*keys[:4], *missing])
        _check(subject, pages_read=4, bytes_read=4 * page_bytes, pages_missed=2, pages_damaged=0, pages_written=5)

    @covers("OB-1")
    def test_latencies(self, lab: Lab) -> None:
        """Each call is observed once, under its operation and pool."""
        subject, keys = lab.storage(), lab.keys(2)
        for _ in range(3):
            subject.set(keys)
            subject.get(keys)
            subject.exists(keys)
        for operation in OPERATIONS:
            latency = subject.stats().latency[operation]
            if latency.calls != 3 or sum(latency.buckets) != 3 or latency.seconds < 0:
                raise Violation("OB-1", f"3 calls of {operation} left latency {latency}")

    @covers("OB-1")
    def test_a_snapshot_stays_what_it_is(self, lab: Lab) -> None:
        """get_stats() is a copy, is not drained by reading it, and can be asked after close()."""
        subject, keys = lab.storage(), lab.keys(3)
        subject.store(keys)
        first = subject.call("get_stats", subject.storage.get_stats)
        subject.get(keys)
        if first.pools[PoolName.KV].pages_read != 0:
            raise Violation("OB-1", "a snapshot changed after it was taken")
        subject.call("close", subject.storage.close)
        _check(subject, pages_written=3, pages_read=3)
        _check(subject, pages_written=3, pages_read=3)


def _check(subject: Subject, **wanted: int) -> None:
    stats = subject.stats()
    for name, count in wanted.items():
        if getattr(stats, name) != count:
            raise Violation("OB-1", f"{name} of pool 'kv' is {getattr(stats, name)}, must be {count}")
