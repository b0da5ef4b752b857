"""Execution of a sweep, workload by workload."""

from __future__ import annotations

import secrets
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.bench.client import ClientPool
from hicache_storage.tools.bench.preflight import check_space
from hicache_storage.tools.bench.results import CandidateInfo, Measurement, Report, this_machine
from hicache_storage.tools.bench.settings import Operation
from hicache_storage.tools.options import redacted

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_storage.tools.bench.client import CallSample
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
        WrongAnswerError: the driver answered wrongly.
        HiCacheError: the storage cannot be constructed or opened.
    """
    # Before anything is opened: a sweep that fills the disk half-way has measured nothing.
    check_space(sweep)
    driver, verifies, measurements = sweep.candidate.driver, True, list[Measurement]()
    for number, workload in enumerate(sweep.workloads):
        text = f"{workload.page_bytes >> 10} KiB, {workload.clients} clients"

        def report_share(share: float, text: str = text, number: int = number) -> None:
            progress(text, (number + share) / len(sweep.workloads))

        # New keys for each workload: pages of an earlier run would be found and not written.
        with closing(ClientPool(sweep.candidate, workload, secrets.token_hex(8))) as pool:
            verifies = pool.verifies_checksums
            measurements += _run_workload(pool, workload, sweep, report_share)
    about = CandidateInfo(driver, driver, redacted(sweep.candidate.options), verifies)
    return Report([about], measurements, seconds=sweep.seconds, machine=this_machine())


def _run_workload(
    pool: ClientPool, workload: BenchWorkload, sweep: Sweep, progress: Callable[[float], None]
) -> list[Measurement]:
    started = time.monotonic()
    _run_round(pool, range(1))
    # The first round does not count: its duration, which may be 0, decides the number of batches
    # that each client stores in one of the others.
    duration = max(1e-3, time.monotonic() - started)
    most = sweep.max_stored_bytes // (workload.clients * workload.batch_bytes)
    count = max(1, min(most, int(sweep.seconds / (ROUNDS + 1) / duration)))
    label, first, share = sweep.candidate.driver, 1, 0.0
    measurements = {
        op: Measurement(label, workload.page_bytes, workload.clients, op, workload.batch_pages)
        for op in Operation
    }
    seconds = {op: list[float]() for op in Operation}
    while share < 1.0:
        for op, sample in _run_round(pool, range(first, first + count)).items():
            measurements[op].rounds.append(sample.pages / (sample.ended - sample.started))
            seconds[op] += sample.seconds
        first += count
        share = min(1.0, (time.monotonic() - started) / sweep.seconds)
        progress(share)
    for op, measurement in measurements.items():
        measurement.set_latencies(seconds[op])
    return list(measurements.values())


def _run_round(pool: ClientPool, batches: range) -> dict[Operation, CallSample]:
    """Write, look up and read batches, then remove them."""
    pool.prepare(batches)
    samples = {operation: pool.run(operation, batches) for operation in Operation}
    pool.remove()
    return samples
