"""Copies between device and host memory on streams.

The protocol, CUDA, and a simulator for machines without a GPU. Needs torch.
"""

from hicache_storage.transfer.cuda.device import CudaDevice, CudaStream
from hicache_storage.transfer.engine import (
    Acknowledgement,
    Indices,
    LayerCounter,
    PageTransfers,
    PoolPair,
)
from hicache_storage.transfer.host_slots import HostSlots
from hicache_storage.transfer.plan import Way
from hicache_storage.transfer.simulator import StreamSimulator
from hicache_storage.transfer.streams import Device, Stream, StreamFailedError

__all__ = [
    "Acknowledgement",
    "CudaDevice",
    "CudaStream",
    "Device",
    "HostSlots",
    "Indices",
    "LayerCounter",
    "PageTransfers",
    "PoolPair",
    "Stream",
    "StreamFailedError",
    "StreamSimulator",
    "Way",
]
