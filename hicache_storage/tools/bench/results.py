"""Results, and their file.

`hicache bench` and the programs in benchmarks/ write the same format.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
from dataclasses import dataclass, field
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

Workload: TypeAlias = tuple[int, int, int, str]
"""Page size in bytes, clients, pages of a call, operation."""
Rate: TypeAlias = tuple[float, float, float]
"""Median, minimum and maximum of the rounds."""


class Operation(StrEnum):
    """Timed calls, in the order of a round."""

    WRITE = "write"
    EXISTS = "exists"
    READ = "read"


@dataclass(frozen=True, slots=True)
class CandidateInfo:
    """A candidate of the results."""

    label: str
    driver: str = ""
    options: dict[str, str] = field(default_factory=dict[str, str])
    """Options of the driver; secrets are redacted."""
    verifies_checksums: bool = True


@dataclass(slots=True)
class Measurement:
    """One operation of one candidate in one workload."""

    label: str
    page_bytes: int
    clients: int
    operation: str
    """An `Operation`, or a benchmark's own."""
    batch_pages: int
    """Pages of a call, or keys where no page is moved."""
    rounds: list[float] = field(default_factory=list[float])
    """Pages a second of all clients together, one value a round."""
    cpu_us: list[float] = field(default_factory=list[float])
    """CPU time of a page in microseconds, one value a round; empty where it was not measured."""
    calls: int = 0
    p50_us: float = 0.0
    """Percentiles of the duration of calls, in microseconds; 0 where they are not known."""
    p95_us: float = 0.0
    p99_us: float = 0.0
    max_us: float = 0.0

    @property
    def workload(self) -> Workload:
        """The workload, by which sides are compared."""
        return self.page_bytes, self.clients, self.batch_pages, self.operation

    @property
    def pages_per_second(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def seconds(self) -> float:
        """Median of the time that one call of each client takes."""
        return self.clients * self.batch_pages / self.pages_per_second

    @property
    def unit(self) -> str:
        """Unit of the rates."""
        return "k keys/s" if self.operation == Operation.EXISTS or not self.page_bytes else "GB/s"

    def rates(self) -> Rate:
        """Return median, minimum and maximum rate, in GB/s or thousands of keys a second."""
        scale = 1e-3 if self.unit == "k keys/s" else self.page_bytes * 1e-9
        return self.pages_per_second * scale, min(self.rounds) * scale, max(self.rounds) * scale

    def add(self, seconds: float, cpu_seconds: float | None = None) -> None:
        """Add a round in which each client has made one call."""
        pages = self.clients * self.batch_pages
        self.rounds.append(pages / seconds)
        if cpu_seconds is not None:
            self.cpu_us.append(1e6 * cpu_seconds / pages)

    def set_latencies(self, seconds: Sequence[float]) -> None:
        """Reduce durations of calls, in seconds, to percentiles."""
        ordered = sorted(seconds)
        self.calls = len(ordered)
        self.p50_us = percentile(ordered, 0.50) * 1e6
        self.p95_us = percentile(ordered, 0.95) * 1e6
        self.p99_us = percentile(ordered, 0.99) * 1e6
        self.max_us = ordered[-1] * 1e6


@dataclass(slots=True)
class Report:
    """Results of a run."""

    candidates: list[CandidateInfo]
    measurements: list[Measurement] = field(default_factory=list[Measurement])
    figures: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Measured values that are no rates, by what they are and their unit."""
    missing: dict[str, str] = field(default_factory=dict[str, str])
    """Candidates that could not be measured, and why."""
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict[str, str])
    schema: int = 2

    def write(self, path: Path) -> None:
        """Write the report as JSON, a line for each measurement."""
        path.write_bytes(msgspec.json.encode(self).replace(b'{"label"', b'\n{"label"') + b"\n")


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
