"""Results: written to a file, read back, compared."""

from __future__ import annotations

import math
import os
import platform
import statistics
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_storage.tools.bench.settings import ClientKind, Operation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class CandidateInfo:
    """A candidate of the results."""

    label: str
    driver: str
    options: dict[str, str]
    """Options of the driver; secrets are redacted."""
    verifies_checksums: bool = True


@dataclass(slots=True)
class Measurement:
    """One operation of one candidate in one workload."""

    label: str
    page_bytes: int
    clients: int
    operation: Operation
    rounds: list[float] = field(default_factory=list[float])
    """Pages a second of all clients together, one value a round."""
    calls: int = 0
    p50_us: float = 0.0
    """Percentiles of the duration of calls, in microseconds."""
    p95_us: float = 0.0
    p99_us: float = 0.0
    max_us: float = 0.0

    @property
    def pages_per_second(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)

    def rates(self) -> tuple[float, float, float]:
        """Return median, minimum and maximum rate: GB/s, or million keys a second for lookups."""
        scale = 1e-6 if self.operation is Operation.EXISTS else self.page_bytes * 1e-9
        return self.pages_per_second * scale, min(self.rounds) * scale, max(self.rounds) * scale

    def set_latencies(self, seconds: Sequence[float]) -> None:
        """Reduce durations of calls, in seconds, to percentiles."""
        ordered = sorted(seconds)
        self.calls = len(ordered)
        self.p50_us = percentile(ordered, 0.50) * 1e6
        self.p95_us = percentile(ordered, 0.95) * 1e6
        self.p99_us = percentile(ordered, 0.99) * 1e6
        self.max_us = ordered[-1] * 1e6


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of two rates: of the medians, and the minimum and maximum of the rounds."""

    median: float
    minimum: float
    maximum: float


@dataclass(slots=True)
class Report:
    """Results of a run."""

    candidates: list[CandidateInfo]
    measurements: list[Measurement] = field(default_factory=list[Measurement])
    batch_pages: int = 0
    client_kind: ClientKind = ClientKind.THREADS
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict[str, str])
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        """Write the report as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read a report written by `write`.

        Raises:
            ValueError: the file is no report of this schema.
            OSError: the file cannot be read.
        """
        try:
            report = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no result of `hicache bench`: {error}") from error
        # Refused, not converted: figures of other fields must not be compared.
        if report.schema != SCHEMA:
            raise ValueError(f"{path} has schema {report.schema}; this version reads {SCHEMA}")
        return report

    def of(self, label: str) -> dict[tuple[int, int, Operation], Measurement]:
        """Return the measurements of one candidate, by workload and operation."""
        return {
            (m.page_bytes, m.clients, m.operation): m for m in self.measurements if m.label == label
        }


def compare(
    those: Iterable[Measurement], these: Iterable[Measurement], *, paired: bool
) -> list[tuple[Measurement, Measurement, Ratio]]:
    """Pair the measurements that two results have in common.

    Each pair has the ratio of the second rate to the first.

    Args:
        those: the baseline.
        these: the measurements to compare with it.
        paired: the rounds of both were interleaved, and are compared one by one; otherwise the
            minimum is the ratio of the slowest round to the fastest of the baseline.
    """
    peers = {(m.page_bytes, m.clients, m.operation): m for m in those}
    return [
        (peer, mine, _ratio(peer, mine, paired=paired))
        for mine in these
        if (peer := peers.get((mine.page_bytes, mine.clients, mine.operation))) is not None
    ]


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the smallest value that `share` of all values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def this_machine() -> dict[str, str]:
    """Describe hardware and versions, on which the figures depend."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "cpu": f"{model}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "hicache-storage": version("hicache-storage"),
    }


def _ratio(peer: Measurement, mine: Measurement, *, paired: bool) -> Ratio:
    if paired:
        # Round by round: both candidates had the same load on the machine then.
        ratios = [ours / theirs for theirs, ours in zip(peer.rounds, mine.rounds, strict=False)]
        minimum, maximum = min(ratios), max(ratios)
    else:
        minimum = min(mine.rounds) / max(peer.rounds)
        maximum = max(mine.rounds) / min(peer.rounds)
    return Ratio(mine.pages_per_second / peer.pages_per_second, minimum, maximum)
