"""Store LLM KV caches outside the GPU: the HiCacheStorage v2 contract, and what is built on it.

```python
from hicache_storage import StorageIdentity, create_storage

identity = StorageIdentity(model="my-model", kv_dtype="bfloat16", page_size=64, layout="page_first")
with create_storage("file", identity, {"path": "/data/kv"}) as storage:
    storage.register_mem_host_pool_v2(pool, "kv")
    ...
```
"""

import importlib
from typing import TYPE_CHECKING

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.spec import (
    Capabilities,
    HiCacheError,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageIdentity,
)

if TYPE_CHECKING:
    from hicache_storage.layers import StorageOptions
    from hicache_storage.plugins import create_storage

__all__ = [
    "Capabilities",
    "DriverSpec",
    "HiCacheError",
    "HiCacheStorage",
    "HiCacheStorageExtraInfo",
    "PoolHitPolicy",
    "PoolName",
    "PoolTransfer",
    "PoolTransferResult",
    "StorageIdentity",
    "StorageOptions",
    "create_storage",
    "hookimpl",
]

# What only a storage needs is imported when one is made; pools and transfers do without it.
_HOMES = {"StorageOptions": "layers", "create_storage": "plugins"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
