"""Streams without a GPU: queues run by threads.

A detector finds races, whatever the timing.
"""

from hicache_storage.transfer.simulator.races import Access, Race
from hicache_storage.transfer.simulator.simulator import (
    Hold,
    SimulatedEvent,
    SimulatedStream,
    StreamSimulator,
)

__all__ = ["Access", "Hold", "Race", "SimulatedEvent", "SimulatedStream", "StreamSimulator"]
