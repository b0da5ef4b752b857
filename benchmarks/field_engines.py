"""Sides in the memory of vLLM and of LMCache: the tier and the adapter that each brings for a file
system, and this project's bridges over the file driver, driven as the engine drives them."""

from __future__ import annotations

import itertools
import logging
import os
import select
import time
import types
from typing import TYPE_CHECKING, Any, Final
from unittest.mock import patch

import numpy as np
import torch
from field_sides import ADAPTER, ON_VLLM, PAGES, TIER

from hicache_storage.layers import innermost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from field_sides import Setup

    from hicache_storage.spec import HiCacheStorage

POLL_SECONDS: Final = 20e-6
"""vLLM asks once a step what has ended; a benchmark that asked without a pause would keep Python's
lock from the threads that do the work."""
PATIENCE_SECONDS: Final = 120.0
SUFFIXES: Final = (".bundle", ".bin", ".data")
"""Of the files of ours, of vLLM and of LMCache."""


class EngineSide:
    """A tier or an adapter, and its engine's side of it.

    The first half of the memory has random bytes and is stored, the other one is loaded into.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.names = dict[str, Any]()
        self.make_memory()
        generator = np.random.default_rng()
        for number in range(PAGES):
            chunk = self.chunk(number)
            chunk[:] = generator.integers(0, 256, len(chunk), dtype=np.uint8)
        self.open(
            {
                "driver": "file",
                "driver_config": {"path": str(setup.directory), "direct_io": setup.direct},
            }
        )

    def make_memory(self) -> None:
        raise NotImplementedError

    def open(self, bridge: dict[str, object]) -> None:
        """Make the tier or the adapter; `bridge` are the options of ours."""
        raise NotImplementedError

    def chunk(self, number: int) -> np.ndarray:
        raise NotImplementedError

    def storages(self) -> Sequence[HiCacheStorage]:
        """The storages of a bridge."""
        raise NotImplementedError

    def forget(self, pages: int) -> None:
        """Do nothing: `is_sound` has made it zero."""

    def is_sound(self, pages: int) -> bool:
        sound = True
        for number in range(pages):
            loaded = self.chunk(PAGES + number)
            sound &= np.array_equal(self.chunk(number), loaded)
            loaded[:] = 0
        return sound

    def files(self) -> list[Path]:
        return [path for path in self.setup.directory.rglob("*") if path.suffix in SUFFIXES]

    def remove(self) -> None:
        self.names.clear()
        if self.setup.name in (TIER, ADAPTER):
            for storage in self.storages():
                innermost(storage).clear()
        for path in self.files():
            path.unlink()

    def shares(self, keys: Sequence[str], first: int) -> Iterator[tuple[list[Any], range]]:
        """The names and the chunks of each job; as many jobs as there are callers."""
        size = -(-len(keys) // self.setup.callers)
        for start in range(0, len(keys), size):
            some = [self.names[key] for key in keys[start : start + size]]
            yield some, range(first + start, first + start + len(some))


class VllmSide(EngineSide):
    """A secondary tier of vLLM, and the scheduler's side of it."""

    def make_memory(self) -> None:
        from vllm.v1.kv_offload import base
        from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self._base, self._job = base, TransferJob
        self._region = SharedOffloadRegion(
            engine_id=f"benchmark_{os.getpid()}",
            num_chunks=2 * PAGES,
            rank=None,
            kv_bytes_per_chunk=self.setup.page_bytes,
            cpu_page_size=self.setup.page_bytes,
            barrier=lambda: None,
        )
        self._view = self._region.create_kv_memoryview()
        self._rows = np.asarray(self._view).view(np.uint8)
        self._numbers = itertools.count()

    def open(self, bridge: dict[str, object]) -> None:
        from vllm.v1.kv_offload.tiering.fs.manager import FileSystemTierManager

        from hicache_storage.engines.vllm import HiCacheTier

        spec = _offloading_spec(self.setup.page_bytes)
        if self.setup.name == TIER:
            self._tier: Any = HiCacheTier(spec, self._view, "HiCacheTier", **bridge)
            return
        # It has no option: it reads and writes with O_DIRECT wherever the file system takes it.
        probe = "vllm.v1.kv_offload.tiering.fs.manager.probe_o_direct"
        with patch(probe, lambda directory: self.setup.direct):
            root = str(self.setup.directory)
            self._tier = FileSystemTierManager(spec, self._view, "fs", root_dir=root)

    def storages(self) -> Sequence[HiCacheStorage]:
        return [self._tier.storage]

    def chunk(self, number: int) -> np.ndarray:
        return self._rows[number]

    def announce(self, keys: Sequence[str]) -> None:
        self.names |= {key: self._base.make_offload_key(bytes.fromhex(key), 0) for key in keys}

    def write(self, keys: Sequence[str]) -> bool:
        return self._move(keys, 0, self._tier.submit_store, is_promotion=False)

    def read(self, keys: Sequence[str]) -> bool:
        return self._move(keys, PAGES, self._tier.submit_load, is_promotion=True)

    def exists(self, keys: Sequence[str]) -> int:
        hit, retry = self._base.LookupResult.HIT, self._base.LookupResult.RETRY
        request = self._base.ReqContext(f"lookup-{next(self._numbers)}")
        wanted = [self.names[key] for key in keys]
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            answers = [self._tier.lookup(key, request) for key in wanted]
            if retry not in answers:
                break
            assert time.monotonic() < deadline
            self._tier.on_schedule_end(self._base.ScheduleEndContext([], []))
            time.sleep(POLL_SECONDS)
        self._tier.on_request_finished(request)
        return answers.count(hit)

    def close(self) -> None:
        self._tier.shutdown()
        del self._rows
        self._view.release()
        self._region.cleanup()

    def _move(
        self,
        keys: Sequence[str],
        first: int,
        submit: Callable[[Any], None],
        *,
        is_promotion: bool,
    ) -> bool:
        pending = set[int]()
        for some, places in self.shares(keys, first):
            number, chunks = next(self._numbers), np.array(places, dtype=np.int32)
            pending.add(number)
            context = self._base.ReqContext(f"job-{number}")
            submit(self._job(number, some, chunks, is_promotion, context))
        moved, deadline = True, time.monotonic() + PATIENCE_SECONDS
        while pending:
            for result in self._tier.get_finished_jobs():
                pending.remove(result.job_id)
                moved &= result.success
            if pending:
                assert time.monotonic() < deadline
                time.sleep(POLL_SECONDS)
        return moved


class LMCacheSide(EngineSide):
    """An L2 adapter of LMCache, and its controllers' side of it."""

    def make_memory(self) -> None:
        from lmcache.v1.distributed.api import MemoryLayoutDesc
        from lmcache.v1.distributed.config import L1MemoryManagerConfig
        from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager

        length = self.setup.page_bytes
        # Of an object in bfloat16: keys and values, layers, tokens, width.
        shape = torch.Size((2, 2, 64, length // 512))
        self._layout = MemoryLayoutDesc([shape], [torch.bfloat16])
        # Pinned memory that grows needs a GPU; this is what LMCache takes without one.
        config = L1MemoryManagerConfig(2 * PAGES * length + (1 << 20), use_lazy=False)
        self._manager = L1MemoryManager(config)
        error, self._objects = self._manager.allocate(self._layout, 2 * PAGES)
        if len(self._objects) != 2 * PAGES:
            raise AssertionError(f"LMCache's arena has no room: {error}")
        assert self._objects[0].get_size() == length

    def open(self, bridge: dict[str, object]) -> None:
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.fs_native_l2_adapter import (
            FSNativeL2AdapterConfig,
        )
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig

        config: Any
        if self.setup.name == ADAPTER:
            config = PluginL2AdapterConfig(
                "hicache_storage.engines.lmcache", "HiCacheL2Adapter", bridge
            )
        else:
            self.setup.directory.mkdir(parents=True)
            config = FSNativeL2AdapterConfig.from_dict(
                {"base_path": str(self.setup.directory), "use_odirect": self.setup.direct}
            )
        self._adapter = create_l2_adapter(config, self._manager.get_l1_memory_desc())

    def storages(self) -> Sequence[HiCacheStorage]:
        return list(self._adapter._storages.values())

    def chunk(self, number: int) -> np.ndarray:
        return np.frombuffer(self._objects[number].byte_array, np.uint8)

    def announce(self, keys: Sequence[str]) -> None:
        from lmcache.v1.distributed.api import ObjectKey

        self.names |= {
            key: ObjectKey(bytes.fromhex(key), model_name="benchmark", kv_rank=0x01000100)
            for key in keys
        }

    def write(self, keys: Sequence[str]) -> bool:
        pending = {
            self._adapter.submit_store_task(some, [self._objects[number] for number in places])
            for some, places in self.shares(keys, 0)
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
            self._adapter.submit_load_task(some, [self._objects[number] for number in places])
            for some, places in self.shares(keys, PAGES)
        }
        loaded = 0
        while pending:
            _wait(self._adapter.get_load_event_fd())
            for task in list(pending):
                if (found := self._adapter.query_load_result(task)) is not None:
                    pending.remove(task)
                    loaded += found.popcount()
        return loaded == len(keys)

    def exists(self, keys: Sequence[str]) -> int:
        wanted = [self.names[key] for key in keys]
        task = self._adapter.submit_lookup_and_lock_task(wanted, {0: self._layout})
        found = None
        while found is None:
            _wait(self._adapter.get_lookup_and_lock_event_fd())
            found = self._adapter.query_lookup_and_lock_result(task)
        self._adapter.submit_unlock(wanted)
        return int(found.popcount())

    def close(self) -> None:
        self._adapter.close()
        self._manager.free(self._objects)
        self._objects = []
        self._manager.close()


def made(setup: Setup) -> EngineSide:
    """Make a side, with the memory of its engine."""
    return VllmSide(setup) if setup.name in ON_VLLM else LMCacheSide(setup)


def _wait(descriptor: int) -> None:
    if not select.select([descriptor], [], [], PATIENCE_SECONDS)[0]:
        raise AssertionError(f"no event within {PATIENCE_SECONDS} s")
    os.eventfd_read(descriptor)


def _offloading_spec(chunk_bytes: int) -> types.SimpleNamespace:
    """What a tier reads of vLLM's `TieringOffloadingSpec`."""
    from vllm.v1.kv_offload import config as configs
    from vllm.v1.kv_offload.base import OffloadingKVEventsConfig

    config = configs.OffloadingConfig(
        groups=(
            configs.OffloadingGroupConfig(tokens_per_block=16, layer_names=("layer",), group_id=0),
        ),
        worker_kv_bytes_per_block=chunk_bytes,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="benchmark",
        model=configs.OffloadingModelConfig(name="benchmark", dtype="bfloat16"),
        cache=configs.OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=configs.OffloadingParallelConfig(
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
