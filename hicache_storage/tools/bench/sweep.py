"""Runs a sweep: cell by cell, contenders in turn, round by round."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.bench.crew import assemble
from hicache_storage.tools.bench.results import Measure, Report, Subject, this_machine
from hicache_storage.tools.bench.room import check_room
from hicache_storage.tools.bench.settings import Operation
from hicache_storage.tools.options import redacted

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.tools.bench.crew import Crew
    from hicache_storage.tools.bench.settings import Cell, Sweep

ROUNDS: Final = 5
"""As many a cell is meant to have; slow stores have fewer, at least one."""


def run_sweep(sweep: Sweep, progress: Callable[[str, float], None] = lambda _text, _share: None) -> Report:
    """Measure every cell. What was stored is removed, also after an error.

    Args:
        progress: told what is being done, and the share of the sweep that is done.

    Raises:
        NoRoomError: the sweep does not fit; nothing has been written.
        WrongAnswerError: a driver answered wrongly.
        HiCacheError: a storage cannot be constructed or opened.
    """
    check_room(sweep)
    report = Report(
        [Subject(contender.label, contender.driver, redacted(contender.options)) for contender in sweep.contenders],
        batch_pages=sweep.cells[0].batch_pages,
        lane_kind=sweep.cells[0].lane_kind,
        seconds=sweep.seconds,
        machine=this_machine(),
    )
    for number, cell in enumerate(sweep.cells):
        text = f"{cell.page_bytes >> 10} KiB, {cell.lanes} {cell.lane_kind}"
        verifies = _run_cell(sweep, cell, report, lambda share: progress(text, (number + share) / len(sweep.cells)))  # noqa: B023
        report.subjects = [
            Subject(subject.label, subject.driver, subject.options, verified)
            for subject, verified in zip(report.subjects, verifies, strict=True)
        ]
    return report


def _run_cell(sweep: Sweep, cell: Cell, report: Report, progress: Callable[[float], None]) -> list[bool]:
    with ExitStack() as stack:
        turns = list[_Turn]()
        for contender in sweep.contenders:
            crew = assemble(contender, cell, secrets.token_hex(8))
            stack.callback(crew.close)
            turns.append(_Turn(crew, contender.label, cell, sweep))
        limit = sweep.seconds * len(turns)
        started = time.monotonic()
        for turn in turns:
            turn.warm_up()
        forwards = True
        while all(turn.has_space for turn in turns):
            # Who was last begins, so that nobody always comes after the same one.
            for turn in turns if forwards else turns[::-1]:
                turn.round()
            forwards = not forwards
            share = (time.monotonic() - started) / limit
            progress(min(1.0, share))
            if share >= 1.0:
                break
        for turn in turns:
            report.measures.extend(turn.finish())
        return [turn.crew.verifies_checksums for turn in turns]


class _Turn:
    """One contender in one cell."""

    def __init__(self, crew: Crew, label: str, cell: Cell, sweep: Sweep) -> None:
        self.crew = crew
        self._left = sweep.space_bytes // (cell.lanes * cell.batch_bytes)
        """Batches that each lane may still store."""
        # Where nothing makes room between rounds, they have to share it.
        self._most = self._left if crew.deletes else max(1, self._left // (ROUNDS + 1))
        self._target_seconds = sweep.seconds / (ROUNDS + 1)
        self._batches = 1
        self._next = 0
        self._measures = {op: Measure(label, cell.page_bytes, cell.lanes, op) for op in Operation}
        self._seconds = {op: list[float]() for op in Operation}

    @property
    def has_space(self) -> bool:
        """Whether another round fits beside what could not be removed."""
        return self._batches <= self._left

    def warm_up(self) -> None:
        """A round that does not count; how long it takes decides how much the others do."""
        started = time.monotonic()
        self.round()
        seconds = max(1e-3, time.monotonic() - started)
        if not self.has_space:
            # The only round there is room for.
            return
        for operation in Operation:
            self._measures[operation].rounds.clear()
            self._seconds[operation].clear()
        self._batches = max(1, min(self._most, int(self._target_seconds / seconds)))

    def round(self) -> None:
        """Write, look up and read as many batches as decided; then remove them."""
        batches = range(self._next, self._next + self._batches)
        self._next = batches.stop
        self.crew.prepare(batches)
        for operation in Operation:
            burst = self.crew.run(operation, batches)
            self._measures[operation].rounds.append(burst.pages / (burst.ended - burst.started))
            self._seconds[operation] += burst.seconds
        self.crew.remove()
        if not self.crew.deletes:
            self._left -= self._batches

    def finish(self) -> list[Measure]:
        """The results."""
        for operation, measure in self._measures.items():
            measure.take_latencies(self._seconds[operation])
        return list(self._measures.values())
