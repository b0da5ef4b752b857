"""What vLLM's tiers and LMCache's L2 adapters are compared by: each is given the memory of its
engine, and driven as its engine drives it."""

from __future__ import annotations

import itertools
import logging
import os
import select
import shutil
import time
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol
from unittest.mock import patch

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import FSNativeL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingKVEventsConfig,
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
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.base import TransferJob
from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

from hicache_storage.engines.lmcache import HiCacheL2Adapter
from hicache_storage.engines.vllm import HiCacheTier
from hicache_storage.layers import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
    from lmcache.v1.memory_management import MemoryObj
    from vllm.v1.kv_offload.base import OffloadKey
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from hicache_storage.spec import HiCacheStorage

VLLM, LMCACHE = "vLLM", "LMCache"
CHUNKS: Final = 128
"""Of each half of the memory: one is stored, the other one is loaded into."""
POLL_SECONDS: Final = 20e-6
"""vLLM asks once a step what has ended; a benchmark that asked without a pause would keep Python's
lock from the threads that do the work."""
PATIENCE_SECONDS: Final = 120.0
SHAPES: Final = {
    64 << 10: (2, 2, 64, 128),
    128 << 10: (2, 4, 64, 128),
    256 << 10: (2, 8, 64, 128),
    1 << 20: (2, 32, 64, 128),
    2 << 20: (2, 32, 64, 256),
    4 << 20: (2, 32, 64, 512),
}
"""Of LMCache's objects in bfloat16: keys and values, layers, tokens, width."""


class Memory(Protocol):
    """The host memory of an engine, whose first half has random bytes."""

    def chunk(self, number: int) -> np.ndarray: ...
    def close(self) -> None: ...


class Candidate(Protocol):
    """A tier or an adapter."""

    name: str

    def announce(self, keys: Sequence[str]) -> None:
        """Make the engine's own names of keys, which it has anyway."""
        ...

    def write(self, keys: Sequence[str]) -> bool:
        """Store the first chunks of the memory in jobs that are submitted at once."""
        ...

    def read(self, keys: Sequence[str]) -> bool:
        """Load into the second half of the memory."""
        ...

    def exists(self, keys: Sequence[str]) -> int: ...
    def is_sound(self, pages: int) -> bool:
        """Compare what was loaded with what was stored, and make it zero."""
        ...

    def remove(self) -> None: ...
    def files(self) -> list[Path]: ...
    def close(self) -> None: ...


class VllmMemory:
    """The region that vLLM's scheduler and workers share, in /dev/shm."""

    _numbers = itertools.count()

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes
        self._region = SharedOffloadRegion(
            engine_id=f"benchmark_{os.getpid()}_{next(self._numbers)}",
            num_chunks=2 * CHUNKS,
            rank=None,
            kv_bytes_per_chunk=chunk_bytes,
            cpu_page_size=chunk_bytes,
            barrier=lambda: None,
        )
        self.view = self._region.create_kv_memoryview()
        self._rows = np.asarray(self.view).view(np.uint8)
        _fill(self)

    def chunk(self, number: int) -> np.ndarray:
        return self._rows[number]

    def close(self) -> None:
        del self._rows
        self.view.release()
        self._region.cleanup()


class LMCacheMemory:
    """LMCache's L1 arena, and the objects that its allocator hands out."""

    def __init__(self, chunk_bytes: int) -> None:
        self.layout = MemoryLayoutDesc([torch.Size(SHAPES[chunk_bytes])], [torch.bfloat16])
        # Pinned memory that grows needs a GPU; this is what LMCache takes without one.
        config = L1MemoryManagerConfig(2 * CHUNKS * chunk_bytes + (1 << 20), use_lazy=False)
        self._manager = L1MemoryManager(config)
        self.arena = self._manager.get_l1_memory_desc()
        error, self.objects = self._manager.allocate(self.layout, 2 * CHUNKS)
        if len(self.objects) != 2 * CHUNKS:
            raise AssertionError(f"LMCache's arena has no room: {error}")
        assert self.objects[0].get_size() == chunk_bytes
        _fill(self)

    def chunk(self, number: int) -> np.ndarray:
        return np.frombuffer(self.objects[number].byte_array, np.uint8)

    def close(self) -> None:
        self._manager.free(self.objects)
        self.objects = []
        self._manager.close()


def host_pool(chunk_bytes: int, engine: str) -> VllmMemory | LMCacheMemory:
    """The memory of an engine."""
    return VllmMemory(chunk_bytes) if engine == VLLM else LMCacheMemory(chunk_bytes)


def _fill(memory: Memory) -> None:
    generator = np.random.default_rng()
    for number in range(CHUNKS):
        chunk = memory.chunk(number)
        chunk[:] = generator.integers(0, 256, len(chunk), dtype=np.uint8)


def _is_sound(memory: Memory, pages: int) -> bool:
    sound = True
    for number in range(pages):
        loaded = memory.chunk(CHUNKS + number)
        sound &= np.array_equal(memory.chunk(number), loaded)
        loaded[:] = 0
    return sound


class Store:
    """A directory of one candidate."""

    def __init__(self, directory: Path, pattern: str, storages: Callable[[], list[HiCacheStorage]]):
        self._directory = directory
        self._pattern = pattern
        self._storages = storages

    def remove(self) -> None:
        for storage in self._storages():
            innermost(storage).clear()
        for path in self.files():
            path.unlink()

    def files(self) -> list[Path]:
        return list(self._directory.rglob(self._pattern))

    def destroy(self) -> None:
        shutil.rmtree(self._directory)


class Tier:
    """A secondary tier of vLLM, and the scheduler's side of it."""

    def __init__(
        self, name: str, memory: VllmMemory, tier: SecondaryTierManager, store: Store, jobs: int
    ) -> None:
        self.name = name
        self._memory = memory
        self._tier = tier
        self._store = store
        self._jobs = jobs
        self._numbers = itertools.count()
        self._names: dict[str, OffloadKey] = {}

    def announce(self, keys: Sequence[str]) -> None:
        self._names |= {key: make_offload_key(bytes.fromhex(key), 0) for key in keys}

    def write(self, keys: Sequence[str]) -> bool:
        return self._move(keys, 0, self._tier.submit_store, is_promotion=False)

    def read(self, keys: Sequence[str]) -> bool:
        return self._move(keys, CHUNKS, self._tier.submit_load, is_promotion=True)

    def exists(self, keys: Sequence[str]) -> int:
        request = ReqContext(f"lookup-{next(self._numbers)}")
        wanted = [self._names[key] for key in keys]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            answers = [self._tier.lookup(key, request) for key in wanted]
            if LookupResult.RETRY not in answers:
                break
            assert time.monotonic() < deadline
            self._tier.on_schedule_end(ScheduleEndContext([], []))
            time.sleep(POLL_SECONDS)
        self._tier.on_request_finished(request)
        return answers.count(LookupResult.HIT)

    def is_sound(self, pages: int) -> bool:
        return _is_sound(self._memory, pages)

    def remove(self) -> None:
        self._names.clear()
        self._store.remove()

    def files(self) -> list[Path]:
        return self._store.files()

    def close(self) -> None:
        self._tier.shutdown()
        self._store.destroy()

    def _move(
        self,
        keys: Sequence[str],
        first: int,
        submit: Callable[[TransferJob], None],
        *,
        is_promotion: bool,
    ) -> bool:
        size, pending = -(-len(keys) // self._jobs), set[int]()
        for start in range(0, len(keys), size):
            some = [self._names[key] for key in keys[start : start + size]]
            chunks = np.arange(first + start, first + start + len(some), dtype=np.int32)
            number = next(self._numbers)
            job = TransferJob(number, some, chunks, is_promotion, ReqContext(f"request-{number}"))
            pending.add(number)
            submit(job)
        moved, deadline = True, time.monotonic() + PATIENCE_SECONDS
        while pending:
            for result in self._tier.get_finished_jobs():
                pending.remove(result.job_id)
                moved &= result.success
            if pending:
                assert time.monotonic() < deadline
                time.sleep(POLL_SECONDS)
        return moved


class Adapter:
    """An L2 adapter of LMCache, and its controllers' side of it."""

    def __init__(
        self, name: str, memory: LMCacheMemory, adapter: L2AdapterInterface, store: Store, jobs: int
    ) -> None:
        self.name = name
        self._memory = memory
        self._adapter = adapter
        self._store = store
        self._jobs = jobs
        self._names: dict[str, ObjectKey] = {}

    def announce(self, keys: Sequence[str]) -> None:
        self._names |= {
            key: ObjectKey(bytes.fromhex(key), model_name="benchmark", kv_rank=0x01000100)
            for key in keys
        }

    def write(self, keys: Sequence[str]) -> bool:
        pending = {
            self._adapter.submit_store_task(some, objects)
            for some, objects in self._tasks(keys, first=0)
        }
        stored = True
        while pending:
            _wait(self._adapter.get_store_event_fd())
            for task, result in self._adapter.pop_completed_store_tasks().items():
                pending.remove(task)
                stored &= result.is_successful()
        return stored

    def read(self, keys: Sequence[str]) -> bool:
        pending = {
            self._adapter.submit_load_task(some, objects): len(some)
            for some, objects in self._tasks(keys, first=CHUNKS)
        }
        loaded = 0
        while pending:
            _wait(self._adapter.get_load_event_fd())
            for task in list(pending):
                if (found := self._adapter.query_load_result(task)) is not None:
                    del pending[task]
                    loaded += found.popcount()
        return loaded == len(keys)

    def exists(self, keys: Sequence[str]) -> int:
        wanted = [self._names[key] for key in keys]
        task = self._adapter.submit_lookup_and_lock_task(wanted, {0: self._memory.layout})
        found = None
        while found is None:
            _wait(self._adapter.get_lookup_and_lock_event_fd())
            found = self._adapter.query_lookup_and_lock_result(task)
        self._adapter.submit_unlock(wanted)
        return int(found.popcount())

    def is_sound(self, pages: int) -> bool:
        return _is_sound(self._memory, pages)

    def remove(self) -> None:
        self._names.clear()
        self._store.remove()

    def files(self) -> list[Path]:
        return self._store.files()

    def close(self) -> None:
        self._adapter.close()
        self._store.destroy()

    def _tasks(
        self, keys: Sequence[str], *, first: int
    ) -> list[tuple[list[ObjectKey], list[MemoryObj]]]:
        wanted, size = [self._names[key] for key in keys], -(-len(keys) // self._jobs)
        return [
            (
                wanted[start : start + size],
                self._memory.objects[first + start : first + start + size][: len(keys) - start],
            )
            for start in range(0, len(keys), size)
        ]


def _wait(descriptor: int) -> None:
    if not select.select([descriptor], [], [], PATIENCE_SECONDS)[0]:
        raise AssertionError(f"no event within {PATIENCE_SECONDS} s")
    os.eventfd_read(descriptor)


@dataclass(frozen=True)
class Side:
    """How a candidate is set up."""

    directory: Path
    name: str
    jobs: int
    direct: bool
    """Past the page cache."""
    syncs: bool = False
    """Ours: a store ends when its chunks are on the disk."""


def Ours(memory: VllmMemory | LMCacheMemory, side: Side) -> Candidate:
    """The bridge of the memory's engine, over the file driver."""
    options = {
        "driver": "file",
        "driver_config": {
            "path": str(side.directory),
            "direct_io": side.direct,
            "fsync": side.syncs,
        },
    }
    if isinstance(memory, VllmMemory):
        tier = HiCacheTier(
            _offloading_spec(memory.chunk_bytes), memory.view, "HiCacheTier", **options
        )
        store = Store(side.directory, "*.bundle", lambda: [tier.storage])
        return Tier(side.name, memory, tier, store, side.jobs)
    config = PluginL2AdapterConfig("hicache_storage.engines.lmcache", "HiCacheL2Adapter", options)
    adapter = create_l2_adapter(config, memory.arena)
    assert isinstance(adapter, HiCacheL2Adapter)
    store = Store(side.directory, "*.bundle", lambda: list(adapter._storages.values()))
    return Adapter(side.name, memory, adapter, store, side.jobs)


def vllm_fs(memory: VllmMemory, side: Side) -> Candidate:
    """vLLM's `fs` tier, with its own threads."""
    # It has no option: it reads and writes with O_DIRECT wherever the file system takes it.
    with patch(
        "vllm.v1.kv_offload.tiering.fs.manager.probe_o_direct", lambda directory: side.direct
    ):
        tier = FileSystemTierManager(
            _offloading_spec(memory.chunk_bytes), memory.view, "fs", root_dir=str(side.directory)
        )
    return Tier(side.name, memory, tier, Store(side.directory, "*.bin", list), side.jobs)


def lmcache_fs_native(memory: LMCacheMemory, side: Side) -> Candidate:
    """LMCache's `fs_native` adapter, with its own number of threads."""
    return _lmcache(
        memory,
        side,
        FSNativeL2AdapterConfig.from_dict(
            {"base_path": str(side.directory), "use_odirect": side.direct}
        ),
    )


def lmcache_fs(memory: LMCacheMemory, side: Side) -> Candidate:
    """LMCache's `fs` adapter."""
    return _lmcache(
        memory,
        side,
        FSL2AdapterConfig.from_dict({"base_path": str(side.directory), "use_odirect": side.direct}),
    )


def _lmcache(memory: LMCacheMemory, side: Side, config: L2AdapterConfigBase) -> Candidate:
    side.directory.mkdir(parents=True)
    adapter = create_l2_adapter(config, memory.arena)
    return Adapter(side.name, memory, adapter, Store(side.directory, "*.data", list), side.jobs)


def _offloading_spec(chunk_bytes: int) -> types.SimpleNamespace:
    """What a tier reads of vLLM's `TieringOffloadingSpec`."""
    config = OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="benchmark",
        model=OffloadingModelConfig(name="benchmark", dtype="bfloat16"),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        kv_cache_layout="LBHNC",
    )
    return types.SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        replicated_layout=False,
        kv_events_config=OffloadingKVEventsConfig(
            enable_kv_cache_events=False, self_describing_kv_events=False
        ),
    )


for _name in ("lmcache", "vllm"):
    logging.getLogger(_name).setLevel(logging.ERROR)
