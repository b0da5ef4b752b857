"""The secondary tier that vLLM loads."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingEvent,
    OffloadingGaugeMetadata,
    OffloadingHistogramMetadata,
    RequestOffloadingContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

from hicache_storage.engines.async_calls import AsyncCalls
from hicache_storage.engines.bridge_storage import RefusedCalls, minor_version, open_storage
from hicache_storage.engines.engine_pool import EnginePool
from hicache_storage.engines.page_events import PageEvents, PageId
from hicache_storage.engines.vllm.identity import (
    DISTRIBUTIONS,
    pool_names,
    row_bytes,
    tier_config,
    tier_identity,
)
from hicache_storage.observability import metric_defs
from hicache_storage.observability.logs import log_like
from hicache_storage.observability.metric_defs import MetricKind
from hicache_storage.spec import (
    AskedScope,
    ConfigError,
    HiCacheStorageExtraInfo,
    PoolName,
    PoolTransfer,
    RemovalScope,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence
    from typing import Any

    import numpy as np
    from vllm.v1.kv_offload.base import (
        OffloadingMetricMetadata,
        OffloadingSpec,
        OffloadKey,
        ReqContext,
        ScheduleEndContext,
    )
    from vllm.v1.kv_offload.config import OffloadingConfig
    from vllm.v1.kv_offload.tiering.backpressure import BackpressureDetector
    from vllm.v1.kv_offload.tiering.base import TransferJob

    from hicache_storage.spec import StorageStats

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    """A job that was submitted, with its keys in their order."""

    keys: list[OffloadKey]
    is_load: bool


@dataclass(frozen=True, slots=True)
class _Moved:
    """Outcome of a job, with an answer for each of its keys."""

    answers: list[bool]
    seconds: float = 0.0


class _Chain:
    """Chunks of one request that vLLM has named so far, by their places in its sequence."""

    def __init__(self) -> None:
        self._ends: dict[OffloadKey, int] = {}
        """Number of tokens up to the end of a chunk."""
        self.asked: dict[OffloadKey, AskedScope] = {}
        """Scopes of the keys that were looked up."""

    def note(self, keys: Iterable[OffloadKey], request: ReqContext) -> None:
        """Note the places of some keys."""
        # vLLM asks for each key of each waiting request in every step.
        for key in keys:
            if key not in self._ends and (end := request.get_offload_key_position(key)) is not None:
                self._ends[key] = end

    def before(self, keys: Sequence[OffloadKey]) -> list[str]:
        """Return the hashes that precede the first of some keys, in the order of the sequence."""
        first = min((self._ends.get(key, 0) for key in keys), default=0)
        earlier = sorted(
            (key for key, end in self._ends.items() if end < first), key=self._ends.__getitem__
        )
        # The groups have chunks of one hash.
        return list(dict.fromkeys(map(_text, earlier)))


class _Lookups(AsyncLookupManager):
    """vLLM's own cache of lookups, answered by one call of the storage for each pool."""

    def __init__(self, tier: HiCacheTier, tier_type: str) -> None:
        self._tier = tier
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        """Answer for each key whether it is stored; called in vLLM's lookup thread."""
        return self._tier.present(keys, req_context)


class _Metrics:
    """The storage's counters under the names that every driver has, for vLLM's `/metrics`: what has
    changed since the last report. Calls are noted in any thread."""

    def __init__(self) -> None:
        self._reported = dict[tuple[str, tuple[str, ...]], float]()
        self._lock = threading.Lock()
        self._durations = list[tuple[tuple[str, ...], float]]()

    def note(self, pools: Iterable[str], operation: str, seconds: float) -> None:
        """Note a call of some pools, as `exists`, `get` or `set`."""
        with self._lock:
            # Plain texts: vLLM refuses to send subclasses to its API server.
            self._durations += [((str(pool), operation), seconds) for pool in pools]

    def take(self, stats: StorageStats) -> OffloadingConnectorStats:
        """Return the increase of each counter, the gauges, and the durations of calls."""
        taken = OffloadingConnectorStats()
        for metric, labels, value in metric_defs.storage_samples(stats):
            key = metric.name, labels
            if metric.kind is MetricKind.GAUGE:
                taken.set_gauge(metric.name, value, labels)
            # A counter that is 0 is reported once, so that Prometheus knows the series.
            elif key not in self._reported or value > self._reported[key]:
                increase = value - self._reported.get(key, 0.0)
                taken.increase_counter(metric.name, increase, labels)
                self._reported[key] = value
        with self._lock:
            durations = self._durations
            self._durations = []
        for of_call, seconds in durations:
            taken.observe_histogram(
                metric_defs.CALL_SECONDS.name, seconds, (stats.driver, *of_call)
            )
        return taken


class HiCacheTier(SecondaryTierManager):
    """Adapter: serves vLLM's secondary tier from a storage of this project.

    Construction fails, with the field to mend, where the configuration cannot be served. After that
    nothing is raised into the engine: each job is reported once, a fault is a miss or a chunk that
    was not stored, logged once for each reason and counted.

    vLLM calls everything but `present` from its scheduler's thread; what may block runs in others.

    Args:
        offloading_spec: vLLM's `TieringOffloadingSpec`.
        primary_kv_view: rows of its CPU tier, (chunks, bytes of a row), int8.
        tier_type: name of the tier.
        backpressure_detector: vLLM's, where it is configured.
        options: the other keys of the entry in `secondary_tiers`; see `TierConfig`.

    Raises:
        ConfigError: the configuration cannot be served; the message says what to change.
    """

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: BackpressureDetector | None = None,
        **options: object,
    ) -> None:
        super().__init__(
            offloading_spec, primary_kv_view, tier_type, backpressure_detector=backpressure_detector
        )
        self._config = tier_config(options)
        log_like(logging.getLogger("vllm"))
        self.locality = Locality(self._config.locality) if self._config.locality else None
        engine, replicated = offloading_spec.config, offloading_spec.replicated_layout
        self._row_bytes = row_bytes(engine, replicated=replicated)
        if not 0 < self._row_bytes <= self.block_size_bytes:
            raise ConfigError(
                f"hicache bridge: a chunk of {self._row_bytes} bytes does not fit vLLM's rows of "
                f"{self.block_size_bytes}; this version of vLLM is not one that the bridge knows"
            )
        identity = tier_identity(
            engine, self._config, replicated=replicated, build=build_of(engine)
        )
        self._names = pool_names(engine.groups)
        assert primary_kv_view.shape is not None
        self._pool: EnginePool | None = EnginePool(
            # Sub-views of two dimensions are not implemented.
            primary_kv_view.cast("B"),
            stride=primary_kv_view.shape[1],
            page_bytes=self._row_bytes,
            layout=identity.layout,
        )
        self._off = ""
        """Reason why nothing is served any more; empty while it is."""
        self._events = deque[OffloadingEvent]()
        """Events that vLLM has not taken yet."""
        self._jobs = dict[int, _Job]()
        self._chains = dict[str, _Chain]()
        self._metrics = _Metrics()
        self._refusals = RefusedCalls("vLLM")
        pools: dict[str, object] = dict.fromkeys(self._names.values(), self._pool)
        self.storage = open_storage(self._config, identity, pools)
        """The storage behind the tier."""
        self._page_events: PageEvents[OffloadKey] | None = None
        if (
            self._config.enable_kv_events
            and offloading_spec.kv_events_config.enable_kv_cache_events
        ):
            self._page_events = PageEvents(self._publish, self._refusals)
            self._page_events.watch(self.storage)
        threads, seconds = self._config.threads, self._config.deadline_seconds
        self._loads = AsyncCalls[_Moved](
            "hicache-load", threads, deadline_seconds=seconds, refusals=self._refusals
        )
        # Of their own, so that a load never waits for stores.
        self._stores = AsyncCalls[_Moved]("hicache-store", threads)
        self._lookups = _Lookups(self, tier_type)

    @classmethod
    def build_metric_definitions(
        cls, extra_config: dict[str, Any]
    ) -> dict[str, OffloadingMetricMetadata]:
        """Declare the storage's metrics to vLLM, also in its API server."""
        return _definitions()

    @property
    def refused_calls(self) -> int:
        """Number of calls that could not be served, and were answered as misses."""
        return self._refusals.count

    # Lookups
    # ----------------------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Ask for the chunks that are computed, as they come."""
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Answer from the lookups that have been made; RETRY where this one has to be."""
        if self._off:
            return LookupResult.MISS
        chain = self._chain(req_context)
        chain.note([key], req_context)
        found = self._lookups.lookup(key, req_context)
        if found is None:
            if key not in chain.asked:
                chain.asked[key] = AskedScope()
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Begin the lookups that were asked for in this step."""
        self._lookups.flush()

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Note the keys of a request, which head the chains that it stores."""
        self._chain(req_context).note(keys, req_context)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request."""
        self._lookups.cleanup(req_context.req_id)
        self._chains.pop(req_context.req_id, None)

    def present(self, keys: Sequence[OffloadKey], request: ReqContext) -> list[bool]:
        """Find out which chunks are stored; a fault is a miss. Blocks."""
        found = [False] * len(keys)
        chain = self._chains.get(request.req_id)
        # vLLM has one thread for all lookups. These keys were asked for in one step.
        asked = None if chain is None else chain.asked.get(keys[0])
        for name, places in self._by_pool(keys).items():
            started = time.monotonic()
            try:
                with asked or AskedScope():
                    answers = self.storage.batch_present(
                        [_text(keys[place]) for place in places],
                        pool=name,
                        extra_info=HiCacheStorageExtraInfo(request_id=request.req_id),
                    )
            except (Exception, SystemExit) as error:  # noqa: BLE001 - counted and logged; it may not end a thread of the engine
                self._refusals.note("batch_present", name, error)
                continue
            self._metrics.note([name], "exists", time.monotonic() - started)
            for place, answer in zip(places, answers, strict=True):
                found[place] = answer
        if self._page_events is not None:
            missed = [key for key, is_there in zip(keys, found, strict=True) if not is_there]
            self._page_events.doubt(self._pages(missed))
        return found

    # Jobs
    # ----------------------------------------------------------------------------------------------

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Begin to store chunks of the CPU tier."""
        self._submit(job_metadata, self._stores)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Begin to load chunks into the CPU tier."""
        self._submit(job_metadata, self._loads)

    def get_finished_jobs(self) -> list[JobResult]:
        """Report each job that has ended since the last call, once."""
        results = list[JobResult]()
        for number, moved in (*self._loads.finished(), *self._stores.finished()):
            job = self._jobs.pop(number)
            kept = [key for key, answer in zip(job.keys, moved.answers, strict=True) if answer]
            if job.is_load and len(kept) < len(job.keys):
                # Here, in the scheduler's thread: vLLM would ask for the same load for ever.
                self._lookups.mark_miss(set(job.keys).difference(kept))
            results.append(
                JobResult(
                    number,
                    success=len(kept) == len(job.keys),
                    successful_keys=kept if job.is_load else None,
                    transfer_time=moved.seconds,
                    transfer_bytes=len(kept) * self._row_bytes,
                )
            )
        return results

    def has_pending_work(self) -> bool:
        """Keep the engine running until the events of all jobs that have ended are taken."""
        return bool(self._events) or (self._page_events is not None and self._page_events.behind)

    def take_events(self) -> list[OffloadingEvent]:
        """Return the chunks that were stored and removed since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def drain_jobs(self) -> None:
        """Wait for every job; vLLM resets its caches next, as it does for new weights."""
        self._loads.wait_idle()
        self._stores.wait_idle()
        if self._config.on_reset == "miss" and not self._off:
            self._off = (
                "vLLM has reset its caches; the weights may be others, and neither vLLM's keys nor "
                "the identity say so"
            )
            logger.warning(
                "hicache bridge: %s. Nothing is served or stored until the engine is started "
                'again; with "on_reset": "keep" the tier goes on with the same chunks',
                self._off,
            )
        if self._page_events is not None:
            # vLLM clears what its listeners know, of all tiers.
            self._page_events.forget(again=not self._off)

    def shutdown(self) -> None:
        """End the threads and close the storage. Idempotent.

        Raises:
            BufferError: a call still has memory of vLLM's, which must not be unmapped.
        """
        with ExitStack() as steps:
            # The last one is called first.
            if self._pool is not None:
                pool = self._pool
                self._pool = None
                steps.callback(pool.release)
            steps.callback(self.storage.close)
            if self._page_events is not None:
                steps.callback(self._page_events.close)
            steps.callback(self._stores.close)
            steps.callback(self._loads.close)
            steps.callback(self._lookups.shutdown)

    def get_stats(self) -> OffloadingConnectorStats:
        """Return what has changed in the storage's counters since the last call."""
        return self._metrics.take(self.storage.get_stats())

    # How it is done
    # ----------------------------------------------------------------------------------------------

    def _chain(self, request: ReqContext) -> _Chain:
        found = self._chains.get(request.req_id)
        if found is None:
            found = self._chains[request.req_id] = _Chain()
        return found

    def _by_pool(self, keys: Sequence[OffloadKey]) -> dict[PoolName, list[int]]:
        """Return the places of the keys of each pool."""
        if len(self._names) == 1:
            return {name: list(range(len(keys))) for name in self._names.values()}
        places = dict[PoolName, list[int]]()
        for place, key in enumerate(keys):
            places.setdefault(self._names[get_offload_group_idx(key)], []).append(place)
        return places

    def _pages(self, keys: Sequence[OffloadKey]) -> list[PageId]:
        return [
            PageId(self.storage, self._names[get_offload_group_idx(key)], _text(key))
            for key in keys
        ]

    def _publish(self, pages: Sequence[OffloadKey], *, removed: bool) -> None:
        self._events.append(
            OffloadingEvent(
                list(pages),
                self.medium,
                removed=removed,
                locality=self.locality,
                # vLLM keeps what it knows of a chunk, such as its tokens, for the removal.
                removal_expected=self.storage.capabilities.removals is not RemovalScope.NONE,
            )
        )

    def _submit(self, metadata: TransferJob, calls: AsyncCalls[_Moved]) -> None:
        keys = list(metadata.keys)
        self._jobs[metadata.job_id] = _Job(keys, metadata.is_promotion)
        chain = self._chain(metadata.req_context)
        chain.note(keys, metadata.req_context)
        call = partial(
            self._move,
            keys,
            metadata.chunk_ids,
            HiCacheStorageExtraInfo(
                prefix_keys=chain.before(keys), request_id=metadata.req_context.req_id
            ),
            writes=calls is self._stores,
        )
        calls.submit(metadata.job_id, call, _Moved([False] * len(keys)))

    def _move(
        self,
        keys: Sequence[OffloadKey],
        chunks: np.ndarray[Any, Any],
        extra_info: HiCacheStorageExtraInfo,
        *,
        writes: bool,
    ) -> _Moved:
        """Load or store the chunks of a job. Blocks."""
        answers = [False] * len(keys)
        if self._off:
            return _Moved(answers)
        places = self._by_pool(keys)
        slots = torch.as_tensor(chunks, dtype=torch.int64)
        transfers = [
            PoolTransfer(name, slots[of_pool], keys=[_text(keys[place]) for place in of_pool])
            for name, of_pool in places.items()
        ]
        started = time.monotonic()
        events = self._page_events
        try:
            move = self.storage.batch_set_v2 if writes else self.storage.batch_get_v2
            with (
                # No request waits for a store: what it spends in the queue does not count.
                AskedScope() if writes else nullcontext(),
                nullcontext() if events is None else events.call(self._pages(keys), keys, answers),
            ):
                moved = move(transfers, extra_info)
                for name, of_pool in places.items():
                    for place, answer in zip(of_pool, moved[name], strict=True):
                        answers[place] = answer
        except (Exception, SystemExit) as error:  # noqa: BLE001 - counted and logged; it may not end a thread of the engine
            self._refusals.note("batch_set_v2" if writes else "batch_get_v2", "", error)
            return _Moved(answers, time.monotonic() - started)
        seconds = time.monotonic() - started
        self._metrics.note(places, "set" if writes else "get", seconds)
        return _Moved(answers, seconds)


def _definitions() -> dict[str, OffloadingMetricMetadata]:
    """Return the metrics of `metric_defs.STORAGE`, as vLLM declares its own."""
    found: dict[str, OffloadingMetricMetadata] = {}
    for metric in metric_defs.STORAGE:
        match metric.kind:
            case MetricKind.COUNTER:
                found[metric.name] = OffloadingCounterMetadata(metric.help, metric.labels)
            case MetricKind.GAUGE:
                found[metric.name] = OffloadingGaugeMetadata(metric.help, metric.labels)
            case MetricKind.HISTOGRAM:
                found[metric.name] = OffloadingHistogramMetadata(
                    metric.help, metric.labels, metric.buckets
                )
    return found


def _text(key: OffloadKey) -> str:
    return get_offload_block_hash(key).hex()


def build_of(engine: OffloadingConfig) -> dict[str, str]:
    """Name vLLM's version, the device, and the format of the canonical layout where it is on.

    A minor version of vLLM may change the order of the bytes of a block. So does the attention
    backend, which a tier is not told; vLLM chooses it by the device, on CPUs by the instruction
    set.
    """
    build = {"vllm": minor_version(*DISTRIBUTIONS), "device": _device()}
    if engine.canonical_layout and engine.kv_cache_layout:
        # Imported here: engines without the canonical layout do not depend on its module.
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
            canonical_format_id,
        )

        build["canonical_format"] = canonical_format_id(engine.kv_cache_layout)
    return build


def _device() -> str:
    kind = str(current_platform.device_type)
    if kind == "cpu":
        return f"cpu {torch.backends.cpu.get_cpu_capability()}"
    capability = current_platform.get_device_capability()
    return kind if capability is None else f"{kind} {capability.as_version_str()}"
