"""Eviction with several processes on one full store."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import pytest

from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.fixtures.small_store import BATCH, COMPONENTS, PAGE_BYTES, capacity_of
from hicache_conformance.harness.disk_usage import DiskUsage
from hicache_conformance.harness.pools import PoolShape
from hicache_conformance.history.events import Call
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import Inconclusive, Violation, check, checked
from hicache_conformance.processes.worker import KillSchedule
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.processes.worker import WorkerProcess

FAULTS: Final = (Level.FAULTS,)
POOLS: Final[Mapping[str, PoolShape]] = {PoolName.KV: PoolShape(pages=48, components=COMPONENTS)}
KILLS: Final = 8
"""Writers that are killed in a call; between calls nothing is left that a driver could forget."""
MAX_WRITERS: Final = 3 * KILLS
"""Writers that are tried for it: where calls are over at once, most kills fall between them."""
YEAR_SECONDS: Final = 365 * 86_400.0


class EvictionProcessCases:
    """EV-1, EV-2 and EV-4, between processes."""

    @covers("EV-1", levels=FAULTS, needs=["evicts", "sharing>=processes"])
    def test_leftovers_of_killed_writers(self, context: CaseContext) -> None:
        """Files that killed writers have left are counted and removed.

        A full store takes no more room than before, and holds as much.
        """
        pages, random = 24, context.chance("strikes")
        config = context.capped(capacity_of(pages))
        group = ProcessGroup(context, POOLS, config=config)
        survivor = group.worker("survivor")
        held_before, taken_before = (
            _refill(group, survivor, pages),
            DiskUsage.of(config, context.tmp),
        )
        kills = writers = 0
        while kills < KILLS and writers < MAX_WRITERS:
            writer = group.worker(f"writer{writers}")
            work = group.work(group.new_keys(3 * pages), {Call.SET: 1}, calls=8, max_keys=2 * BATCH)
            # Not in the second call: one call tells nothing yet of how long they take, and the kill
            # would fall at its very beginning, where nothing is written.
            group.run({writer: work}, {writer: KillSchedule(random.randint(3, 4), random.random())})
            kills += writer.recorder.running() is not None
            writers += 1
        if not kills:
            raise Inconclusive(
                f"none of {writers} writers was killed in a call: all their calls were over before"
            )
        held_after = _refill(group, survivor, pages)
        # What a killed writer had reserved is free when its lease has ended, not at once.
        deadline = time.monotonic() + context.profile.recovery_seconds
        while held_after < held_before - BATCH and time.monotonic() < deadline:
            held_after = _refill(group, survivor, pages)
        taken_after = DiskUsage.of(config, context.tmp)
        scenario = (
            f"{kills} writers were killed in the middle of writing to a full store of {pages} "
            "pages; then it was filled again"
        )
        check(
            held_after >= held_before - BATCH,
            "EV-1",
            f"{scenario}: it held {held_before} pages before, and holds {held_after} now",
        )
        checked("EV-1")
        if (
            taken_before
            and taken_after
            # Each writer may keep something of its own, such as a log of its changes.
            and taken_after.bytes > taken_before.bytes + (BATCH + writers / 2) * PAGE_BYTES
        ):
            raise Violation(
                "EV-1",
                f"{scenario}: it took {taken_before.bytes} bytes before, and takes "
                f"{taken_after.bytes} now; the capacity is {capacity_of(pages)}",
            )
        group.judge("EV-2", keeps=False)

    @covers("EV-2", "CC-2", levels=FAULTS, needs=["evicts", "sharing>=processes"])
    def test_processes_push_each_other_s_pages_out(self, context: CaseContext) -> None:
        """Several processes look up, read and write in a store that is always full.

        None of them reads what took a page's place.
        """
        group = ProcessGroup(context, POOLS, config=context.capped(capacity_of(16)))
        keys, mix = group.new_keys(48), {Call.SET: 3, Call.GET: 3, Call.EXISTS: 1}
        group.run(
            {
                group.worker(name): group.work(
                    keys,
                    mix,
                    calls=context.profile.process_calls // 2,
                    clients=2,
                    max_keys=BATCH,
                    at=group.soon(),
                )
                for name in ("one", "two", "three")
            }
        )
        group.judge("EV-2", keeps=False)

    @covers("EV-4", levels=FAULTS, needs=["evicts", "sharing>=processes"])
    @pytest.mark.parametrize("clock", [YEAR_SECONDS, -YEAR_SECONDS], ids=["ahead", "behind"])
    def test_clocks_a_year_apart(self, context: CaseContext, clock: float) -> None:
        """Two processes whose clocks are a year apart fill a store in turn: the oldest pages go.

        Whichever of them set them.
        """
        pages = 24
        group = ProcessGroup(context, POOLS, config=context.capped(capacity_of(pages)))
        here, there = group.worker("here"), group.worker("there", clock=clock)
        # The process with the later clock writes first: by wall-clock time its pages are the newer
        # ones, and a driver that trusts it evicts the other's.
        first, second = (there, here) if clock > 0 else (here, there)
        old, new = group.new_keys(pages // 2), group.new_keys(pages)
        _fill(group, first, old)
        _fill(group, second, new)
        left = sum(found is not None for found in here.get(old))
        gone = sum(found is None for found in here.get(new))
        # What one call has written may go together.
        check(
            left <= BATCH or gone <= BATCH,
            "EV-4",
            f"in a store of {pages} pages, process {first.name} set {len(old)} pages and then "
            f"process {second.name} {len(new)}; "
            f"the clock of one is a year {'ahead' if clock > 0 else 'behind'}: {gone} of the "
            f"newer pages are gone, while {left} of "
            "the older ones are there, which nobody has used since",
        )


def _fill(group: ProcessGroup, worker: WorkerProcess, keys: Sequence[str]) -> None:
    for start in range(0, len(keys), BATCH):
        worker.set(keys[start : start + BATCH], group.value())


def _refill(group: ProcessGroup, worker: WorkerProcess, pages: int) -> int:
    """Write twice as many pages as fit; how many of them are there then."""
    keys = group.new_keys(2 * pages)
    _fill(group, worker, keys)
    return sum(found is not None for found in worker.get(keys))
