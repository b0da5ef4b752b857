"""Host and device pools: their memory, slots and layouts.

`page_access` gives a storage the pages of any host pool.

Only the parts that touch tensors import torch, and only when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hicache_storage.pools.access import PageAccess
from hicache_storage.pools.adapter import page_access

if TYPE_CHECKING:
    from hicache_storage.pools.device import (
        DevicePages,
        DevicePoolBase,
        IndexerDevicePool,
        MambaDevicePool,
        MHADevicePool,
        MLADevicePool,
        device_pool,
    )
    from hicache_storage.pools.host import (
        HostPoolBase,
        IndexerHostPool,
        MambaHostPool,
        MHAHostPool,
        MLAHostPool,
        host_pool,
    )
    from hicache_storage.pools.memory import byte_view, host_tensor
    from hicache_storage.pools.shapes import (
        AttentionGeometry,
        IndexerGeometry,
        MambaGeometry,
        MLAGeometry,
        PoolGeometry,
    )
    from hicache_storage.pools.slots import SlotAllocator

__all__ = [
    "AttentionGeometry",
    "DevicePages",
    "DevicePoolBase",
    "HostPoolBase",
    "IndexerDevicePool",
    "IndexerGeometry",
    "IndexerHostPool",
    "MHADevicePool",
    "MHAHostPool",
    "MLADevicePool",
    "MLAGeometry",
    "MLAHostPool",
    "MambaDevicePool",
    "MambaGeometry",
    "MambaHostPool",
    "PageAccess",
    "PoolGeometry",
    "SlotAllocator",
    "byte_view",
    "device_pool",
    "host_pool",
    "host_tensor",
    "page_access",
]

_HOMES = {
    "AttentionGeometry": "shapes",
    "DevicePages": "device",
    "DevicePoolBase": "device",
    "HostPoolBase": "host",
    "IndexerDevicePool": "device",
    "IndexerGeometry": "shapes",
    "IndexerHostPool": "host",
    "MHADevicePool": "device",
    "MHAHostPool": "host",
    "MLADevicePool": "device",
    "MLAGeometry": "shapes",
    "MLAHostPool": "host",
    "MambaDevicePool": "device",
    "MambaGeometry": "shapes",
    "MambaHostPool": "host",
    "PoolGeometry": "shapes",
    "SlotAllocator": "slots",
    "byte_view": "memory",
    "device_pool": "device",
    "host_pool": "host",
    "host_tensor": "memory",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
