"""Layers around any driver: deadline, circuit breaker."""

from hicache_storage.layers.base import StorageLayer, innermost
from hicache_storage.layers.breaker import BreakerState, CircuitBreaker, CircuitBreakerLayer
from hicache_storage.layers.deadline import DeadlineLayer
from hicache_storage.layers.stack import StorageOptions, wrap

__all__ = [
    "BreakerState",
    "CircuitBreaker",
    "CircuitBreakerLayer",
    "DeadlineLayer",
    "StorageLayer",
    "StorageOptions",
    "innermost",
    "wrap",
]
