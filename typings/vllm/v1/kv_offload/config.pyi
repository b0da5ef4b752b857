from collections.abc import Mapping

class OffloadingGroupConfig:
    tokens_per_block: int
    layer_names: tuple[str, ...]

class OffloadingModelConfig:
    name: str
    dtype: str

class OffloadingCacheConfig:
    tokens_per_hash: int
    blocks_per_chunk: int

class OffloadingParallelConfig:
    world_size: int
    tp_size: int
    pp_size: int
    pcp_size: int
    dcp_size: int
    is_parallelism_agnostic: bool

class OffloadingConfig:
    groups: tuple[OffloadingGroupConfig, ...]
    worker_kv_bytes_per_block: int
    extra_config: Mapping[str, object]
    engine_id: str
    model: OffloadingModelConfig
    cache: OffloadingCacheConfig
    parallel: OffloadingParallelConfig
    canonical_layout: bool
    kv_cache_layout: str | None
