"""Composition of the layers around a driver, and their options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.layers.breaker import CircuitBreakerLayer
from hicache_storage.layers.deadline import DeadlineLayer
from hicache_storage.objects import ObjectStorage
from hicache_storage.spec import ConfigError
from hicache_storage.spec.arguments import check_seconds

if TYPE_CHECKING:
    from hicache_storage.spec import HiCacheStorage


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """Options of the layers around a driver.

    Raises:
        ConfigError: a value is out of range.
    """

    deadline_seconds: float | None = 30.0
    """Time after which a call is answered as a miss; None waits without limit."""
    breaker_threshold: int = 5
    """Consecutive failed calls of a kind (read, write, delete) that open its circuit breaker.

    Calls of the kind are misses then, without calling the driver; 0 disables the breakers.
    """
    breaker_cooldown_seconds: float = 5.0
    """Time until a trial call passes."""
    metrics: bool = True
    """Count pages, bytes and latencies; SGLang's `enable_storage_metrics`.

    Faults are always counted. A driver that is no `ObjectStorage` decides itself what it counts.
    """

    def __post_init__(self) -> None:
        if self.deadline_seconds is not None:
            check_seconds("deadline_seconds", self.deadline_seconds)
        threshold: object = self.breaker_threshold
        if not (isinstance(threshold, int) and threshold >= 0):
            raise ConfigError(
                f"breaker_threshold must be a number of calls, 0 at least, got {threshold!r}"
            )
        check_seconds("breaker_cooldown_seconds", self.breaker_cooldown_seconds)


def wrap(driver: HiCacheStorage, options: StorageOptions) -> HiCacheStorage:
    """Wrap a driver into deadline and circuit breaker, from the inside out.

    The breaker is outside of the deadline, so that it counts a missed deadline as a fault.
    """
    storage = driver
    if isinstance(driver, ObjectStorage):
        driver.recorder.enabled = options.metrics
    if options.deadline_seconds is not None:
        storage = DeadlineLayer(storage, options.deadline_seconds)
    if options.breaker_threshold:
        storage = CircuitBreakerLayer(
            storage, options.breaker_threshold, options.breaker_cooldown_seconds
        )
    return storage
