"""Three-tier cache of hybrid models above a storage.

All ranks take the same decisions.

Names are imported when they are first used: only modules that use tensors import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.hashing import namespace_seed, page_hashes
    from hicache_storage.hybrid.policies import (
        PrefetchPolicy,
        PrefetchRules,
        PrefetchTimeout,
        WritePolicy,
    )
    from hicache_storage.hybrid.pools import HostPoolGroup, HybridIndices, PoolEntry
    from hicache_storage.hybrid.ranks import (
        OtherRankError,
        ParallelConfig,
        RankGroup,
        RankGroupError,
        SingleRank,
        TorchRankGroup,
    )
    from hicache_storage.hybrid.stack import (
        AttentionGeometry,
        HybridStack,
        IndexerGeometry,
        MambaGeometry,
        MLAGeometry,
        StackConfig,
        StorageConfig,
        build_hybrid_stack,
    )
    from hicache_storage.hybrid.storage_io.backups import BackupResult
    from hicache_storage.hybrid.storage_io.calls import ControllerStats
    from hicache_storage.hybrid.storage_io.prefetch import (
        PrefetchOperation,
        PrefetchOutcome,
        PrefetchResult,
    )
    from hicache_storage.hybrid.storage_io.workers import StorageAttachedError

__all__ = [
    "AttentionGeometry",
    "BackupResult",
    "ControllerStats",
    "HostPoolGroup",
    "HybridCacheController",
    "HybridIndices",
    "HybridStack",
    "IndexerGeometry",
    "MLAGeometry",
    "MambaGeometry",
    "OtherRankError",
    "ParallelConfig",
    "PoolEntry",
    "PrefetchOperation",
    "PrefetchOutcome",
    "PrefetchPolicy",
    "PrefetchResult",
    "PrefetchRules",
    "PrefetchTimeout",
    "RankGroup",
    "RankGroupError",
    "SingleRank",
    "StackConfig",
    "StorageAttachedError",
    "StorageConfig",
    "TorchRankGroup",
    "WritePolicy",
    "build_hybrid_stack",
    "namespace_seed",
    "page_hashes",
]

_MODULES = {
    "controller": ("HybridCacheController",),
    "hashing": ("namespace_seed", "page_hashes"),
    "policies": ("PrefetchPolicy", "PrefetchRules", "PrefetchTimeout", "WritePolicy"),
    "pools": ("HostPoolGroup", "HybridIndices", "PoolEntry"),
    "ranks": (
        "OtherRankError",
        "ParallelConfig",
        "RankGroup",
        "RankGroupError",
        "SingleRank",
        "TorchRankGroup",
    ),
    "storage_io.backups": ("BackupResult",),
    "storage_io.calls": ("ControllerStats",),
    "storage_io.prefetch": ("PrefetchOperation", "PrefetchOutcome", "PrefetchResult"),
    "storage_io.workers": ("StorageAttachedError",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'stack')}"), name)


def __dir__() -> list[str]:
    return __all__
