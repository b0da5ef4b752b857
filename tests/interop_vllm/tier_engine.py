"""vLLM's side of a tier, without an engine: the memory of the CPU tier, jobs and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
    ReqContext,
    ScheduleEndContext,
    make_offload_key,
)
from vllm.v1.kv_offload.tiering.base import TransferJob

from hicache_conformance.interfaces.vllm_tier.storage import Rows, TierSpec, offloading_config
from hicache_storage.engines.vllm import HiCacheTier
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

CHUNKS, USED = 16, 6000
"""Rows of the CPU tier, and bytes of each without the pad."""


class Engine:
    """vLLM's side of a tier: the memory of the CPU tier, and numbers of jobs."""

    def __init__(self, path, groups: Sequence[int] = (0,), **options: object) -> None:
        self.rows = Rows(CHUNKS, USED)
        layers = [(group, (f"layer{group}",)) for group in groups]
        spec = TierSpec(
            config=offloading_config(worker_bytes=USED, layers=layers, kv_events=True),
            kv_events_config=OffloadingKVEventsConfig(
                enable_kv_cache_events=True, self_describing_kv_events=False
            ),
        )
        options = {"driver": "file", "driver_config": {"path": str(path)}, **options}
        self.tier = HiCacheTier(spec, self.rows.view, "HiCacheTier", **options)
        self._jobs = 0

    def request(self, name: str = "request") -> ReqContext:
        return ReqContext(name)

    def fill(self, chunk: int, seed: int) -> bytes:
        """Give a chunk the bytes of a seed; return them without the pad."""
        content = np.random.default_rng(seed).bytes(USED)
        self.rows.part(USED, chunk)[:] = content
        return content

    def bytes_of(self, chunk: int) -> bytes:
        return bytes(self.rows.part(USED, chunk))

    def submit(self, keys, chunks, *, load: bool, request: ReqContext | None = None) -> int:
        self._jobs += 1
        job = TransferJob(
            self._jobs,
            keys,
            np.array(chunks, dtype=np.int32),
            is_promotion=load,
            req_context=request or self.request(),
        )
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        return job.job_id

    def result(self, job: int):
        """The only job that ends; waits for it."""
        [result] = eventually(lambda: list(self.tier.get_finished_jobs()))
        assert result.job_id == job
        assert list(self.tier.get_finished_jobs()) == []
        return result

    def store(self, keys, chunks):
        return self.result(self.submit(keys, chunks, load=False))

    def load(self, keys, chunks, request: ReqContext | None = None):
        return self.result(self.submit(keys, chunks, load=True, request=request))

    def found(self, keys, request: ReqContext | None = None) -> list[bool]:
        """Look keys up, step by step as vLLM's scheduler does."""
        request = request or self.request()

        def answered():
            answers = [self.tier.lookup(key, request) for key in keys]
            self.tier.on_schedule_end(ScheduleEndContext([], []))
            return answers if LookupResult.RETRY not in answers else None

        return [answer is LookupResult.HIT for answer in eventually(answered)]

    def close(self) -> None:
        """End the tier, twice, and let go of the memory as vLLM does.

        Raises:
            BufferError: the tier has kept a view of it.
        """
        self.tier.shutdown()
        self.rows.release()
        self.tier.shutdown()


def keys(count: int, group: int = 0, start: int = 0):
    return [
        make_offload_key((number + 1).to_bytes(32, "big"), group)
        for number in range(start, start + count)
    ]
