# What the bridge uses of SGLang 0.5.23, so that it type-checks without it.
from collections.abc import Sequence
from enum import StrEnum

import torch

class HiCacheStorageConfig:
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    attn_cp_rank: int
    attn_cp_size: int
    is_mla_model: bool
    enable_storage_metrics: bool
    model_name: str | None
    tp_lcm_size: int | None
    should_split_heads: bool
    dp_rank: int
    extra_config: dict[str, object] | None
    dcp_size: int
    dcp_rank: int

class HiCacheStorageExtraInfo:
    prefix_keys: list[str] | None
    extra_info: dict[str, object] | None

class PoolName(StrEnum):
    KV = "kv"

class PoolHitPolicy(StrEnum):
    ALL_PAGES = "all_pages"

class PoolTransfer:
    name: PoolName
    host_indices: torch.Tensor | None
    device_indices: torch.Tensor | None
    keys: list[str] | None
    hit_policy: PoolHitPolicy
    nodes_to_load: list[object] | None
    indices_from_pool: PoolName | None
    block_pages: int
    group_pages: int

class PoolTransferResult:
    kv_hit_pages: int
    extra_pool_hit_pages: dict[str, int]
    restorable_prefix_pages: list[int] | None
    def __init__(
        self,
        kv_hit_pages: int,
        extra_pool_hit_pages: dict[str, int],
        restorable_prefix_pages: list[int] | None = None,
    ) -> None: ...

class HiCacheStorage:
    def register_mem_pool_host(self, mem_pool_host: object) -> None: ...
    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None: ...
    def on_host_pools_registered(self) -> None: ...
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int: ...
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult: ...
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]: ...
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]: ...
    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]: ...
    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]: ...
    def get(
        self, key: str, target_location: object = None, target_sizes: object = None
    ) -> torch.Tensor | None: ...
    def batch_get(
        self, keys: list[str], target_locations: object = None, target_sizes: object = None
    ) -> Sequence[torch.Tensor | None]: ...
    def set(
        self,
        key: str,
        value: object = None,
        target_location: object = None,
        target_sizes: object = None,
    ) -> bool: ...
    def batch_set(
        self,
        keys: list[str],
        values: object = None,
        target_locations: object = None,
        target_sizes: object = None,
    ) -> bool: ...
    def exists(self, key: str) -> bool: ...
    def clear(self) -> None: ...
    def get_stats(self) -> object: ...
