"""The bridge for LMCache 0.5.6: an L2 adapter of its multi-process server.

It serves every driver of this project.

```
lmcache server --l2-adapter '{"type": "plugin", "module_path": "hicache_storage.engines.lmcache",
  "class_name": "HiCacheL2Adapter", "adapter_params": {"driver": "file", "driver_config": {"path": "/var/cache/hicache"}}}'
```

The optional keys of `adapter_params` are those of `identity.AdapterConfig`. LMCache is imported with
`HiCacheL2Adapter`, not before: configuration and identity do without it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.engines.lmcache.adapter import HiCacheL2Adapter

__all__ = ["HiCacheL2Adapter"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.adapter"), name)
