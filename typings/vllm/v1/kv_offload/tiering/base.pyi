from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
)
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingMetricMetadata,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector

class TransferJob:
    job_id: int
    keys: Collection[OffloadKey]
    chunk_ids: np.ndarray[Any, Any]
    is_promotion: bool
    req_context: ReqContext
    def __init__(
        self,
        job_id: int,
        keys: Collection[OffloadKey],
        chunk_ids: np.ndarray[Any, Any],
        is_promotion: bool,
        req_context: ReqContext,
    ) -> None: ...

class JobResult:
    job_id: int
    success: bool
    successful_keys: Collection[OffloadKey] | None
    def __init__(
        self,
        job_id: int,
        success: bool,
        successful_keys: Collection[OffloadKey] | None = None,
        transfer_time: float | None = None,
        transfer_bytes: int | None = None,
    ) -> None: ...

class SecondaryTierManager(ABC):
    medium: ClassVar[Medium]
    tier_type: str
    locality: Locality | None
    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
    ) -> None: ...
    @property
    def block_size_bytes(self) -> int: ...
    @abstractmethod
    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult: ...
    @abstractmethod
    def submit_store(self, job_metadata: TransferJob) -> None: ...
    @abstractmethod
    def submit_load(self, job_metadata: TransferJob) -> None: ...
    @abstractmethod
    def get_finished_jobs(self) -> Iterable[JobResult]: ...
    @abstractmethod
    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext: ...
    @abstractmethod
    def drain_jobs(self) -> None: ...
    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None: ...
    def on_request_finished(self, req_context: ReqContext) -> None: ...
    def on_schedule_end(self, context: ScheduleEndContext) -> None: ...
    def take_events(self) -> Iterable[OffloadingEvent]: ...
    def shutdown(self) -> None: ...
    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]: ...
    def get_stats(self) -> OffloadingConnectorStats | None: ...
