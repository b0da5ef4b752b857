"""What was measured, as data: written to a file, read back, compared."""

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

from hicache_storage.tools.bench.settings import LaneKind, Operation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SCHEMA: Final = 1


@dataclass(frozen=True, slots=True)
class Subject:
    """A contender, as the results name it."""

    label: str
    driver: str
    options: dict[str, str]
    """Secrets are hidden."""
    verifies_checksums: bool = True


@dataclass(slots=True)
class Measure:
    """One operation of one contender in one cell."""

    label: str
    page_bytes: int
    lanes: int
    operation: Operation
    rounds: list[float] = field(default_factory=list[float])
    """Pages a second of all lanes together, round by round."""
    calls: int = 0
    p50_us: float = 0.0
    """Of a call's duration, in microseconds, as are the other percentiles."""
    p95_us: float = 0.0
    p99_us: float = 0.0
    max_us: float = 0.0

    @property
    def pages_per_second(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.rounds)

    def rates(self) -> tuple[float, float, float]:
        """Median, least and greatest rate: GB/s, or million keys a second where no bytes move."""
        scale = 1e-6 if self.operation is Operation.EXISTS else self.page_bytes * 1e-9
        return self.pages_per_second * scale, min(self.rounds) * scale, max(self.rounds) * scale

    def take_latencies(self, seconds: Sequence[float]) -> None:
        """Reduce the calls' durations to percentiles."""
        ordered = sorted(seconds)
        self.calls = len(ordered)
        self.p50_us, self.p95_us, self.p99_us = (percentile(ordered, share) * 1e6 for share in (0.50, 0.95, 0.99))
        self.max_us = ordered[-1] * 1e6


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times the rate of one is that of another: of the medians, and the least and greatest of the rounds."""

    median: float
    least: float
    greatest: float


@dataclass(slots=True)
class Report:
    """Everything that a run found out."""

    subjects: list[Subject]
    measures: list[Measure] = field(default_factory=list[Measure])
    batch_pages: int = 0
    lane_kind: LaneKind = LaneKind.THREADS
    seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict[str, str])
    schema: int = SCHEMA

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Report:
        """Read what `write` has written.

        Raises:
            ValueError: it is something else.
            OSError: it cannot be read.
        """
        try:
            report = msgspec.json.decode(path.read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is no result of `hicache bench`: {error}") from error
        if report.schema != SCHEMA:
            raise ValueError(f"{path} has schema {report.schema}; this version reads {SCHEMA}")
        return report

    def of(self, label: str) -> dict[tuple[int, int, Operation], Measure]:
        """The measures of one contender, by cell and operation."""
        return {(m.page_bytes, m.lanes, m.operation): m for m in self.measures if m.label == label}


def compare(those: Iterable[Measure], these: Iterable[Measure], *, paired: bool) -> list[tuple[Measure, Measure, Ratio]]:
    """What both have measured, and how many times as fast these are as those.

    Args:
        paired: the rounds of both took turns, so that the first belongs to the first; otherwise the least ratio is that of
            the slowest of these to the fastest of those.
    """
    peers = {(m.page_bytes, m.lanes, m.operation): m for m in those}
    return [
        (peer, mine, _ratio(peer, mine, paired=paired))
        for mine in these
        if (peer := peers.get((mine.page_bytes, mine.lanes, mine.operation))) is not None
    ]


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that `share` of all values do not exceed."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def this_machine() -> dict[str, str]:
    """What figures depend on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "cpu": f"{model}, {os.cpu_count()} cores",
        "memory": f"{memory:.0f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "hicache-storage": version("hicache-storage"),
    }


def _ratio(peer: Measure, mine: Measure, *, paired: bool) -> Ratio:
    if paired:
        ratios = [ours / theirs for theirs, ours in zip(peer.rounds, mine.rounds, strict=False)]
        least, greatest = min(ratios), max(ratios)
    else:
        least, greatest = min(mine.rounds) / max(peer.rounds), max(mine.rounds) / min(peer.rounds)
    return Ratio(mine.pages_per_second / peer.pages_per_second, least, greatest)
