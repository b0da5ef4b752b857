"""Settings of a benchmark: candidate, workloads, limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

BATCH_PAGES: Final = 128
"""Pages in a call, as many as engines send."""
MIN_PAGE_BYTES: Final = 4096
"""Shortest page that can be measured; longer ones are multiples of it."""


class Operation(StrEnum):
    """Timed calls, in the order of a round."""

    WRITE = "write"
    EXISTS = "exists"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A driver with its options."""

    driver: str
    options: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class BenchWorkload:
    """One combination of page size and number of clients."""

    page_bytes: int
    clients: int
    """Threads that call one storage, as in an engine."""
    batch_pages: int = BATCH_PAGES

    @property
    def batch_bytes(self) -> int:
        """Bytes that one call of one client moves."""
        return self.page_bytes * self.batch_pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Candidate and workloads of a benchmark, and its limits."""

    candidate: Candidate
    workloads: list[BenchWorkload]
    seconds: float = 3.0
    """Time for each workload in seconds, warm-up included.

    The round that runs then is finished.
    """
    max_stored_bytes: int = 2 << 30
    """Limit of the bytes of pages that are stored at a time."""
