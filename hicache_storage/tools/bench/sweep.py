"""Execution of a sweep, workload by workload."""

from __future__ import annotations

import secrets
import time
from contextlib import closing
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.bench.client import ClientPool
from hicache_storage.tools.bench.results import (
    CandidateInfo,
    Measurement,
    Operation,
    Report,
    this_machine,
)
from hicache_storage.tools.options import redacted, size_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.tools.bench.client import BenchWorkload, CallSample, Candidate

ROUNDS: Final = 5
"""Rounds that a workload is planned to have; slow stores have fewer, at least one."""


def run_sweep(
    candidate: Candidate,
    workloads: Sequence[BenchWorkload],
    *,
    seconds: float = 3.0,
    max_stored_bytes: int = 2 << 30,
) -> Report:
    """Measure every workload, and remove the stored pages, also after an error.

    Args:
        candidate: what is measured.
        workloads: page sizes and numbers of clients.
        seconds: time for each workload, warm-up included; the round that runs then is finished.
        max_stored_bytes: limit of the bytes of pages that are stored at a time.

    Raises:
        ValueError: a workload stores more at a time; nothing has been written.
        StorageRefusedError: the store has no room for as many pages.
        WrongAnswerError: the driver answered wrongly.
        HiCacheError: the storage cannot be constructed or opened.
    """
    largest = max(workload.stored_bytes for workload in workloads)
    if largest > max_stored_bytes:
        raise ValueError(
            f"the clients store {size_text(largest)} at a time, more than --max-stored "
            f"{size_text(max_stored_bytes)}"
        )
    verifies, measurements = True, list[Measurement]()
    for workload in workloads:
        # New keys for each workload: pages of an earlier run would be found and not written.
        with closing(ClientPool(candidate, workload, secrets.token_hex(8))) as pool:
            verifies = pool.verifies_checksums
            most = max_stored_bytes // workload.stored_bytes
            measurements += _run_workload(pool, candidate.driver, workload, seconds, most)
    about = CandidateInfo(candidate.driver, candidate.driver, redacted(candidate.options), verifies)
    return Report([about], measurements, seconds=seconds, machine=this_machine())


def _run_workload(
    pool: ClientPool, label: str, workload: BenchWorkload, seconds: float, most: int
) -> list[Measurement]:
    """Measure a workload; each client stores at most so many batches at a time."""
    started = time.monotonic()
    _run_round(pool, range(1))
    # The first round does not count: its duration, which may be 0, decides the number of batches
    # that each client stores in one of the others.
    duration = max(1e-3, time.monotonic() - started)
    count = max(1, min(most, int(seconds / (ROUNDS + 1) / duration)))
    measurements = {
        op: Measurement(label, workload.page_bytes, workload.clients, op, workload.batch_pages)
        for op in Operation
    }
    durations = {op: list[float]() for op in Operation}
    first, over = 1, False
    while not over:
        for op, sample in _run_round(pool, range(first, first + count)).items():
            measurements[op].rounds.append(sample.pages / (sample.ended - sample.started))
            durations[op] += sample.seconds
        first += count
        over = time.monotonic() - started >= seconds
    for op, measurement in measurements.items():
        measurement.set_latencies(durations[op])
    return list(measurements.values())


def _run_round(pool: ClientPool, batches: range) -> dict[Operation, CallSample]:
    """Write, look up and read batches, then remove them."""
    pool.prepare(batches)
    samples = {operation: pool.run(operation, batches) for operation in Operation}
    pool.remove()
    return samples
