"""Copies between device and host memory on streams.

The protocol, CUDA, and a simulator for machines without a GPU.

Only what touches CUDA imports torch, and only when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hicache_storage.transfer.engine import Acknowledgement, LayerCounter, PageTransfers
from hicache_storage.transfer.host_slots import HostSlots
from hicache_storage.transfer.plan import Way
from hicache_storage.transfer.pool_copies import Indices, PoolPair
from hicache_storage.transfer.simulator import StreamSimulator
from hicache_storage.transfer.streams import Device, Event, Stream, StreamFailedError

if TYPE_CHECKING:
    from hicache_storage.transfer.cuda.device import CudaDevice, CudaStream

__all__ = [
    "Acknowledgement",
    "CudaDevice",
    "CudaStream",
    "Device",
    "Event",
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


def __getattr__(name: str) -> object:
    if name not in ("CudaDevice", "CudaStream"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.cuda.device"), name)


def __dir__() -> list[str]:
    return __all__
