"""Complete cache of a hybrid model, built from one config."""

from hicache_storage.hybrid.stack.builders import build_dsa_hybrid_stack, build_mamba_hybrid_stack
from hicache_storage.hybrid.stack.config import (
    DSAStackConfig,
    MambaStackConfig,
    StackConfig,
    StorageConfig,
)
from hicache_storage.hybrid.stack.stack import DSAHybridStack, HybridStack, MambaHybridStack
from hicache_storage.pools import (
    AttentionGeometry,
    IndexerGeometry,
    MambaGeometry,
    MLAGeometry,
    PoolGeometry,
)

__all__ = [
    "AttentionGeometry",
    "DSAHybridStack",
    "DSAStackConfig",
    "HybridStack",
    "IndexerGeometry",
    "MLAGeometry",
    "MambaGeometry",
    "MambaHybridStack",
    "MambaStackConfig",
    "PoolGeometry",
    "StackConfig",
    "StorageConfig",
    "build_dsa_hybrid_stack",
    "build_mamba_hybrid_stack",
]
