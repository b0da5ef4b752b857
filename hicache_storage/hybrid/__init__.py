"""Three-tier cache of hybrid models above a storage.

All ranks take the same decisions.

Names are imported when they are first used: only modules that use tensors import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.copies.operations import CacheOperation
    from hicache_storage.hybrid.hashing import namespace_seed, page_hashes
    from hicache_storage.hybrid.policies import (
        PrefetchPolicy,
        PrefetchRules,
        PrefetchTimeout,
        WritePolicy,
    )
    from hicache_storage.hybrid.pools.group import HostPoolGroup, PoolEntry
    from hicache_storage.hybrid.pools.indices import HybridIndices
    from hicache_storage.hybrid.ranks.consistency import OtherRankError
    from hicache_storage.hybrid.ranks.group import RankGroup, RankGroupError, SingleRank
    from hicache_storage.hybrid.ranks.parallel import ParallelConfig
    from hicache_storage.hybrid.ranks.torch_group import TorchRankGroup
    from hicache_storage.hybrid.stack import (
        AttentionGeometry,
        DSAHybridStack,
        DSAStackConfig,
        HybridStack,
        IndexerGeometry,
        MambaGeometry,
        MambaHybridStack,
        MambaStackConfig,
        MLAGeometry,
        StorageConfig,
        build_dsa_hybrid_stack,
        build_mamba_hybrid_stack,
    )
    from hicache_storage.hybrid.stats import ControllerStats
    from hicache_storage.hybrid.storage_io.binding import StorageAttachedError
    from hicache_storage.hybrid.storage_io.prefetch import PrefetchOperation
    from hicache_storage.hybrid.storage_io.results import (
        BackupResult,
        PrefetchOutcome,
        PrefetchResult,
    )

__all__ = [
    "AttentionGeometry",
    "BackupResult",
    "CacheOperation",
    "ControllerStats",
    "DSAHybridStack",
    "DSAStackConfig",
    "HostPoolGroup",
    "HybridCacheController",
    "HybridIndices",
    "HybridStack",
    "IndexerGeometry",
    "MLAGeometry",
    "MambaGeometry",
    "MambaHybridStack",
    "MambaStackConfig",
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
    "StorageAttachedError",
    "StorageConfig",
    "TorchRankGroup",
    "WritePolicy",
    "build_dsa_hybrid_stack",
    "build_mamba_hybrid_stack",
    "namespace_seed",
    "page_hashes",
]

_HOMES = {
    "AttentionGeometry": "stack",
    "BackupResult": "storage_io.results",
    "CacheOperation": "copies.operations",
    "ControllerStats": "stats",
    "DSAHybridStack": "stack",
    "DSAStackConfig": "stack",
    "HostPoolGroup": "pools.group",
    "HybridCacheController": "controller",
    "HybridIndices": "pools.indices",
    "HybridStack": "stack",
    "IndexerGeometry": "stack",
    "MLAGeometry": "stack",
    "MambaGeometry": "stack",
    "MambaHybridStack": "stack",
    "MambaStackConfig": "stack",
    "OtherRankError": "ranks.consistency",
    "ParallelConfig": "ranks.parallel",
    "PoolEntry": "pools.group",
    "PrefetchOperation": "storage_io.prefetch",
    "PrefetchOutcome": "storage_io.results",
    "PrefetchPolicy": "policies",
    "PrefetchResult": "storage_io.results",
    "PrefetchRules": "policies",
    "PrefetchTimeout": "policies",
    "RankGroup": "ranks.group",
    "RankGroupError": "ranks.group",
    "SingleRank": "ranks.group",
    "StorageAttachedError": "storage_io.binding",
    "StorageConfig": "stack",
    "TorchRankGroup": "ranks.torch_group",
    "WritePolicy": "policies",
    "build_dsa_hybrid_stack": "stack",
    "build_mamba_hybrid_stack": "stack",
    "namespace_seed": "hashing",
    "page_hashes": "hashing",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
