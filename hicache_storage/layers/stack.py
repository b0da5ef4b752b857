"""Composition of the layers around a driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.layers.breaker import CircuitBreakerLayer
from hicache_storage.layers.deadline import DeadlineLayer
from hicache_storage.layers.metrics import MetricsLayer
from hicache_storage.objects import ObjectStorage
from hicache_storage.observability import tracing

if TYPE_CHECKING:
    from hicache_storage.layers.options import StorageOptions
    from hicache_storage.spec import HiCacheStorage


def wrap(driver: HiCacheStorage, options: StorageOptions) -> HiCacheStorage:
    """Wrap a driver into metrics, deadline, circuit breaker and traces, from the inside out.

    The breaker is outside of the deadline, so that it counts a missed deadline as a fault.

    Raises:
        ConfigError: traces are enabled, and OpenTelemetry is not installed.
    """
    storage = driver
    if isinstance(driver, ObjectStorage):
        # Such a driver counts itself: a layer cannot tell a page that existed from one that was
        # written.
        driver.recorder.enabled = options.metrics
    elif options.metrics:
        storage = MetricsLayer(storage)
    if options.deadline_seconds is not None:
        storage = DeadlineLayer(storage, options.deadline_seconds)
    if options.breaker_threshold:
        storage = CircuitBreakerLayer(
            storage, options.breaker_threshold, options.breaker_cooldown_seconds
        )
    if options.traces:
        from hicache_storage.layers.tracing import TracingLayer

        storage = TracingLayer(storage, tracing.spans() or tracing.enable())
    return storage
