"""Three-tier cache of hybrid models above a storage.

All ranks take the same decisions. Needs torch.
"""

from hicache_storage.hybrid.controller import HybridCacheController
from hicache_storage.hybrid.hashing import namespace_seed, page_hashes
from hicache_storage.hybrid.policies import (
    PrefetchPolicy,
    PrefetchRules,
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
from hicache_storage.hybrid.stack.config import StackConfig
from hicache_storage.hybrid.stack.stack import HybridStack, build_hybrid_stack
from hicache_storage.hybrid.storage_io.backups import BackupResult
from hicache_storage.hybrid.storage_io.calls import ControllerStats
from hicache_storage.hybrid.storage_io.prefetch import PrefetchOperation
from hicache_storage.hybrid.storage_io.workers import StorageAttachedError
from hicache_storage.pools import AttentionGeometry, IndexerGeometry, MambaGeometry, MLAGeometry

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
    "PrefetchPolicy",
    "PrefetchRules",
    "RankGroup",
    "RankGroupError",
    "SingleRank",
    "StackConfig",
    "StorageAttachedError",
    "TorchRankGroup",
    "WritePolicy",
    "build_hybrid_stack",
    "namespace_seed",
    "page_hashes",
]
