"""Silent corruption at rest: bytes that change or go missing below a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.fault_calls import (
    UNGUARDED,
    check_hits,
    deadline_on,
    serving_storage,
    set_deadline,
)
from hicache_conformance.harness.corruption import FileCorruption, corrupt_files
from hicache_conformance.harness.page_patterns import Page, short
from hicache_conformance.harness.storage_under_test import check_each
from hicache_conformance.injectors.disk import DiskInjector
from hicache_conformance.injectors.servers import ServerInjector
from hicache_conformance.model.case import covers
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan
from hicache_conformance.model.rules import Level, declares
from hicache_conformance.model.violation import Inconclusive, NotPromised, Violation, check, checked
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from random import Random

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.harness.storage_under_test import StorageUnderTest
    from hicache_conformance.injectors.injector import FaultInjector

FAULTS: Final = (Level.FAULTS,)
PAGES: Final = 6


class BitRotCases:
    """GET-7, EX-9, SET-3 and FT-6 for damage that is done below the driver, not through it."""

    @covers("GET-7", "EX-9", "SET-3", "FT-6", "FT-1", "GET-1", levels=FAULTS)
    @pytest.mark.parametrize(
        "decay", list(FileCorruption), ids=lambda decay: decay.replace(" ", "-")
    )
    def test_stored_bytes_rot(
        self, context: CaseContext, injector: FaultInjector, decay: FileCorruption
    ) -> None:
        """Stored pages rot: none is delivered wrong, none raises, and a set repairs them all.

        None that was found damaged goes on existing.
        """
        sut, keys = serving_storage(context, injector, pages=PAGES)
        context.require_checksums(sut)
        sut = _damaged(context, injector, sut, keys, decay)
        # Two reads: the first may find the damage, and the second shows whether it was remembered.
        # Exists comes before both, since it need not read the bytes (EX-9) but may not raise.
        before = sut.stats().pages_damaged
        sut.exists(keys)
        check_hits(sut, keys, sut.get(keys), f"{injector.name}: {decay}")
        found = sut.get(keys)
        check_hits(sut, keys, found, f"{injector.name}: {decay}")
        # What is lost on its way, or by a server that looks itself, the driver never sees.
        sees = injector.name in ("disk", "objects")
        checked("GET-7")
        if (
            sees
            # Only a flipped byte is told from a page that is gone; a cut file may read as an
            # ordinary miss.
            and decay is FileCorruption.FLIPPED
            and None in found
            and sut.stats().pages_damaged == before
        ):
            raise Violation(
                "GET-7",
                f"stored bytes were changed below the driver, a get answers {found.count(None)} "
                f"misses and counts none as damaged",
            )
        for index, (key, content) in enumerate(zip(keys, found, strict=True)):
            check(
                content is not None or not sut.has(key),
                "EX-9",
                f"a get does not deliver page {index} key {short(key)} ({decay} below the "
                f"driver), and it goes on existing",
            )
        lost = f"was lost ({decay} below the driver), and a set of it answers False"
        check_each(keys, sut.set(keys), "SET-3", lost)
        sut.expect(keys, rule="SET-3")


def _damaged(
    context: CaseContext,
    injector: FaultInjector,
    sut: StorageUnderTest,
    keys: list[str],
    decay: FileCorruption,
) -> StorageUnderTest:
    """The storage, or another one of its identity, over pages that have rotted."""
    if isinstance(injector, ServerInjector):
        with injector.stopped() as directory:
            if not corrupt_files(
                directory, _contents(context, sut, keys), decay, context.chance("rot")
            ):
                raise NotPromised(
                    "its servers keep no page in a file as it is, so that none can be damaged for "
                    "certain"
                )
        return sut
    if not isinstance(injector, DiskInjector):
        # What can rot is what the store keeps: here it is written wrong from the start, and
        # answered as written.
        keys[:] = context.keys(PAGES)
        set_deadline(sut, deadline_on(injector))
        injector.inject(
            FaultPlan(injector.name, (_on_its_way(injector, decay, context.chance("rot")),))
        )
        sut.set(keys)
        injector.heal()
        set_deadline(sut, None)
        return sut
    reopens = declares(context.capabilities, "durability>=reopen")
    # Closed before the files change, because a driver may keep them mapped or in memory and would
    # go on answering from there.
    if reopens:
        sut.call("close", sut.storage.close)
    if not corrupt_files(
        injector.backing, _contents(context, sut, keys), decay, context.chance("rot")
    ):
        raise Inconclusive(
            "no file of the store contains the bytes of a page as they are, so that none can be "
            "damaged for certain"
        )
    if reopens:
        sut = context.storage(sut.identity, options=UNGUARDED)
    return sut


def _contents(context: CaseContext, sut: StorageUnderTest, keys: list[str]) -> list[bytes]:
    memory = sut.memories[PoolName.KV]
    return [
        context.patterns.render(Page(sut.identity, PoolName.KV, key), memory.page_bytes)
        for key in keys
    ]


def _on_its_way(injector: FaultInjector, decay: FileCorruption, random: Random) -> Fault:
    """Corrupt pages on their way as a file corruption corrupts stored ones."""
    flips, objects = decay is FileCorruption.FLIPPED, injector.name == "objects"
    kind = FaultKind.BIT_FLIP if flips else FaultKind.TORN_WRITE if objects else FaultKind.CUT
    return Fault(
        kind=kind,
        operations=("write" if objects else "request",),
        place=round(random.uniform(0.2, 0.95), 4),
    )
