"""The bridge for SGLang 0.5.23: a storage backend of its `dynamic` kind.

It serves every driver of this project.

```
--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
  "backend_name": "hicache", "module_path": "hicache_storage.engines.sglang", "class_name": "SGLangBridge",
  "interface_v1": 1, "driver": "file", "driver_config": {"path": "/var/cache/hicache"}}'
```

The optional keys are those of `identity.SGLangBridgeConfig`. SGLang is imported with `SGLangBridge`, not
before: configuration and identity do without it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.engines.sglang.bridge import SGLangBridge

__all__ = ["SGLangBridge"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.bridge"), name)
