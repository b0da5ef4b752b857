"""Policies of write-back and prefetch: pure functions, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hicache_storage.spec import ConfigError

SELECTIVE_HITS = 2
"""Hits at which `write_through_selective` writes a span; its insertion is the first."""


class WritePolicy(StrEnum):
    """Time at which a span is copied from the device to the host and the storage."""

    WRITE_THROUGH = "write_through"
    """When it is first inserted."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it is hit a second time."""
    WRITE_BACK = "write_back"
    """When the device evicts it."""

    def writes_on_hit(self, hits: int) -> bool:
        """Return whether to write a span that is not on the host after so many hits.

        Its insertion is the first hit.
        """
        needed = SELECTIVE_HITS if self is WritePolicy.WRITE_THROUGH_SELECTIVE else 1
        return self is not WritePolicy.WRITE_BACK and hits >= needed


class PrefetchPolicy(StrEnum):
    """Time that a request which could be scheduled waits for its prefetch."""

    BEST_EFFORT = "best_effort"
    """No time: the request uses the pages that have arrived."""
    WAIT_COMPLETE = "wait_complete"
    """Until the prefetch is done."""
    TIMEOUT = "timeout"
    """Until it is done, or a time has passed that grows with its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRules:
    """Rules by which prefetches are started and requests stop waiting for them.

    Raises:
        ConfigError: a value is out of range.
    """

    # SGLang's defaults.
    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    base_seconds: float = 1.0
    """`PrefetchPolicy.TIMEOUT`: its time, counted from the start of a prefetch."""
    seconds_per_1024_tokens: float = 0.25
    """More time for each 1,024 tokens."""
    maximum_seconds: float = 30.0
    """Limit of the sum of both, however long the prefetch is."""
    threshold_tokens: int = 256
    """Minimum length of a prefetch; fewer tokens are computed."""
    occupancy: float = 0.5
    """Share of the host pool from which on prefetches in flight prevent further ones."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", PrefetchPolicy(self.policy))
        times = ("base_seconds", "seconds_per_1024_tokens", "maximum_seconds")
        for name in (*times, "threshold_tokens"):
            # Not `< 0`, which is false for NaN.
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 < self.occupancy <= 1:
            raise ConfigError(f"occupancy must be in (0, 1], got {self.occupancy}")

    def is_worth(self, tokens: int, page_size: int) -> bool:
        """Return whether to fetch so many tokens: the threshold, and a page, at least."""
        return tokens >= max(self.threshold_tokens, page_size)

    def admits(self, occupied_tokens: int, host_tokens: int) -> bool:
        """Return whether to start another prefetch.

        Args:
            occupied_tokens: tokens of the prefetches in flight.
            host_tokens: size of the host pool.
        """
        return occupied_tokens < self.occupancy * host_tokens

    def stops_waiting(self, elapsed_seconds: float, tokens: int) -> bool:
        """Return whether a request goes on without the rest of its prefetch.

        Only the time decides, even if all KV has arrived and only a state is missing.
        """
        match self.policy:
            case PrefetchPolicy.BEST_EFFORT:
                return True
            case PrefetchPolicy.WAIT_COMPLETE:
                return False
            case PrefetchPolicy.TIMEOUT:
                grown = self.base_seconds + self.seconds_per_1024_tokens * tokens / 1024
                return elapsed_seconds >= min(self.maximum_seconds, grown)
