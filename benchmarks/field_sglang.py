"""Sides on SGLang's host pool: this project's drivers through the whole stack, and SGLang's own
storages, called as its `HiCacheController` calls them."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from field_sides import (
    FILE,
    HF3FS_SERVER,
    HICACHE_FILE,
    NIXL,
    PAGES,
    SGLANG_HF3FS,
    SGLANG_HF3FS_SERVER,
)

# Importing SGLang on a machine without a GPU is talkative.
with contextlib.redirect_stderr(io.StringIO()):
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from interleaved import fresh_keys

from hicache_storage import PoolTransfer, StorageIdentity, create_storage
from hicache_storage.layers import innermost

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from field_sides import Setup

PAGE_TOKENS = 64
# Layers and heads that make a page of so many bytes, with a head dimension of 128 in bfloat16.
SHAPES = {
    64 << 10: (2, 1),
    128 << 10: (4, 1),
    256 << 10: (8, 1),
    1 << 20: (16, 2),
    2 << 20: (32, 2),
    4 << 20: (32, 4),
}
FILE_BATCHES = 4
"""Calls of 128 pages that a file of slots holds."""
QUARANTINE_SECONDS = 0.05


def host_pool(
    page_bytes: int, layout: str = "page_first", pages: int = PAGES
) -> MHATokenToKVPoolHost:
    """SGLang's host pool, filled with random bytes."""
    layers, heads = SHAPES[page_bytes]
    size = pages * PAGE_TOKENS
    device = MHATokenToKVPool(
        size=size,
        page_size=PAGE_TOKENS,
        dtype=torch.bfloat16,
        head_num=heads,
        head_dim=128,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE_TOKENS,
        layout,
        pin_memory=False,
        device_capacity_tokens=size,
        start_layer=0,
        end_layer=layers,
    )
    assert pool.get_size_per_token() * PAGE_TOKENS == page_bytes
    pool.kv_buffer.view(torch.uint8).random_(0, 256)
    return pool


def storage_config(**extra: object) -> HiCacheStorageConfig:
    """What SGLang tells a backend of a single rank."""
    return HiCacheStorageConfig(
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="benchmark",
        extra_config=extra or None,
    )


class HostPoolSide:
    """A storage on SGLang's host pool, called by threads that share the pages."""

    storage: Any

    def __init__(self, setup: Setup) -> None:
        # `forget` and `is_sound` would leave threads of OpenMP that spin for milliseconds, on the
        # core on which a side wakes a thread.
        torch.set_num_threads(1)
        self.setup, self.pool = setup, host_pool(setup.page_bytes, setup.layout)
        self._memory = self.pool.kv_buffer.view(torch.uint8)
        # Tokens are the second dimension, behind keys and values, or the one behind the layers.
        self._dimension = 1 if setup.layout == "page_first" else 2
        self._written = self._memory.clone()
        self._threads = ThreadPoolExecutor(setup.callers)
        setup.directory.mkdir(parents=True)
        self.open()

    def open(self) -> None:
        raise NotImplementedError

    def put(self, keys: list[str], first: int) -> bool:
        """Store pages of the pool, from page `first` on."""
        return all(self.storage.batch_set_v1(keys, self.tokens(keys, first)))

    def get(self, keys: list[str], first: int) -> bool:
        return all(self.storage.batch_get_v1(keys, self.tokens(keys, first)))

    def remove(self) -> None:
        self.storage.clear()

    def tokens(self, keys: list[str], first: int) -> torch.Tensor:
        """The tokens of as many pages of the pool as there are keys."""
        return torch.arange(first * PAGE_TOKENS, (first + len(keys)) * PAGE_TOKENS)

    def announce(self, keys: list[str]) -> None:
        pass

    def write(self, keys: list[str]) -> bool:
        return self._share(keys, self.put)

    def read(self, keys: list[str]) -> bool:
        return self._share(keys, self.get)

    def exists(self, keys: list[str]) -> int:
        return int(self.storage.batch_exists(keys))

    def forget(self, pages: int) -> None:
        self._memory.narrow(self._dimension, 0, pages * PAGE_TOKENS).zero_()

    def is_sound(self, pages: int) -> bool:
        came, sent = (
            each.narrow(self._dimension, 0, pages * PAGE_TOKENS)
            for each in (self._memory, self._written)
        )
        return torch.equal(came, sent)

    def files(self) -> list[Path]:
        return [path for path in self.setup.directory.rglob("*") if path.is_file()]

    def close(self) -> None:
        self._threads.shutdown()
        self.remove()
        self.storage.close()

    def fill(self) -> None:
        """Write all of a file of slots once, so that nobody pays for new blocks.

        Raises:
            AssertionError: it does not hold as much, or gives back other bytes.
        """
        batches = [fresh_keys(PAGES) for _ in range(FILE_BATCHES)]
        stored = all(self.put(keys, 0) for keys in batches)
        self.forget(PAGES)
        if not (stored and self.get(batches[-1], 0) and self.is_sound(PAGES)):
            raise AssertionError(f"{self.setup.name} does not give back what it was given")
        self.remove()

    def _share(self, keys: list[str], call: Callable[[list[str], int], bool]) -> bool:
        if self.setup.callers == 1:
            return call(keys, 0)
        share = len(keys) // self.setup.callers
        starts = range(0, len(keys), share)
        return all(
            self._threads.map(lambda first: call(keys[first : first + share], first), starts)
        )


class FileDriver(HostPoolSide):
    """The file driver: metrics, deadline, circuit breaker, v2 calls, checksums."""

    driver = "file"

    def open(self) -> None:
        identity = StorageIdentity(
            model="benchmark",
            kv_dtype="bfloat16",
            page_size=PAGE_TOKENS,
            layout=self.setup.layout,
        )
        self.storage = create_storage(self.driver, identity, self.options())
        self.storage.register_mem_host_pool_v2(self.pool, "kv")
        self.storage.open()

    def options(self) -> dict[str, object]:
        return {"path": str(self.setup.directory), "direct_io": self.setup.direct}

    def put(self, keys: list[str], first: int) -> bool:
        transfer = PoolTransfer("kv", self.tokens(keys, first), keys=keys)
        return all(self.storage.batch_set_v2([transfer])["kv"])

    def get(self, keys: list[str], first: int) -> bool:
        transfer = PoolTransfer("kv", self.tokens(keys, first), keys=keys)
        return all(self.storage.batch_get_v2([transfer])["kv"])

    def exists(self, keys: list[str]) -> int:
        return int(self.storage.batch_exists_v2(keys).kv_hit_pages)

    def remove(self) -> None:
        innermost(self.storage).clear()


class HF3FSDriver(FileDriver):
    """The 3FS driver with its posix engine."""

    driver = "hf3fs"

    def open(self) -> None:
        super().open()
        self.fill()

    def options(self) -> dict[str, object]:
        return {
            "path": str(self.setup.directory),
            # A page and its envelope end on a block.
            "file_size": FILE_BATCHES * PAGES * (self.setup.page_bytes + 4096),
            "engine": "posix",
            "metadata_url": self.setup.url,
        }

    def remove(self) -> None:
        super().remove()
        # Until then its slots rest.
        time.sleep(2 * QUARANTINE_SECONDS)


class PeerFile(HostPoolSide):
    """`HiCacheFile`: a copy of each page to write it; a new flat page, a read, and a copy into the
    pool to read it."""

    def open(self) -> None:
        self.storage = HiCacheFile(storage_config(), str(self.setup.directory))

    def put(self, keys: list[str], first: int) -> bool:
        pages = range(first, first + len(keys))
        data = [self.pool.get_data_page(page * PAGE_TOKENS) for page in pages]
        return bool(self.storage.batch_set(keys, data))

    def get(self, keys: list[str], first: int) -> bool:
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        for page, data in enumerate(self.storage.batch_get(keys, targets), first):
            if data is None:
                return False
            self.pool.set_from_flat_data_page(page * PAGE_TOKENS, data)
        return True

    def remove(self) -> None:
        for path in self.files():
            path.unlink()

    def close(self) -> None:
        self._threads.shutdown()
        self.remove()


class PeerHF3FS(HostPoolSide):
    """`HiCacheHF3FS` with its mock client, with its own number of threads and pages of each. Pages
    of a `layer_first` pool it copies first."""

    def open(self) -> None:
        from sglang.srt.mem_cache.storage.hf3fs import mini_3fs_metadata_server as server
        from sglang.srt.mem_cache.storage.hf3fs.storage_hf3fs import HiCacheHF3FS

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
        handlers = {number: signal.getsignal(number) for number in numbers}
        setup, zero_copy = self.setup, self.setup.layout == "page_first"
        client = (
            server.Hf3fsGlobalMetadataClient(setup.url)
            if setup.url
            else server.Hf3fsLocalMetadataClient()
        )
        self.storage = HiCacheHF3FS(
            rank=0,
            file_path=str(setup.directory / "peer.bin"),
            file_size=FILE_BATCHES * PAGES * setup.page_bytes,
            numjobs=16,
            bytes_per_page=setup.page_bytes // 2 if zero_copy else setup.page_bytes,
            entries=8,
            client_timeout=5,
            dtype=self.pool.dtype,
            metadata_client=client,
            is_page_first_layout=zero_copy,
            use_mock_client=True,
        )
        for number, handler in handlers.items():
            signal.signal(number, handler)
        self.storage.register_mem_pool_host(self.pool)
        # Importing SGLang's server sets up logging for it.
        logging.getLogger().setLevel(logging.WARNING)
        self.fill()


class PeerNIXL(HostPoolSide):
    """`HiCacheNixl` with the POSIX plug-in, in zero copy; its own default is O_DIRECT."""

    def open(self) -> None:
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        plugin = {"posix": {"active": True}}
        direct = self.setup.direct
        config = storage_config(plugin=plugin, l3_cleaner_enabled=False, use_direct_io=direct)
        os.environ["SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR"] = str(self.setup.directory)
        self.storage = HiCacheNixl(config)
        self.storage.register_mem_pool_host(self.pool)


SIDES = {
    FILE: FileDriver,
    HF3FS_SERVER: HF3FSDriver,
    HICACHE_FILE: PeerFile,
    SGLANG_HF3FS: PeerHF3FS,
    SGLANG_HF3FS_SERVER: PeerHF3FS,
    NIXL: PeerNIXL,
}
logging.getLogger("sglang").setLevel(logging.ERROR)
