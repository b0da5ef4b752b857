"""What a simulation has counted."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class SimulationResult:
    """Counts of pages, unless they say otherwise; those of events about all ranks are of each of
    them."""

    seconds: float = 0.0
    """Simulated, without the time to warm up."""
    prompts: int = 0
    local: int = 0
    """That engines found in their own caches."""
    asked: int = 0
    hits: int = 0
    misses: int = 0
    not_asked: int = 0
    """Behind the first batch that was not found whole."""
    usable: int = 0
    """Hits up to the first miss of their prompt: what was read."""
    stored: int = 0
    existing: int = 0
    """That were to be stored and were there, or were just being stored."""
    full: int = 0
    """That found no room."""
    lost: int = 0
    """Whose writer or server died between reserve and commit, or whose lease had ended."""
    unanswered: int = 0
    """That nobody could be asked about, or told to store, while the server was down."""
    evicted: int = 0
    slots: int = 0
    """Of each scope."""
    scopes: int = 0
    live: int = 0
    """Of each scope, at the end; the mean of them."""
    mean_occupancy: float = 0.0
    """Share of slots that are live, over all events."""
    requests: Counter[str] = field(default_factory=Counter[str])
    """To the server, by kind; of all ranks together."""
    keys: Counter[str] = field(default_factory=Counter[str])
    """In these requests."""
    peak_requests: int = 0
    """In the busiest second, of all ranks together."""
    read_pages: int = 0
    """Of all ranks together; so is the next."""
    written_pages: int = 0

    @property
    def hit_ratio(self) -> float:
        """Of the pages that were not in an engine's own cache, the share that was read."""
        wanted = self.asked + self.not_asked
        return self.usable / wanted if wanted else 0.0

    def a_second(self, count: float) -> float:
        """A count as a rate."""
        return count / self.seconds if self.seconds else 0.0
