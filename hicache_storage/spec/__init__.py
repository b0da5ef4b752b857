"""The HiCacheStorage v2 contract: types, policies, identity, errors, and the abstract storage.

What needs msgspec is imported when it is first used: pools and transfers do without it.
"""

import importlib
from typing import TYPE_CHECKING

from hicache_storage.spec.calls import (
    AskedScope,
    CancellationToken,
    FaultScope,
    HiCacheStorageExtraInfo,
    current_call_info,
    from_memory,
    note_answer_from_memory,
    note_fault,
    seconds_since_asked,
    with_call_info,
)
from hicache_storage.spec.capabilities import Capabilities, Durability, HungReads, Sharing
from hicache_storage.spec.errors import (
    ConfigError,
    DriverContractError,
    DriverError,
    DriverNotFoundError,
    DriverUnavailableError,
    HiCacheError,
    InvalidIdentityError,
    InvalidPoolError,
    InvalidTransferError,
    MayHangError,
    SlotError,
    StorageClosedError,
    StorageForkedError,
    StorageRefusedError,
    StorageTimeoutError,
    StorageUnavailableError,
    UnknownPoolError,
    UnsupportedOperationError,
    is_refusal,
)
from hicache_storage.spec.identity import IDENTITY_FIELDS, StorageIdentity
from hicache_storage.spec.policies import PoolPresence, common_hit, leading_pages
from hicache_storage.spec.removals import Removal, RemovalReason, Removals, RemovalScope
from hicache_storage.spec.stats import Latency, MissReason, PoolStats, StorageStats
from hicache_storage.spec.storage import Health, HiCacheStorage
from hicache_storage.spec.transfers import (
    MAX_KEY_BYTES,
    HostPool,
    PageGeometry,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

if TYPE_CHECKING:
    from hicache_storage.spec.config import DriverConfig, parse_bytes, parse_config

__all__ = [
    "IDENTITY_FIELDS",
    "MAX_KEY_BYTES",
    "AskedScope",
    "CancellationToken",
    "Capabilities",
    "ConfigError",
    "DriverConfig",
    "DriverContractError",
    "DriverError",
    "DriverNotFoundError",
    "DriverUnavailableError",
    "Durability",
    "FaultScope",
    "Health",
    "HiCacheError",
    "HiCacheStorage",
    "HiCacheStorageExtraInfo",
    "HostPool",
    "HungReads",
    "InvalidIdentityError",
    "InvalidPoolError",
    "InvalidTransferError",
    "Latency",
    "MayHangError",
    "MissReason",
    "PageGeometry",
    "PoolHitPolicy",
    "PoolName",
    "PoolPresence",
    "PoolStats",
    "PoolTransfer",
    "PoolTransferResult",
    "Removal",
    "RemovalReason",
    "RemovalScope",
    "Removals",
    "Sharing",
    "SlotError",
    "StorageClosedError",
    "StorageForkedError",
    "StorageIdentity",
    "StorageRefusedError",
    "StorageStats",
    "StorageTimeoutError",
    "StorageUnavailableError",
    "UnknownPoolError",
    "UnsupportedOperationError",
    "common_hit",
    "current_call_info",
    "from_memory",
    "is_refusal",
    "leading_pages",
    "note_answer_from_memory",
    "note_fault",
    "parse_bytes",
    "parse_config",
    "seconds_since_asked",
    "with_call_info",
]

_HOMES = {"DriverConfig": "config", "parse_bytes": "config", "parse_config": "config"}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
