"""Counts of a simulation."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SimulationResult:
    """Counts of a simulation, in pages; events of all ranks count once."""

    seconds: float = 0.0
    """Simulated time without the warm-up."""
    prompts: int = 0
    local: int = 0
    """Pages found in the engines' own caches."""
    asked: int = 0
    hits: int = 0
    misses: int = 0
    not_asked: int = 0
    """Pages after the first batch with a miss."""
    usable: int = 0
    """Hits before the first miss of a prompt, which are read."""
    stored: int = 0
    existing: int = 0
    """Pages to store that were live or leased already."""
    full: int = 0
    """Pages without a free slot."""
    lost: int = 0
    """Pages whose writer or server failed before the commit, or whose lease had ended."""
    unanswered: int = 0
    """Pages of requests during a failure of the server."""
    evicted: int = 0
    slots: int = 0
    """Slots of each scope."""
    scopes: int = 0
    live: int = 0
    """Live pages at the end, mean over the scopes."""
    mean_occupancy: float = 0.0
    """Mean share of live slots, over all events."""
    requests: Counter[str] = field(default_factory=Counter[str])
    """Requests to the server by kind, of all ranks together."""
    keys: Counter[str] = field(default_factory=Counter[str])
    """Keys of these requests."""
    peak_requests: int = 0
    """Requests in the busiest second, of all ranks together."""
    read_pages: int = 0
    """Pages read, of all ranks together."""
    written_pages: int = 0
    """Pages written, of all ranks together."""

    @property
    def hit_ratio(self) -> float:
        """Share of the pages outside of engines' caches that was read."""
        wanted = self.asked + self.not_asked
        return self.usable / wanted if wanted else 0.0

    def a_second(self, count: float) -> float:
        """Rate of a count."""
        return count / self.seconds if self.seconds else 0.0
