"""When pages are written, and how long a request waits for a prefetch: pure decisions, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from hicache_storage.spec import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

SELECTIVE_HITS = 2
"""Hits from which on `write_through_selective` takes a span for one that will be used again; its insertion is the first."""


class WritePolicy(StrEnum):
    """When a span of pages is copied from the device to the host, and from there to storage."""

    WRITE_THROUGH = "write_through"
    """When it is first inserted."""
    WRITE_THROUGH_SELECTIVE = "write_through_selective"
    """When it is hit a second time."""
    WRITE_BACK = "write_back"
    """When the device evicts it."""

    def writes_on_hit(self, hits: int) -> bool:
        """Whether a span that is not on the host is written now; its insertion counts as the first hit."""
        return self is not WritePolicy.WRITE_BACK and hits >= self._hits_needed

    @property
    def writes_on_eviction(self) -> bool:
        """Whether eviction from the device waits for the span to be written."""
        return self is WritePolicy.WRITE_BACK

    @property
    def _hits_needed(self) -> int:
        return SELECTIVE_HITS if self is WritePolicy.WRITE_THROUGH_SELECTIVE else 1


class PrefetchPolicy(StrEnum):
    """How long a request waits for its prefetch when it could be scheduled."""

    BEST_EFFORT = "best_effort"
    """Not at all: it takes what is there."""
    WAIT_COMPLETE = "wait_complete"
    """Until the prefetch is done."""
    TIMEOUT = "timeout"
    """Until it is done, or a time has passed that grows with its length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchTimeout:
    """How long `PrefetchPolicy.TIMEOUT` waits, counted from `prefetch`.

    Raises:
        ConfigError: a time is negative.
    """

    base_seconds: float = 1.0
    seconds_per_1024_tokens: float = 0.25
    maximum_seconds: float = 30.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} must not be negative, got {getattr(self, name)}")

    def seconds(self, tokens: int) -> float:
        """For a prefetch of so many tokens."""
        return min(self.maximum_seconds, self.base_seconds + self.seconds_per_1024_tokens * tokens / 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRules:
    """Which prefetches are begun, and when a request stops waiting for one.

    Raises:
        ConfigError: a value is out of range.
    """

    policy: PrefetchPolicy = PrefetchPolicy.TIMEOUT
    timeout: PrefetchTimeout = field(default_factory=PrefetchTimeout)
    threshold_tokens: int = 256
    """Fewer tokens are computed rather than fetched."""
    occupancy: float = 0.5
    """No prefetch is begun while those on their way ask for this share of the host's tokens or more."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "policy", PrefetchPolicy(self.policy))
        if self.threshold_tokens < 0:
            raise ConfigError(f"threshold_tokens must not be negative, got {self.threshold_tokens}")
        if not 0 < self.occupancy <= 1:
            raise ConfigError(f"occupancy must be in (0, 1], got {self.occupancy}")

    def is_worth(self, tokens: int, page_size: int) -> bool:
        """Whether so many tokens are worth fetching: a page at least."""
        return tokens >= max(self.threshold_tokens, page_size)

    def admits(self, occupied_tokens: int, host_tokens: int) -> bool:
        """Whether another prefetch may begin.

        Args:
            occupied_tokens: asked for by those on their way.
            host_tokens: size of the host pool.
        """
        return occupied_tokens < self.occupancy * host_tokens

    def stops_waiting(self, elapsed_seconds: float, tokens: int) -> bool:
        """Whether a request goes on without the rest of its prefetch.

        The clock alone decides, whatever is still missing: also while KV is there and only a state is not.
        """
        match self.policy:
            case PrefetchPolicy.BEST_EFFORT:
                return True
            case PrefetchPolicy.WAIT_COMPLETE:
                return False
            case PrefetchPolicy.TIMEOUT:
                return elapsed_seconds >= self.timeout.seconds(tokens)


def longest_fitting(restorable: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The greatest endpoint that fits, 0 if none does; never one that is not restorable.

    Args:
        restorable: endpoints in pages, ascending.
        fits: whether there is room for a prefix; if there is for one, there is for all shorter ones.
    """
    return next((endpoint for endpoint in reversed(restorable) if fits(endpoint)), 0)
