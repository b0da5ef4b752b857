"""Test support: a storage in memory, fault injection, a byte pool, simulated streams.

`StreamSimulator` and its types are those of `hicache_storage.transfer.simulator`. No test runner is
needed.
"""

from hicache_storage.testing.faults import FaultLayer, FaultOptions
from hicache_storage.testing.host_pool import BytePool
from hicache_storage.testing.storage import MemoryStorage
from hicache_storage.transfer.simulator import (
    Access,
    Hold,
    Race,
    SimulatedEvent,
    SimulatedStream,
    StreamSimulator,
)

__all__ = [
    "Access",
    "BytePool",
    "FaultLayer",
    "FaultOptions",
    "Hold",
    "MemoryStorage",
    "Race",
    "SimulatedEvent",
    "SimulatedStream",
    "StreamSimulator",
]
