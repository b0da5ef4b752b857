"""`TierStorage`: adapts a secondary tier of vLLM to the contract.

One storage is one replica of an engine: its configuration, its scheduler, its CPU tier, and the tier
under test. A row of the CPU tier is a page, and holds the bytes of all workers; the pools of a case
are KV cache groups. What vLLM would load it looks up first, and it stores without asking.
"""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    OffloadKey,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from hicache_conformance.interfaces.foreign_storage import element_type
from hicache_conformance.interfaces.presence_storage import (
    START_SECONDS,
    EngineThread,
    PageMemory,
    PresenceStorage,
)
from hicache_conformance.model.case import Violation
from hicache_storage.spec import StorageIdentity

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence


AnswerT = TypeVar("AnswerT")

IDENTITY: Final = StorageIdentity(
    model="model", kv_dtype="bfloat16", page_size=16, layout="page_first"
)
ROW_ALIGNMENT: Final = 4096
"""vLLM pads the rows of its CPU tier to whole pages of memory."""
TURN_SECONDS: Final = 0.0003
"""Pause between two steps of the scheduler, while something is waited for."""
MAX_LOADS: Final = 8
"""Loads of one key by one request, each failed, after which it is taken for an endless loop."""
LAYERS: Final = 4
"""Of a model whose identity names no range."""


@dataclass(frozen=True, kw_only=True)
class TierSpec:
    """What a tier reads of vLLM's `TieringOffloadingSpec`, which needs a whole engine."""

    config: OffloadingConfig
    kv_events_config: OffloadingKVEventsConfig = field(
        default_factory=lambda: OffloadingKVEventsConfig(
            enable_kv_cache_events=False, self_describing_kv_events=False
        )
    )

    @property
    def blocks_per_chunk(self) -> int:
        """Blocks of a chunk."""
        return self.config.cache.blocks_per_chunk

    @property
    def replicated_layout(self) -> bool:
        """Whether all workers hold the same bytes, and a row has them once."""
        return self.config.replicated_layout

    @property
    def extra_config(self) -> Mapping[str, Any]:
        """The connector's own options."""
        return self.config.extra_config


def offloading_config(
    *,
    worker_bytes: int,
    layers: Sequence[tuple[int, Sequence[str]]] = ((0, ("layers.0",)),),
    identity: StorageIdentity = IDENTITY,
    layout: str = "LBHNC",
    kv_events: bool = False,
) -> OffloadingConfig:
    """vLLM's configuration of a scheduler whose model runner is V1.

    Args:
        worker_bytes: bytes of a block in one worker.
        layers: number of each KV cache group, and names of its layers.
        identity: model, element type, tokens of a block, and workers of each kind.
        layout: of the KV cache.
        kv_events: vLLM publishes KV cache events.
    """
    return OffloadingConfig(
        groups=tuple(
            OffloadingGroupConfig(
                tokens_per_block=identity.page_size, layer_names=tuple(names), group_id=group
            )
            for group, names in layers
        ),
        worker_kv_bytes_per_block=worker_bytes,
        enable_kv_cache_events=kv_events,
        extra_config={},
        engine_id="engine",
        model=OffloadingModelConfig(name=identity.model, dtype=identity.kv_dtype),
        cache=OffloadingCacheConfig(tokens_per_hash=identity.page_size, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=identity.tp_size * identity.pp_size * identity.cp_size,
            tp_size=identity.tp_size,
            pp_size=identity.pp_size,
            pcp_size=identity.cp_size,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            # As vLLM 0.32 and 0.33 answer for one group of full attention.
            is_parallelism_agnostic=(
                len(layers) == 1 and identity.cp_size == 1 and not identity.kv_replicated
            ),
        ),
        replicated_layout=identity.kv_replicated,
        kv_cache_layout=layout,
    )


class Rows:
    """Rows of a CPU tier, as tiers are given them: (chunks, bytes of a row), int8."""

    def __init__(self, chunks: int, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        row = -(-page_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT
        # vLLM's region is mapped, too; so rows begin at whole pages of memory.
        self.memory = mmap.mmap(-1, chunks * row)
        self.array = np.frombuffer(self.memory, np.int8).reshape(chunks, row)
        self.view: memoryview = self.array.data

    def part(self, length: int, chunk: int) -> memoryview:
        """The first bytes of a row, to be read and written."""
        return self.array[chunk, :length].view(np.uint8).data

    def release(self) -> None:
        """Let go of the memory; fails where the tier has kept some of it."""
        self.view.release()
        del self.array
        self.memory.close()


class Scheduler:
    """Calls a tier as the thread of vLLM's scheduler does, step by step."""

    def __init__(self, entry: Mapping[str, object], rows: Rows, spec: TierSpec) -> None:
        self._rows = rows
        self._tokens = spec.config.cache.tokens_per_hash
        # vLLM's own cache of lookups answers a request by what another that waits was told before;
        # with one at a time, an answer is about the store.
        self._asking = threading.Lock()
        self._numbers = itertools.count()
        self._results = dict[int, JobResult | None]()
        """By job; None until it is reported."""
        self._loads = list[TransferJob]()
        """Submitted when the step ends, as vLLM does."""
        self._new = list[str]()
        self._thread = EngineThread("vllm-scheduler", self._end_step)
        try:
            self.tier: SecondaryTierManager = self._thread.do(
                lambda: SecondaryTierFactory.create_secondary_tier(dict(entry), rows.view, spec),
                patience=START_SECONDS,
            )
        except BaseException:
            self._thread.close()
            raise

    def look_up(self, keys: Sequence[OffloadKey], before: int) -> list[bool]:
        """Ask for keys until each has an answer."""
        request = self._request(keys, before)
        with self._asking:
            return self._thread.run(self._served(request, self._resolved(keys, request)))

    def load(self, keys: Sequence[OffloadKey], chunks: Sequence[int], before: int) -> list[bool]:
        """Look keys up, and load those that are there into chunks; whether each was loaded."""
        request = self._request(keys, before)
        with self._asking:
            return self._thread.run(self._served(request, self._promoted(keys, chunks, request)))

    def store(self, keys: Sequence[OffloadKey], chunks: Sequence[int], before: int) -> bool:
        """Store chunks; vLLM is told of a job as a whole."""
        request = self._request(keys, before)
        steps = self._transferred(keys, chunks, request, is_promotion=False)
        return self._thread.run(self._served(request, steps)).success

    def close(self) -> None:
        """Shut the tier down, end the thread, and let go of the rows.

        Raises:
            Exception: whatever the tier's shutdown raises.
        """
        try:
            self._thread.do(self.tier.shutdown)
        finally:
            self._thread.close()
            self._rows.release()

    def _request(self, keys: Sequence[OffloadKey], before: int) -> ReqContext:
        """A request whose chunks have these keys, in the order of the sequence."""
        request = ReqContext(f"request-{next(self._numbers)}")
        for number, key in enumerate(keys, start=before + 1):
            request.set_offload_key_position(key, number * self._tokens)
        return request

    # In the scheduler's thread
    # ----------------------------------------------------------------------------------------------

    def _served(
        self, request: ReqContext, steps: Generator[str, None, AnswerT]
    ) -> Generator[str, None, AnswerT]:
        self._new.append(request.req_id)
        self.tier.on_new_request(request)
        try:
            return (yield from steps)
        finally:
            self.tier.on_request_finished(request)

    def _resolved(
        self, keys: Sequence[OffloadKey], request: ReqContext
    ) -> Generator[str, None, list[bool]]:
        found: dict[OffloadKey, bool] = {}
        while True:
            for key in keys:
                # vLLM keeps a promoted chunk in its CPU tier, and asks no more for it.
                if key not in found:
                    result = self.tier.lookup(key, request)
                    if result in (LookupResult.HIT, LookupResult.MISS):
                        found[key] = result is LookupResult.HIT
            if len(found) == len(set(keys)):
                return [found[key] for key in keys]
            yield f"lookup() has answered RETRY for {len(set(keys)) - len(found)} keys"

    def _promoted(
        self, keys: Sequence[OffloadKey], chunks: Sequence[int], request: ReqContext
    ) -> Generator[str, None, list[bool]]:
        places, loaded = dict(zip(keys, chunks, strict=True)), set[bytes]()
        for _ in range(MAX_LOADS):
            wanted = [key for key in places if key not in loaded]
            found = yield from self._resolved(wanted, request)
            hits = [key for key, is_hit in zip(wanted, found, strict=True) if is_hit]
            if not hits:
                return [key in loaded for key in keys]
            result = yield from self._transferred(
                hits, [places[key] for key in hits], request, is_promotion=True
            )
            loaded.update(hits if result.success else result.successful_keys or ())
        raise Violation(
            "FT-3",
            f"a load of a key has failed {MAX_LOADS} times, and lookup() goes on answering HIT: "
            f"vLLM loads it again for ever, and its request never begins",
        )

    def _transferred(
        self,
        keys: Sequence[OffloadKey],
        chunks: Sequence[int],
        request: ReqContext,
        *,
        is_promotion: bool,
    ) -> Generator[str, None, JobResult]:
        job = TransferJob(
            next(self._numbers),
            list(keys),
            np.array(chunks, dtype=np.int32),
            is_promotion=is_promotion,
            req_context=request,
        )
        self._results[job.job_id] = None
        if is_promotion:
            self._loads.append(job)
        else:
            self.tier.submit_store(job)
        while (result := self._results[job.job_id]) is None:
            yield f"a {'load' if is_promotion else 'store'} of {len(keys)} chunks was not reported"
        del self._results[job.job_id]
        return result

    def _end_step(self) -> None:
        self._take_results()
        loads, self._loads = self._loads, []
        for job in loads:
            self.tier.submit_load(job)
        new, self._new = self._new, []
        self.tier.on_schedule_end(ScheduleEndContext(new, []))
        time.sleep(TURN_SECONDS)
        self._take_results()

    def _take_results(self) -> None:
        for result in self.tier.get_finished_jobs():
            if self._results.get(result.job_id, result) is not None:
                raise RuntimeError(
                    f"job {result.job_id} was reported, and is not under way; vLLM asserts that it "
                    f"is, and its engine ends"
                )
            self._results[result.job_id] = result


class TierStorage(PresenceStorage):
    """A replica of vLLM with the tier attached."""

    # vLLM hashes the name of a LoRA and `cache_salt` into the keys; a tier is told of neither.
    hashed = ("adapter", "tenant", "salt")
    # There is one tier for all ranks of a replica.
    one_rank_stores = False

    def _start(self) -> tuple[Scheduler, dict[str, PageMemory]]:
        identity = self._identity
        geometry = next(self._pools[name] for name in self._groups if name in self._pools).geometry
        workers = (
            1 if identity.kv_replicated else identity.tp_size * identity.pp_size * identity.cp_size
        )
        longest = max(pool.geometry.page_bytes for pool in self._pools.values())
        start = identity.layer_start or 0
        end = identity.layer_end or start + LAYERS
        # Whether the case has left the layout at its default.
        is_usual = geometry.layout == identity.layout == "page_first"
        config = offloading_config(
            worker_bytes=-(-longest // workers),
            layers=[
                (self._group(name), [f"{name}.layers.{layer}" for layer in range(start, end)])
                for name in self._groups
            ],
            identity=replace(identity, kv_dtype=element_type(geometry, identity)),
            layout="LBHNC" if is_usual else "BLHNC",
        )
        pages = {
            name: pool.geometry.size // pool.geometry.page_size
            for name, pool in self._pools.items()
        }
        # One row length for all groups, as vLLM 0.32 has it.
        rows = Rows(sum(pages.values()), config.worker_kv_bytes_per_block * workers)
        memories, first = dict[str, PageMemory](), 0
        for name, pool in self._pools.items():
            view = partial(rows.part, pool.geometry.page_bytes)
            memories[name] = PageMemory(range(first, first + pages[name]), view)
            first += pages[name]
        return Scheduler(self._entry(), rows, TierSpec(config=config)), memories

    def _plugin(self, module: str, name: str) -> dict[str, Any]:
        return {"type": name, "module_path": module, **self._options}

    def _key(self, pool: str, key: bytes) -> OffloadKey:
        return make_offload_key(key, self._group(pool))

    def _group(self, pool: str) -> int:
        # With gaps, as where vLLM leaves out groups that are not prefix cacheable.
        return 2 * self._groups[pool]
