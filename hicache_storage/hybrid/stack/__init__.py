"""Complete cache of a hybrid model, built from one config."""

from hicache_storage.hybrid.stack.builders import build_hybrid_stack
from hicache_storage.hybrid.stack.config import StackConfig, StorageConfig
from hicache_storage.hybrid.stack.stack import HybridStack
from hicache_storage.pools import (
    AttentionGeometry,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
    PoolGeometry,
)

__all__ = [
    "AttentionGeometry",
    "HybridStack",
    "IndexerGeometry",
    "MLAGeometry",
    "MambaGeometry",
    "PoolGeometry",
    "StackConfig",
    "StorageConfig",
    "build_hybrid_stack",
]
