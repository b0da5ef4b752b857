from collections.abc import Collection, Sequence
from enum import Enum
from typing import NamedTuple, NewType

from vllm.v1.kv_offload.config import OffloadingConfig

OffloadKey = NewType("OffloadKey", bytes)

def make_offload_key(block_hash: bytes, group_idx: int) -> OffloadKey: ...
def get_offload_block_hash(key: OffloadKey) -> bytes: ...
def get_offload_group_idx(key: OffloadKey) -> int: ...

class Medium(Enum):
    CPU = "CPU"
    STORAGE = "STORAGE"

class Locality(Enum):
    LOCAL = "LOCAL"
    REMOTE = "REMOTE"

class LookupResult(Enum):
    MISS = 1
    HIT = 2
    HIT_PENDING = 3
    RETRY = 4

class ReqContext:
    req_id: str
    def __init__(self, req_id: str) -> None: ...
    def set_offload_key_position(self, key: OffloadKey, end_token: int) -> None: ...
    def get_offload_key_position(self, key: OffloadKey) -> int | None: ...

class RequestOffloadingContext: ...

class ScheduleEndContext(NamedTuple):
    new_req_ids: Collection[str]
    preempted_req_ids: Collection[str]

class OffloadingEvent:
    def __init__(
        self,
        keys: list[OffloadKey],
        medium: Medium,
        removed: bool,
        locality: Locality | None = None,
        ownership: str | None = None,
        removal_expected: bool = False,
    ) -> None: ...

class OffloadingMetricMetadata:
    def __init__(self, documentation: str, labelnames: tuple[str, ...] = ()) -> None: ...

class OffloadingCounterMetadata(OffloadingMetricMetadata): ...
class OffloadingGaugeMetadata(OffloadingMetricMetadata): ...

class OffloadingHistogramMetadata(OffloadingMetricMetadata):
    def __init__(
        self,
        documentation: str,
        labelnames: tuple[str, ...] = (),
        buckets: Sequence[float] | None = None,
    ) -> None: ...

class OffloadingKVEventsConfig:
    enable_kv_cache_events: bool
    def __init__(
        self, *, enable_kv_cache_events: bool, self_describing_kv_events: bool
    ) -> None: ...

class OffloadingSpec:
    config: OffloadingConfig
    replicated_layout: bool
    kv_events_config: OffloadingKVEventsConfig
