"""Pools in device memory, on any torch device.

Layer by layer as kernels want them, with slots to hand out.

Only the parts that touch tensors import torch, and only when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hicache_storage.pools.device.pages import DevicePages

if TYPE_CHECKING:
    from hicache_storage.pools.device.base import DevicePoolBase
    from hicache_storage.pools.device.indexer import IndexerDevicePool
    from hicache_storage.pools.device.mamba import MambaDevicePool
    from hicache_storage.pools.device.mha import MHADevicePool
    from hicache_storage.pools.device.mla import MLADevicePool

__all__ = [
    "DevicePages",
    "DevicePoolBase",
    "IndexerDevicePool",
    "MHADevicePool",
    "MLADevicePool",
    "MambaDevicePool",
]

_HOMES = {
    "DevicePoolBase": "base",
    "IndexerDevicePool": "indexer",
    "MHADevicePool": "mha",
    "MLADevicePool": "mla",
    "MambaDevicePool": "mamba",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
