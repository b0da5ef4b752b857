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
    from hicache_storage.pools.device import DevicePages, DevicePool
    from hicache_storage.pools.host import PagedHostPool
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
    "DevicePool",
    "IndexerGeometry",
    "MLAGeometry",
    "MambaGeometry",
    "PageAccess",
    "PagedHostPool",
    "PoolGeometry",
    "SlotAllocator",
    "byte_view",
    "host_tensor",
    "page_access",
]

_MODULES = ("shapes", "memory", "slots", "host", "device")
"""Modules of the names that are imported when they are first used."""


def __getattr__(name: str) -> object:
    for module in _MODULES if name in __all__ else ():
        found = getattr(importlib.import_module(f"{__name__}.{module}"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
