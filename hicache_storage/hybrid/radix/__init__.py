"""Radix cache of hybrid models: prefixes on three tiers, reusable at checkpoints."""

from hicache_storage.hybrid.radix.cache import CacheInUseError, HiMambaRadixCache
from hicache_storage.hybrid.radix.config import RadixCacheConfig, checkpoint_grid
from hicache_storage.hybrid.radix.eviction import Evicted
from hicache_storage.hybrid.radix.lru import DeviceLRUList, HostLRUList
from hicache_storage.hybrid.radix.results import (
    CacheUsage,
    InsertResult,
    LoadResult,
    MatchResult,
    Prefix,
    PrefixLock,
    StalePrefixError,
)
from hicache_storage.hybrid.radix.tiers import DeviceSlots, Prefetch, TierController

__all__ = [
    "CacheInUseError",
    "CacheUsage",
    "DeviceLRUList",
    "DeviceSlots",
    "Evicted",
    "HiMambaRadixCache",
    "HostLRUList",
    "InsertResult",
    "LoadResult",
    "MatchResult",
    "Prefetch",
    "Prefix",
    "PrefixLock",
    "RadixCacheConfig",
    "StalePrefixError",
    "TierController",
    "checkpoint_grid",
]
