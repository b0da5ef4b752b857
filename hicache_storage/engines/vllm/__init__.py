"""The bridge for vLLM 0.32 and 0.33: a secondary tier of its `OffloadingConnector`.

It serves every driver of this project.

```
--kv-transfer-config '{"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
  "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240, "secondary_tiers": [{
    "type": "HiCacheTier", "module_path": "hicache_storage.engines.vllm",
    "driver": "file", "driver_config": {"path": "/var/cache/hicache"}}]}}'
```

The optional keys are those of `identity.TierConfig`. vLLM is imported with `HiCacheTier`, not before:
configuration and identity do without it.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.engines.vllm.tier import HiCacheTier

__all__ = ["HiCacheTier"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.tier"), name)
