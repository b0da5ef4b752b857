"""Transient memory of calls."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.large_batches import BATCH, large_batches, move
from hicache_conformance.harness.memory_peak import transient_bytes
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import NotPromised, Violation, checked
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest

PAGE_BYTES: Final = 256 << 10
MAX_PAGES: Final = BATCH // 4
CALLS: Final = 3


class StagingCases:
    """BU-2."""

    @covers("BU-2", levels=[Level.BUDGET])
    def test_reads_are_not_staged(self, context: CaseContext) -> None:
        """A get of 128 pages of 256 KiB needs memory for a quarter of them at most.

        Once it has warmed up.
        """
        _check_that_pages_stay_here(context)
        sut, (transfers, *_) = large_batches(context, page_bytes=PAGE_BYTES, batches=1)
        move(sut, "batch_set_v2", transfers)
        _check_memory("get", sut, [lambda: move(sut, "batch_get_v2", transfers)] * CALLS)

    @covers("BU-2", levels=[Level.BUDGET])
    def test_writes_are_not_staged(self, context: CaseContext) -> None:
        """A set of 128 pages of 256 KiB needs memory for a quarter of them at most.

        Beside what the store keeps.
        """
        _check_that_pages_stay_here(context)
        sut, batches = large_batches(context, page_bytes=PAGE_BYTES, batches=CALLS)
        _check_memory(
            "set", sut, [partial(move, sut, "batch_set_v2", transfers) for transfers in batches]
        )


def _check_that_pages_stay_here(context: CaseContext) -> None:
    if context.capabilities.networked:
        raise NotPromised("the driver is networked: its messages take memory of their own")


def _check_memory(
    operation: str, sut: StorageUnderTest, calls: Sequence[Callable[[], None]]
) -> None:
    page_bytes = sut.memories[PoolName.KV].page_bytes
    needed = transient_bytes(calls) / page_bytes
    checked("BU-2")
    if needed > MAX_PAGES:
        told = f"memory for {needed:.0f} pages of {page_bytes >> 10} KiB while it ran"
        raise Violation(
            "BU-2", f"a {operation} of {BATCH} pages took {told}, must be {MAX_PAGES} at most"
        )
