"""Several processes that use the same few keys.

Every page read is whole, and was written by one of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.fixtures.process_group import ProcessGroup
from hicache_conformance.harness.disk_usage import DiskUsage
from hicache_conformance.harness.page_patterns import short
from hicache_conformance.harness.pools import PoolShape
from hicache_conformance.history.checker import AnomalyKind
from hicache_conformance.history.events import Call
from hicache_conformance.model.case import covers
from hicache_conformance.model.rules import Level
from hicache_conformance.model.violation import check
from hicache_conformance.processes.worker import KillSchedule
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_conformance.fixtures.context import CaseContext
    from hicache_conformance.history.events import Event
    from hicache_conformance.processes.worker import WorkerProcess

SHARED: Final = [Level.SHARED]
BETWEEN_PROCESSES: Final = ("sharing>=processes",)
LONG: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=24, components=(10_000, 14_000))
}
"""Long enough for a page to be seen half written."""
SMALL: Final[Mapping[str, PoolShape]] = {
    PoolName.KV: PoolShape(pages=32, components=(300, 500)),
    PoolName.MAMBA: PoolShape(pages=32, page_size=1, components=(200, 100)),
}
PROCESSES: Final = 3
RACES: Final = 12
MAX_RACES: Final = 48
RACED_PAGES: Final = 32
"""Pages that all writers set at the same moment, until which races go on. On a busy machine writers
miss each other in most races, and such a race shows nothing."""
ACT_CALLS: Final = 20
"""Calls of each thread until all go on to fresh keys; a page soon exists, and then nothing happens
to it any more."""


class ProcessCases:
    """SET-2, SET-4 and CC-2."""

    @covers("SET-2", levels=SHARED, needs=BETWEEN_PROCESSES)
    def test_writers_are_killed(self, context: CaseContext) -> None:
        """A writer is killed at a random instant, again and again.

        Others read what it writes meanwhile, and then set it anew.
        """
        group, random = ProcessGroup(context, LONG), context.chance("strikes")
        readers = [group.worker(f"reader{number}") for number in range(2)]
        for kill in range(context.profile.kills):
            writer, keys = group.worker(f"writer{kill}"), group.new_keys(24)
            works = {
                reader: group.work(keys, {Call.GET: 3, Call.EXISTS: 1}, calls=30, max_keys=4)
                for reader in readers
            }
            works[writer] = group.work(keys, {Call.SET: 1}, calls=24, max_keys=4)
            # Among the first calls, most of whose pages are new: a writer leaves those alone that
            # are there. Not in the very first one, at the beginning of which nothing is written.
            group.run(works, {writer: KillSchedule(random.randint(3, 5), random.random())})
            for reader in readers:
                group.expect_agreement(reader, keys, "SET-2")
            group.store(readers[kill % 2], keys, "SET-2")
            for reader in readers:
                reader.expect_delivered(keys, "SET-2", "anew after a kill")
        # Nobody removes pages here: one that was lost was spoilt by a writer that was killed or
        # came second.
        group.judge("SET-2", rules={AnomalyKind.REWRITTEN: "SET-3"})
        group.expect_sound("SET-2")

    @covers("SET-4", levels=SHARED, needs=BETWEEN_PROCESSES)
    def test_writers_race(self, context: CaseContext) -> None:
        """Three processes set the same new keys at the same time, each its own bytes.

        Where a store is a directory, it does not grow.
        """
        group = ProcessGroup(context, {PoolName.KV: PoolShape(pages=24, components=(3_000, 5_000))})
        workers = [group.worker(f"writer{number}") for number in range(PROCESSES)]
        usage, raced = _Usage(context, workers[0]), 0
        for race in range(MAX_RACES):
            if race >= RACES and raced >= RACED_PAGES:
                break
            keys = group.new_keys(4) if race == 0 or not usage.empties else group.keys
            at = group.soon()
            group.run(
                {
                    worker: group.work(keys, {Call.SET: 2, Call.GET: 1}, calls=6, max_keys=4, at=at)
                    for worker in workers
                }
            )
            for worker in workers:
                group.expect_agreement(worker, keys, "SET-4")
            _expect_somebody_won(group, workers[0], keys, since=at)
            raced += _raced(group.sets(since=at), keys)
            usage.measure(len(keys) * 8_000)
        # A page that was lost where writers met was lost by their meeting.
        group.judge("SET-4", rules={AnomalyKind.REWRITTEN: "SET-3"})
        group.expect_sound("SET-4")
        usage.judge("SET-4", max_at_a_time=PROCESSES * 4 * 8_000)

    @covers("CC-2", levels=SHARED, needs=BETWEEN_PROCESSES)
    def test_histories_of_processes(self, context: CaseContext) -> None:
        """Three processes of three threads set, read and look up the same keys of two pools."""
        _run_steps(context, {Call.SET: 3, Call.GET: 4, Call.EXISTS: 2})

    @covers("CC-2", levels=SHARED, needs=(*BETWEEN_PROCESSES, "deletes"))
    def test_histories_with_deletes(self, context: CaseContext) -> None:
        """The same, with deletes."""
        _run_steps(context, {Call.SET: 4, Call.GET: 4, Call.EXISTS: 1, Call.DELETE: 2})

    @covers("CC-2", levels=SHARED, needs=(*BETWEEN_PROCESSES, "clears"))
    def test_histories_with_clears(self, context: CaseContext) -> None:
        """The same, with clears."""
        _run_steps(context, {Call.SET: 9, Call.GET: 9, Call.EXISTS: 2, Call.CLEAR: 1})


def _run_steps(context: CaseContext, mix: Mapping[Call, int]) -> None:
    group = ProcessGroup(context, SMALL)
    workers = [group.worker(f"p{number}") for number in range(PROCESSES)]
    for _ in range(max(1, context.profile.process_calls // ACT_CALLS)):
        keys, at = group.new_keys(6), group.soon()
        group.run(
            {
                worker: group.work(keys, mix, calls=ACT_CALLS, clients=3, max_keys=4, at=at)
                for worker in workers
            }
        )
    group.judge("CC-2")
    group.expect_sound("CC-2")


def _expect_somebody_won(
    group: ProcessGroup, worker: WorkerProcess, keys: list[str], since: int
) -> None:
    """Every page that somebody has tried to set since then is there."""
    tried = {key for event in group.sets(since) for key in event.keys}
    for index, (key, found) in enumerate(zip(keys, worker.get(keys), strict=True)):
        check(
            key not in tried or found is not None,
            "SET-4",
            f"page {index} key {short(key)} was set by several processes at the same time, and "
            f"none of their pages is there",
        )


def _raced(sets: Sequence[Event], keys: Sequence[str]) -> int:
    """Count the keys that all processes were setting at the same moment."""
    by_key = {key: [event for event in sets if key in event.keys] for key in keys}
    return sum(
        any(
            sum(other.is_running(event.began_at) for other in rivals) == PROCESSES
            for event in rivals
        )
        for rivals in by_key.values()
    )


class _Usage:
    """Disk usage of a store after each race; emptied in between where the driver can."""

    def __init__(self, context: CaseContext, worker: WorkerProcess) -> None:
        self._context = context
        self._worker = worker
        self.empties = context.capabilities.clears
        self._sizes = list[int]()
        self._payload = 0

    def measure(self, payload: int) -> None:
        """Look, after a race over so many bytes."""
        if self.empties:
            self._worker.clear()
        footprint = DiskUsage.of(self._context.config, self._context.tmp)
        if footprint is not None:
            self._sizes.append(footprint.bytes)
            self._payload += 0 if self.empties else payload

    def judge(self, rule: str, *, max_at_a_time: int) -> None:
        """Compare the first race with the last.

        Args:
            rule: broken where the store has grown.
            max_at_a_time: bytes that one race may leave for a while.

        Raises:
            Violation: the store has grown by more than it was given, twice.
        """
        grown = self._sizes[-1] - self._sizes[0] if self._sizes else 0
        check(
            grown <= 2 * self._payload + max_at_a_time,
            rule,
            f"{len(self._sizes)} races of {PROCESSES} writers for the same pages made the "
            f"store grow by {grown} bytes; "
            f"its pages take {self._payload}",
        )
