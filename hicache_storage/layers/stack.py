"""The order of the layers around a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.layers.breaker import CircuitBreaker, CircuitBreakerLayer
from hicache_storage.layers.deadline import DeadlineLayer
from hicache_storage.layers.metrics import MetricsLayer
from hicache_storage.objects import ObjectStorage

if TYPE_CHECKING:
    from hicache_storage.layers.options import StorageOptions
    from hicache_storage.spec import HiCacheStorage


def wrap(driver: HiCacheStorage, options: StorageOptions) -> HiCacheStorage:
    """Put metrics, deadline and circuit breaker around a driver, from the inside out.

    The breaker is outermost, so that a missed deadline counts as a fault for it.
    """
    storage = driver
    if isinstance(driver, ObjectStorage):
        driver.recorder.enabled = options.metrics
    elif options.metrics:
        storage = MetricsLayer(storage)
    if options.deadline_seconds is not None:
        storage = DeadlineLayer(storage, options.deadline_seconds)
    if options.breaker_threshold:
        storage = CircuitBreakerLayer(storage, CircuitBreaker(options.breaker_threshold, options.breaker_cooldown_seconds))
    return storage
