"""Test support: a storage in memory, fault injection, a byte pool. No test runner is needed."""

from hicache_storage.testing.faults import FaultLayer, FaultOptions
from hicache_storage.testing.host_pool import BytePool
from hicache_storage.testing.storage import MemoryObjects, MemoryStorage

__all__ = [
    "BytePool",
    "FaultLayer",
    "FaultOptions",
    "MemoryObjects",
    "MemoryStorage",
]
