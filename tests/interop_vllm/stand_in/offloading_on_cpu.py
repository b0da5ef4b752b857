"""Stand-in for the one class that vLLM refuses on CPUs: the worker that copies between the device and
the CPU tier.

Named by `"spec_name": "TieringOnCpu", "spec_module_path": "offloading_on_cpu"`. The scheduler, the
CPU tier, its region of shared memory and the secondary tiers are vLLM's own. Copies are made by the
caller's thread, between two places in main memory: it proves nothing about streams.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import _build_copy_plan, _canonical_block_sizes
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

if TYPE_CHECKING:
    from vllm.v1.kv_offload.base import (
        CanonicalKVCacheRef,
        CanonicalKVCaches,
        GPULoadStoreSpec,
        LoadStoreSpec,
    )


class TieringOnCpu(TieringOffloadingSpec):
    """vLLM's spec of tiers, with a worker for CPUs."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """Return the worker of this rank."""
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self.config.engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            canonical = self.config.canonical_layout
            if canonical:
                self._validate_canonical_refs(kv_caches)
            self._worker = CopyingWorker(
                kv_caches, self.blocks_per_chunk, region, canonical=canonical
            )
        return self._worker


class CopyingWorker(OffloadingWorker):
    """Copies blocks at once: in the direct layout, each worker's tensors one after the other, or in
    the canonical one, by the plans that vLLM makes of its mappings."""

    def __init__(
        self,
        caches: CanonicalKVCaches,
        blocks_per_chunk: int,
        region: SharedOffloadRegion,
        *,
        canonical: bool,
    ) -> None:
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = caches.group_data_refs
        self._device = [
            tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes)
            for tensor in caches.tensors
        ]
        self._canonical = canonical
        if canonical:
            self._pages = _canonical_block_sizes(self._refs, len(caches.tensors))
            view = region.create_next_canonical_view
        else:
            self._pages = [tensor.page_size_bytes for tensor in caches.tensors]
            view = region.create_next_worker_view
        self._host = [view(page * blocks_per_chunk) for page in self._pages]
        self._region = region
        self._finished = list[TransferResult]()

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Copy from the device to the CPU tier."""
        return self._copy(job_id, src_spec, dst_spec, to_host=True)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Copy from the CPU tier to the device; `expedited` is vLLM 0.33's."""
        return self._copy(job_id, dst_spec, src_spec, to_host=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the copies made since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: every copy has ended."""

    def shutdown(self) -> None:
        """Let go of the CPU tier."""
        self._host.clear()
        self._region.cleanup()

    def _copy(
        self, job_id: int, device: GPULoadStoreSpec, host: LoadStoreSpec, *, to_host: bool
    ) -> bool:
        blocks, chunks = iter(device.block_ids.tolist()), iter(host.block_ids.tolist())
        size = 0
        for group, (count, first) in enumerate(
            zip(device.group_sizes, device.block_indices, strict=True)
        ):
            chunk = -1
            for index in range(first, first + count):
                place = index % self._blocks_per_chunk
                if index == first or place == 0:
                    chunk = next(chunks)
                block = next(blocks)
                for ref in self._refs[group]:
                    page = chunk * self._blocks_per_chunk + place
                    if to_host and self._canonical and not ref.mapping.is_writer(page):
                        continue
                    begin = place * self._pages[ref.tensor_idx]
                    row = self._host[ref.tensor_idx][chunk, begin:]
                    own = self._device[ref.tensor_idx][block]
                    for in_own, in_row, length in self._fragments(ref):
                        on_host = row[in_row : in_row + length]
                        on_device = own[in_own : in_own + length]
                        if to_host:
                            on_host.copy_(on_device)
                        else:
                            on_device.copy_(on_host)
                        size += length
        self._finished.append(TransferResult(job_id, True, size, 1e-6))
        return True

    def _fragments(self, ref: CanonicalKVCacheRef) -> list[tuple[int, int, int]]:
        """Where the bytes of a block lie in the worker's own page and in the row, and how many."""
        if not self._canonical:
            return [(0, 0, ref.page_size_bytes)]
        plan = _build_copy_plan(ref, gpu_to_cpu=True)
        columns = (plan.frag_offsets_src, plan.frag_offsets_dst, plan.frag_sizes)
        return list(zip(*(column.tolist() for column in columns), strict=True))
