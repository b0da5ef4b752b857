"""Radix cache of hybrid models: prefixes on three tiers, reusable at checkpoints."""

from hicache_storage.hybrid.radix.cache import (
    CacheInUseError,
    CacheUsage,
    HiMambaRadixCache,
)
from hicache_storage.hybrid.radix.prefixes import (
    LoadResult,
    MatchResult,
    Prefix,
    PrefixLock,
    StalePrefixError,
)
from hicache_storage.hybrid.radix.slots import Evicted

__all__ = [
    "CacheInUseError",
    "CacheUsage",
    "Evicted",
    "HiMambaRadixCache",
    "LoadResult",
    "MatchResult",
    "Prefix",
    "PrefixLock",
    "StalePrefixError",
]
