"""SGLang's `HiCacheFile` and this project's file driver on the same SGLang host pool, each used the
way it is meant to be."""

from __future__ import annotations

import contextlib
import io
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

# Importing SGLang on a machine without a GPU is talkative.
with contextlib.redirect_stderr(io.StringIO()):
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

from hicache_storage import PoolTransfer, StorageIdentity, create_storage
from hicache_storage.layers import innermost

if TYPE_CHECKING:
    from pathlib import Path

    from hicache_storage.spec import HiCacheStorage

PAGE_TOKENS = 64
BATCH_PAGES = 128
# Layers and heads that make a page of so many bytes, with a head dimension of 128 in bfloat16.
SHAPES = {64 << 10: (2, 1), 256 << 10: (8, 1), 1 << 20: (16, 2), 4 << 20: (32, 4)}


class Candidate(Protocol):
    """One of those who are compared."""

    name: str

    def write(self, keys: list[str]) -> bool: ...
    def read(self, keys: list[str]) -> bool: ...
    def exists(self, keys: list[str]) -> int: ...
    def remove(self) -> None: ...
    def files(self) -> list[Path]: ...
    def close(self) -> None: ...


def host_pool(page_bytes: int, layout: str = "page_first") -> MHATokenToKVPoolHost:
    """SGLang's host pool of 128 pages, filled with random bytes."""
    layers, heads = SHAPES[page_bytes]
    size = BATCH_PAGES * PAGE_TOKENS
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


def indices(keys: list[str], first: int = 0) -> torch.Tensor:
    """Tokens of as many pages of a host pool as there are keys, from page `first` on."""
    return torch.arange(first * PAGE_TOKENS, (first + len(keys)) * PAGE_TOKENS)


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


class Calls:
    """The calls of a storage of this project, on some pages of a host pool."""

    storage: HiCacheStorage

    def write(self, keys: list[str], first: int = 0) -> bool:
        transfer = PoolTransfer("kv", indices(keys, first), keys=keys)
        return all(self.storage.batch_set_v2([transfer])["kv"])

    def read(self, keys: list[str], first: int = 0) -> bool:
        transfer = PoolTransfer("kv", indices(keys, first), keys=keys)
        return all(self.storage.batch_get_v2([transfer])["kv"])

    def exists(self, keys: list[str]) -> int:
        return self.storage.batch_exists_v2(keys).kv_hit_pages


@dataclass
class Peer:
    """`HiCacheFile`, called as `HiCacheController._generic_page_get` and `_generic_page_set` call
    it."""

    pool: MHATokenToKVPoolHost
    directory: Path
    name: str = "HiCacheFile"

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True)
        self.storage = HiCacheFile(storage_config(), str(self.directory))
        self.indices = torch.arange(BATCH_PAGES * PAGE_TOKENS)

    def write(self, keys: list[str], first: int = 0) -> bool:
        data = [
            self.pool.get_data_page(self.indices[page * PAGE_TOKENS])
            for page in range(first, first + len(keys))
        ]
        return self.storage.batch_set(keys, data)

    def read(self, keys: list[str], first: int = 0) -> bool:
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        pages = self.storage.batch_get(keys, targets)
        for page, data in enumerate(pages, first):
            if data is None:
                return False
            self.pool.set_from_flat_data_page(self.indices[page * PAGE_TOKENS], data)
        return True

    def exists(self, keys: list[str]) -> int:
        return self.storage.batch_exists(keys)

    def remove(self) -> None:
        for path in self.files():
            path.unlink()

    def files(self) -> list[Path]:
        return list(self.directory.iterdir())

    def close(self) -> None:
        self.remove()


class Ours(Calls):
    """The file driver with verification on, through the whole stack: metrics, deadline, circuit
    breaker, v2 calls."""

    def __init__(
        self,
        pool: MHATokenToKVPoolHost,
        directory: Path,
        name: str = "hicache file",
        **options: object,
    ) -> None:
        self.name = name
        self.directory = directory
        identity = StorageIdentity(
            model="benchmark", kv_dtype="bfloat16", page_size=PAGE_TOKENS, layout="page_first"
        )
        self.storage = create_storage("file", identity, {"path": str(directory), **options})
        self.storage.register_mem_host_pool_v2(pool, "kv")
        self.storage.open()

    def remove(self) -> None:
        innermost(self.storage).clear()

    def files(self) -> list[Path]:
        return list(self.directory.rglob("*.bundle"))

    def close(self) -> None:
        self.remove()
        self.storage.close()


logging.getLogger("sglang").setLevel(logging.ERROR)
