"""Execution of a sweep: workload by workload, the rounds of the candidates interleaved."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.bench.client import ClientPool
from hicache_storage.tools.bench.preflight import check_space
from hicache_storage.tools.bench.results import CandidateInfo, Measurement, Report, this_machine
from hicache_storage.tools.bench.settings import Operation
from hicache_storage.tools.options import redacted

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.tools.bench.settings import BenchWorkload, Sweep

ROUNDS: Final = 5
"""Rounds that a workload is planned to have; slow stores have fewer, at least one."""


def run_sweep(
    sweep: Sweep, progress: Callable[[str, float], None] = lambda _text, _share: None
) -> Report:
    """Measure every workload, and remove the stored pages, also after an error.

    Args:
        progress: called with a description of the workload, and the part of the sweep that is done,
            0 to 1.

    Raises:
        InsufficientSpaceError: the sweep does not fit; nothing has been written.
        WrongAnswerError: a driver answered wrongly.
        HiCacheError: a storage cannot be constructed or opened.
    """
    # Before anything is opened: a sweep that fills the disk half-way has measured nothing.
    check_space(sweep)
    report = Report(
        [
            CandidateInfo(candidate.label, candidate.driver, redacted(candidate.options))
            for candidate in sweep.candidates
        ],
        seconds=sweep.seconds,
        machine=this_machine(),
    )
    for number, workload in enumerate(sweep.workloads):
        text = f"{workload.page_bytes >> 10} KiB, {workload.clients} clients"

        def report_share(share: float, text: str = text, number: int = number) -> None:
            progress(text, (number + share) / len(sweep.workloads))

        verifies = _run_workload(sweep, workload, report, report_share)
        report.candidates = [
            CandidateInfo(candidate.label, candidate.driver, candidate.options, verified)
            for candidate, verified in zip(report.candidates, verifies, strict=True)
        ]
    return report


def _run_workload(
    sweep: Sweep, workload: BenchWorkload, report: Report, progress: Callable[[float], None]
) -> list[bool]:
    with ExitStack() as stack:
        runs = list[_CandidateRun]()
        for candidate in sweep.candidates:
            # New keys for each workload: pages of an earlier run would be found and not written.
            pool = ClientPool(candidate, workload, secrets.token_hex(8))
            stack.callback(pool.close)
            runs.append(_CandidateRun(pool, candidate.label, workload, sweep))
        limit = sweep.seconds * len(runs)
        started = time.monotonic()
        for each in runs:
            each.warm_up()
        forwards, share = True, 0.0
        while share < 1.0:
            # In alternating order, so that no candidate always runs after the same other one.
            for each in runs if forwards else runs[::-1]:
                each.round()
            forwards = not forwards
            share = min(1.0, (time.monotonic() - started) / limit)
            progress(share)
        for each in runs:
            report.measurements.extend(each.finish())
        return [each.pool.verifies_checksums for each in runs]


class _CandidateRun:
    """Rounds of one candidate in one workload."""

    def __init__(self, pool: ClientPool, label: str, workload: BenchWorkload, sweep: Sweep) -> None:
        self.pool = pool
        self._max_batches = sweep.max_stored_bytes // (workload.clients * workload.batch_bytes)
        """Batches that each client may store in a round."""
        self._target_seconds = sweep.seconds / (ROUNDS + 1)
        self._batches = 1
        self._next = 0
        self._measurements = {
            op: Measurement(label, workload.page_bytes, workload.clients, op, workload.batch_pages)
            for op in Operation
        }
        self._seconds = {op: list[float]() for op in Operation}

    def warm_up(self) -> None:
        """Run a round that does not count.

        Its duration decides the number of batches of the others.
        """
        started = time.monotonic()
        self.round()
        # A lower bound, because the number of batches is a quotient by it.
        seconds = max(1e-3, time.monotonic() - started)
        for operation in Operation:
            self._measurements[operation].rounds.clear()
            self._seconds[operation].clear()
        self._batches = max(1, min(self._max_batches, int(self._target_seconds / seconds)))

    def round(self) -> None:
        """Write, look up and read batches, then remove them."""
        batches = range(self._next, self._next + self._batches)
        self._next = batches.stop
        self.pool.prepare(batches)
        for operation in Operation:
            sample = self.pool.run(operation, batches)
            self._measurements[operation].rounds.append(
                sample.pages / (sample.ended - sample.started)
            )
            self._seconds[operation] += sample.seconds
        self.pool.remove()

    def finish(self) -> list[Measurement]:
        """Return the measurements."""
        for operation, measurement in self._measurements.items():
            measurement.set_latencies(self._seconds[operation])
        return list(self._measurements.values())
