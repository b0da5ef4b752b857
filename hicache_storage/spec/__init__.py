"""The HiCacheStorage v2 contract: types, policies, identity, errors, and the abstract storage."""

from hicache_storage.spec.caller import Caller
from hicache_storage.spec.capabilities import Capabilities, Durability, Sharing, StuckReads
from hicache_storage.spec.config import DriverConfig, parse_bytes, parse_config
from hicache_storage.spec.errors import (
    ConfigError,
    DriverConflictError,
    DriverContractError,
    DriverError,
    DriverNotFoundError,
    DriverUnavailableError,
    HiCacheError,
    InvalidIdentityError,
    InvalidPoolError,
    InvalidTransferError,
    SlotError,
    StorageClosedError,
    StorageForkedError,
    StorageTimeoutError,
    StorageUnavailableError,
    UnknownPoolError,
    UnsupportedOperationError,
)
from hicache_storage.spec.host_pool import HostPool, PageGeometry
from hicache_storage.spec.identity import IDENTITY_FIELDS, StorageIdentity
from hicache_storage.spec.policies import PoolPresence, common_hit, covered_pages, leading_pages, legal_endpoints
from hicache_storage.spec.stats import Latency, PoolStats, StorageStats
from hicache_storage.spec.storage import Health, HiCacheStorage
from hicache_storage.spec.transfers import (
    MAX_KEY_BYTES,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

__all__ = [
    "IDENTITY_FIELDS",
    "MAX_KEY_BYTES",
    "Caller",
    "Capabilities",
    "ConfigError",
    "DriverConfig",
    "DriverConflictError",
    "DriverContractError",
    "DriverError",
    "DriverNotFoundError",
    "DriverUnavailableError",
    "Durability",
    "Health",
    "HiCacheError",
    "HiCacheStorage",
    "HiCacheStorageExtraInfo",
    "HostPool",
    "InvalidIdentityError",
    "InvalidPoolError",
    "InvalidTransferError",
    "Latency",
    "PageGeometry",
    "PoolHitPolicy",
    "PoolName",
    "PoolPresence",
    "PoolStats",
    "PoolTransfer",
    "PoolTransferResult",
    "Sharing",
    "SlotError",
    "StorageClosedError",
    "StorageForkedError",
    "StorageIdentity",
    "StorageStats",
    "StorageTimeoutError",
    "StorageUnavailableError",
    "StuckReads",
    "UnknownPoolError",
    "UnsupportedOperationError",
    "common_hit",
    "covered_pages",
    "leading_pages",
    "legal_endpoints",
    "parse_bytes",
    "parse_config",
]
