"""The three-tier cache of hybrid models above a storage: pools as one, copies, prefetch and backup, agreed by all ranks.

Only what touches tensors imports torch, and only when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.hybrid.agreement import Agreement, AgreementError, GroupAgreement, SingleRank
    from hicache_storage.hybrid.alike import OtherRankError
    from hicache_storage.hybrid.attachment import StorageAttachedError
    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.groups import HostPoolGroup, PoolEntry
    from hicache_storage.hybrid.hashing import namespace_seed, page_hashes
    from hicache_storage.hybrid.indices import BackupResult, HybridIndices, PrefetchOutcome, PrefetchResult
    from hicache_storage.hybrid.operations import CacheOperation
    from hicache_storage.hybrid.parallel import ParallelConfig
    from hicache_storage.hybrid.policies import PrefetchPolicy, PrefetchRules, PrefetchTimeout, WritePolicy
    from hicache_storage.hybrid.prefetch import PrefetchOperation
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
    from hicache_storage.hybrid.transfers import HybridLayerCounter

__all__ = [
    "Agreement",
    "AgreementError",
    "AttentionGeometry",
    "BackupResult",
    "CacheOperation",
    "ControllerStats",
    "DSAHybridStack",
    "DSAStackConfig",
    "GroupAgreement",
    "HostPoolGroup",
    "HybridCacheController",
    "HybridIndices",
    "HybridLayerCounter",
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
    "SingleRank",
    "StorageAttachedError",
    "StorageConfig",
    "WritePolicy",
    "build_dsa_hybrid_stack",
    "build_mamba_hybrid_stack",
    "namespace_seed",
    "page_hashes",
]

_HOMES = {
    "Agreement": "agreement",
    "AgreementError": "agreement",
    "AttentionGeometry": "stack",
    "BackupResult": "indices",
    "CacheOperation": "operations",
    "ControllerStats": "stats",
    "DSAHybridStack": "stack",
    "DSAStackConfig": "stack",
    "GroupAgreement": "agreement",
    "HostPoolGroup": "groups",
    "HybridCacheController": "controller",
    "HybridIndices": "indices",
    "HybridLayerCounter": "transfers",
    "HybridStack": "stack",
    "IndexerGeometry": "stack",
    "MLAGeometry": "stack",
    "MambaGeometry": "stack",
    "MambaHybridStack": "stack",
    "MambaStackConfig": "stack",
    "OtherRankError": "alike",
    "ParallelConfig": "parallel",
    "PoolEntry": "groups",
    "PrefetchOperation": "prefetch",
    "PrefetchOutcome": "indices",
    "PrefetchPolicy": "policies",
    "PrefetchResult": "indices",
    "PrefetchRules": "policies",
    "PrefetchTimeout": "policies",
    "SingleRank": "agreement",
    "StorageAttachedError": "attachment",
    "StorageConfig": "stack",
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
