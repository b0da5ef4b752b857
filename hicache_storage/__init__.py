"""Store LLM KV caches outside the GPU: the HiCacheStorage v2 contract, and what is built on it.

```python
from hicache_storage import StorageIdentity, create_storage

identity = StorageIdentity(model="my-model", kv_dtype="bfloat16", page_size=64, layout="page_first")
with create_storage("file", identity, {"path": "/data/kv"}) as storage:
    storage.register_mem_host_pool_v2(pool, "kv")
    ...
```
"""

from hicache_storage.hookspecs import DriverSpec, hookimpl
from hicache_storage.layers import StorageOptions
from hicache_storage.plugins import create_storage
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
