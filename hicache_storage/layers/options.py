"""What the SDK puts around every driver, as options."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_storage.spec import ConfigError
from hicache_storage.spec.arguments import check_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """Options of the layers around a driver.

    Raises:
        ConfigError: a value is out of range.
    """

    deadline_seconds: float | None = 30.0
    """Longest time a call may take before it is answered as a miss; None waits for ever."""
    breaker_threshold: int = 5
    """Failed calls in a row after which calls are refused without asking the driver; 0 turns the breaker off."""
    breaker_cooldown_seconds: float = 5.0
    """Time until one call is let through again to try."""
    metrics: bool = True
    """Count pages, bytes and latencies; SGLang calls this `enable_storage_metrics`. Faults are always counted."""
    traces: bool = False
    """A span for each call, by OpenTelemetry and the process' own tracer provider (`hicache-storage[otel]`)."""

    def __post_init__(self) -> None:
        if self.deadline_seconds is not None:
            check_seconds("deadline_seconds", self.deadline_seconds)
        threshold: object = self.breaker_threshold
        if not (isinstance(threshold, int) and threshold >= 0):
            raise ConfigError(f"breaker_threshold must be a number of calls, 0 at least, got {threshold!r}")
        check_seconds("breaker_cooldown_seconds", self.breaker_cooldown_seconds)
