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

__all__ = [
    "CacheInUseError",
    "CacheUsage",
    "HiMambaRadixCache",
    "LoadResult",
    "MatchResult",
    "Prefix",
    "PrefixLock",
    "StalePrefixError",
]
