"""What to measure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

BATCH_PAGES: Final = 128
"""Pages in a call, as many as engines send."""
MIN_PAGE_BYTES: Final = 4096


class LaneKind(StrEnum):
    """What a lane is."""

    THREADS = "threads"
    """The threads of one process call one storage, as in an engine."""
    PROCESSES = "processes"
    """Each has a process and a storage of its own, as the ranks of an engine do."""


class Operation(StrEnum):
    """The calls that are timed, in their order."""

    WRITE = "write"
    EXISTS = "exists"
    READ = "read"


@dataclass(frozen=True, slots=True)
class Contender:
    """A driver with its options."""

    driver: str
    options: dict[str, str] = field(default_factory=dict[str, str])
    label: str = ""
    """How tables call it."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the sweep."""

    page_bytes: int
    lanes: int
    lane_kind: LaneKind = LaneKind.THREADS
    batch_pages: int = BATCH_PAGES

    @property
    def batch_bytes(self) -> int:
        """What one call of one lane moves."""
        return self.page_bytes * self.batch_pages

    @property
    def pool_bytes(self) -> int:
        """Host memory: each lane writes from one batch of pages and reads into another."""
        return 2 * self.lanes * self.batch_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """All cells, and their limits."""

    contenders: list[Contender]
    cells: list[Cell]
    seconds: float = 3.0
    """For each cell and contender, warm-up included; the round that runs then is finished."""
    space_bytes: int = 2 << 30
    """Most bytes of pages that a contender stores at a time."""
    keeps_pages: bool = False
    """Leave the pages of a driver that can neither delete nor clear to its eviction."""
