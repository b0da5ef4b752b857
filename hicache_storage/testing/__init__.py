"""Test support: a storage in memory, which fails or hangs as told, and a byte pool.

No test runner is needed.
"""

from hicache_storage.testing.host_pool import BytePool
from hicache_storage.testing.storage import MemoryObjects, MemoryStorage

__all__ = ["BytePool", "MemoryObjects", "MemoryStorage"]
