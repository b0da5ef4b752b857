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
    )
    from hicache_storage.pools.host.base import HostPoolBase
    from hicache_storage.pools.host.indexer import IndexerHostPool
    from hicache_storage.pools.host.mamba import MambaHostPool
    from hicache_storage.pools.host.mha import MHAHostPool
    from hicache_storage.pools.host.mla import MLAHostPool
    from hicache_storage.pools.host.slots import SlotAllocator
    from hicache_storage.pools.memory import byte_view, host_tensor

__all__ = [
    "DevicePages",
    "DevicePoolBase",
    "HostPoolBase",
    "IndexerDevicePool",
    "IndexerHostPool",
    "MHADevicePool",
    "MHAHostPool",
    "MLADevicePool",
    "MLAHostPool",
    "MambaDevicePool",
    "MambaHostPool",
    "PageAccess",
    "SlotAllocator",
    "byte_view",
    "host_tensor",
    "page_access",
]

_HOMES = {
    "DevicePages": "device",
    "DevicePoolBase": "device",
    "HostPoolBase": "host.base",
    "IndexerDevicePool": "device",
    "IndexerHostPool": "host.indexer",
    "MHADevicePool": "device",
    "MHAHostPool": "host.mha",
    "MLADevicePool": "device",
    "MLAHostPool": "host.mla",
    "MambaDevicePool": "device",
    "MambaHostPool": "host.mamba",
    "SlotAllocator": "host.slots",
    "byte_view": "memory",
    "host_tensor": "memory",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
