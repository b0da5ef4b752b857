"""One rank of SGLang without its model: real host pools and a real cache controller, on the CPU.

What SGLang's tree cache does between the controller's threads is done here step by step: allocate
host pages for a hit, hand the operation to the reading thread, and collect the acknowledgements.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
import torch.distributed as dist
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel

PAGE_SIZE = 4
PAGES = 24
LAYERS = 3
WAIT_SECONDS = 120.0
JUNK = 0xA5


@dataclass
class Pools:
    """Host pools of a rank, and the device pool whose mirror the KV pool is."""

    device: object
    kv: object
    side: dict[str, object] = field(default_factory=dict)

    def all(self) -> dict[str, object]:
        return {PoolName.KV: self.kv, **self.side}

    def group(self) -> HostPoolGroup:
        entries = [
            PoolEntry(
                PoolName.KV, self.kv, self.device, lambda layer: layer, is_primary_index_anchor=True
            )
        ]
        entries += [
            PoolEntry(PoolName(name), pool, None, lambda layer: None, host_evict_fn=lambda count: 0)
            for name, pool in self.side.items()
        ]
        return HostPoolGroup(entries)


def mha_pools(
    layout: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    heads: int = 2,
    pages: int = PAGES,
    v_head_dim: int = 16,
) -> Pools:
    """KV of a model with multi-head attention."""
    device = MHATokenToKVPool(
        dtype=dtype,
        head_num=heads,
        head_dim=16,
        v_head_dim=v_head_dim,
        **_on_cpu(pages),
    )
    kind = get_mha_host_pool_cls(device.get_device_pool_infos()[0].buffer_info)
    return Pools(device, _host(kind, device, layout))


def mla_pools(layout: str) -> Pools:
    """KV of a model with latent attention, which every TP rank holds whole."""
    device = MLATokenToKVPool(
        dtype=torch.bfloat16, kv_lora_rank=16, qk_rope_head_dim=8, **_on_cpu(PAGES)
    )
    host = _host(MLATokenToKVPoolHost, device, layout, target_layer_num=LAYERS)
    return Pools(device, host)


def _on_cpu(pages: int) -> dict[str, object]:
    """What the device pools of all kinds are given."""
    size = {"size": pages * PAGE_SIZE, "page_size": PAGE_SIZE, "layer_num": LAYERS}
    return {**size, "device": "cpu", "enable_memory_saver": False}


def _host(kind: type, device: object, layout: str, **more: int) -> object:
    """The host pool of a device pool, as large as that."""
    return kind(
        device.get_device_pool_infos()[0].buffer_info,
        1.0,
        0,
        PAGE_SIZE,
        layout,
        pin_memory=False,
        device_capacity_tokens=device.size,
        start_layer=0,
        end_layer=LAYERS,
        **more,
    )


def mamba_pool(
    layout: str, *, temporal: tuple[int, ...] = (4, 8), slot_states: int = 0
) -> MambaPoolHost:
    """Checkpoints of Mamba states: one temporal and two conv states, and side states where asked
    for."""
    slots = 12
    info = MambaStateBufferInfo(
        temporal=torch.zeros(2, slots, *temporal, dtype=torch.float32),
        conv=(
            torch.zeros(2, slots, 6, 3, dtype=torch.bfloat16),
            torch.zeros(2, slots, 5, 3, dtype=torch.bfloat16),
        ),
        extra_checkpoint_buffers=tuple(
            torch.zeros(slots, 7, dtype=torch.float32) for _ in range(slot_states)
        ),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=slots, pin_memory=False, layout=layout)


def logical_pools(layout: str = "page_first") -> Pools:
    """An anchor that hands out slots and holds nothing, as DeepSeek-V4 has it."""
    pools = mha_pools(layout)
    return Pools(pools.device, LogicalHostPool(PAGES * PAGE_SIZE, PAGE_SIZE, layout=layout))


def with_mamba(pools: Pools, layout: str = "page_first", **options: int) -> Pools:
    """The same pools with one of Mamba states beside them."""
    pools.side["mamba"] = mamba_pool(layout, **options)
    return pools


def tp(rank: int, size: int = 2) -> dict[str, int]:
    """A rank's place in tensor parallelism."""
    return {"tp_rank": rank, "tp_size": size, "attn_tp_rank": rank, "attn_tp_size": size}


def buffers(pool: object) -> list[torch.Tensor]:
    """The tensors that a host pool consists of, as bytes."""
    owned = pool.kv_buffer
    tensors = [] if owned is None else list(owned) if isinstance(owned, (list, tuple)) else [owned]
    return [tensor.view(torch.uint8) for tensor in tensors]


def scribble(pool: object, seed: int) -> None:
    """Fill a pool with bytes that look like nothing."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(pool):
        buffer.random_(0, 256, generator=generator)


def wipe(pool: object) -> None:
    """Forget a pool's content, and which of its slots are taken."""
    for buffer in buffers(pool):
        buffer.fill_(JUNK)
    pool.clear()


def page(pool: object, slot: int) -> torch.Tensor:
    """The page at `slot` as SGLang itself reads it."""
    return pool.get_data_page(slot, flat=True).clone().view(torch.uint8)


def pages(pool: object, indices: torch.Tensor) -> list[torch.Tensor]:
    return [page(pool, int(slot)) for slot in indices[:: pool.page_size]]


def untouched(pool: object, indices: torch.Tensor) -> bool:
    """Whether every page but those in `indices` is still as `wipe` left it."""
    taken = set(indices[:: pool.page_size].tolist())
    others = (slot for slot in range(0, pool.size, pool.page_size) if slot not in taken)
    return all(bool((page(pool, slot) == JUNK).all()) for slot in others)


@dataclass
class Backup:
    """What was written to storage, kept to be compared with."""

    tokens: list[int]
    hashes: list[str]
    contents: dict[str, list[torch.Tensor]]
    completed_tokens: int
    pool_hits: dict[str, int]


@dataclass
class Prefetch:
    """What came back from storage."""

    hit_tokens: int
    """What the query promised, over all pools; host memory was allocated for it."""
    completed_tokens: int = 0
    indices: dict[str, torch.Tensor] = field(default_factory=dict)
    pool_hits: dict[str, int] = field(default_factory=dict)
    verdicts: dict[str, int] = field(default_factory=dict)


class Rank:
    """A controller over host pools; `HybridCacheController` where there are side pools, or where
    asked for."""

    def __init__(self, pools: Pools, *, hybrid: bool = False, **parallel: int) -> None:
        self.pools = pools
        self.parallel = {
            "tp_rank": 0,
            "tp_size": 1,
            "pp_rank": 0,
            "pp_size": 1,
            "attn_dcp_size": 1,
            "attn_dcp_rank": 0,
            **parallel,
        }
        self.hybrid = hybrid or bool(pools.side)
        allocator = SimpleNamespace(
            get_kvcache=lambda: pools.device, set_hicache_transfer_done_event=lambda *_: None
        )
        controller = HybridCacheController if self.hybrid else HiCacheController
        self.controller = controller(
            allocator,
            pools.group() if self.hybrid else pools.kv,
            PAGE_SIZE,
            dist.group.WORLD,
            threading.Event(),
            write_policy="write_through",
            io_backend="kernel",
        )

    @property
    def bridge(self) -> object:
        return self.controller.storage_backend

    def attach(
        self,
        driver: str,
        driver_config: dict[str, object] | None = None,
        *,
        model: str = "llama",
        **extra: object,
    ) -> None:
        config = {
            "backend_name": "hicache",
            "module_path": "hicache_storage.engines.sglang",
            "class_name": "SGLangBridge",
            "interface_v1": 1,
            "driver": driver,
            "driver_config": driver_config or {},
            **extra,
        }
        self.attach_config(
            {name: value for name, value in config.items() if value is not None}, model=model
        )

    def attach_config(
        self, config: dict[str, object], *, backend: str = "dynamic", model: str = "llama"
    ) -> None:
        more = {"host_pools": self.controller.mem_pool_host.entries} if self.hybrid else {}
        with get_parallel().override(**self.parallel):
            self.controller.attach_storage_backend(
                backend,
                prefetch_threshold=PAGE_SIZE,
                model_name=model,
                storage_backend_extra_config=config,
                **more,
            )

    def detach(self) -> None:
        if self.controller.enable_storage:
            self.controller.detach_storage_backend()

    def all_alive(self) -> bool:
        """Whether each of the controller's threads still runs."""
        names = ("prefetch", "prefetch_io_aux", "prefetch_sync", "backup")
        return all(getattr(self.controller, f"{name}_thread").is_alive() for name in names)

    def hashes(self, tokens: list[int], prefix_keys: list[str] | None = None) -> list[str]:
        """SGLang's page hashes: a chain, which goes on from the last of `prefix_keys`."""
        return get_storage_hash_str(
            tokens, prefix_keys[-1] if prefix_keys else None, page_size=PAGE_SIZE
        )

    def backup(
        self,
        tokens: list[int],
        *,
        seed: int = 1,
        checkpoints: dict[str, int] | None = None,
        prefix_keys: list[str] | None = None,
    ) -> Backup:
        """Write pages of `tokens` to storage and wait for the acknowledgement.

        They begin a sequence, or continue that of `prefix_keys`. `checkpoints` gives the side pools
        to write beside KV, and for how many of the last pages.
        """
        for number, pool in enumerate(self.pools.all().values()):
            scribble(pool, seed * 100 + number)
        hashes = self.hashes(tokens, prefix_keys)
        indices = self.pools.kv.alloc(len(tokens))
        contents = {PoolName.KV.value: pages(self.pools.kv, indices)}
        transfers = []
        for name, count in (checkpoints or {}).items():
            pool = self.pools.side[name]
            slots = pool.alloc(count * pool.page_size)
            contents[name] = pages(pool, slots)
            transfers.append(
                PoolTransfer(
                    PoolName(name),
                    host_indices=slots,
                    keys=hashes[-count:],
                    hit_policy=PoolHitPolicy.TRAILING_PAGES,
                )
            )
        more = {"extra_pools": transfers} if self.hybrid else {}
        identifier = self.controller.write_storage(
            indices, tokens, hash_value=hashes, prefix_keys=prefix_keys, **more
        )
        operation = self.controller.ack_backup_queue.get(timeout=WAIT_SECONDS)
        assert operation.id == identifier
        hits = dict(operation.pool_storage_result.extra_pool_hit_pages) if self.hybrid else {}
        return Backup(
            tokens,
            hashes,
            contents,
            operation.completed_tokens,
            {str(name): count for name, count in hits.items()},
        )

    def wipe(self) -> None:
        for pool in self.pools.all().values():
            wipe(pool)

    def prefetch(
        self,
        tokens: list[int],
        *,
        windows: dict[str, int] | None = None,
        prefix_keys: list[str] | None = None,
    ) -> Prefetch:
        """Ask for `tokens` and read what is there; `windows` gives the trailing pages that each
        side pool needs."""
        transfers = [
            PoolTransfer(
                PoolName(name),
                keys=["__placeholder__"] * count,
                hit_policy=PoolHitPolicy.TRAILING_PAGES,
            )
            for name, count in (windows or {}).items()
        ]
        controller, last_hash = self.controller, prefix_keys[-1] if prefix_keys else None
        if self.hybrid:
            request = CacheRequestHandle("request", 0)
            operation = controller.prefetch(
                request, tokens, last_hash, prefix_keys, extra_pools=transfers
            )
        else:
            operation = controller.prefetch("request", tokens, last_hash, prefix_keys)
        assert controller.prefetch_hit_queue.get(timeout=WAIT_SECONDS) is operation
        result = Prefetch(operation.storage_hit_count)
        if self.hybrid:
            result.verdicts = {
                str(name): count for name, count in operation.query_pool_hit_pages.items()
            }
        if not result.hit_tokens:
            return result
        self._allocate(operation, transfers, result)
        controller.prefetch_buffer.put(operation)
        self._collect(result)
        return result

    def _allocate(self, operation: object, transfers: list[PoolTransfer], result: Prefetch) -> None:
        controller, hit = self.controller, result.hit_tokens
        if self.hybrid:
            indices, hit = controller.allocate_storage_hit(
                operation, hit, allow_partial=True, min_tokens=PAGE_SIZE, evict_host=lambda count: 0
            )
        else:
            indices = controller.alloc_prefetch_host_buffers(operation, hit)
        assert indices is not None
        for transfer in transfers:
            pool = self.pools.side[transfer.name]
            transfer.host_indices = pool.alloc(
                min(len(transfer.keys), hit // PAGE_SIZE) * pool.page_size
            )
            result.indices[transfer.name.value] = transfer.host_indices
        operation.storage_hit_count, operation.host_indices = hit, indices
        operation.hash_value = operation.hash_value[: hit // PAGE_SIZE]
        result.indices[PoolName.KV.value] = indices

    def _collect(self, result: Prefetch) -> None:
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=WAIT_SECONDS)
            if ack.completed_tokens is not None:
                result.completed_tokens = ack.completed_tokens
            if ack.pool_hits is not None:
                result.pool_hits = {str(name): count for name, count in ack.pool_hits.items()}
            if ack.completed_req:
                return

    def contents(self, result: Prefetch, name: str = "kv") -> list[torch.Tensor]:
        """What now stands in the pages that a prefetch was to fill."""
        return pages(self.pools.all()[name], result.indices[name])

    def delivered(self, result: Prefetch, backup: Backup, name: str = "kv") -> bool:
        """Whether the prefetched pages of a pool are the ones that were backed up, and nothing else
        was written."""
        got, expected = self.contents(result, name), backup.contents[name]
        same = len(got) == len(expected) and all(
            torch.equal(a, b) for a, b in zip(got, expected, strict=True)
        )
        return same and untouched(self.pools.all()[name], result.indices[name])

    def restores(self, backup: Backup, **windows: int) -> bool:
        """Whether all of a backup comes back once the host has evicted everything, and no more.

        `windows` gives the trailing pages that each side pool needs.
        """
        self.wipe()
        result = self.prefetch(backup.tokens, windows=windows)
        return result.completed_tokens == len(backup.tokens) and all(
            self.delivered(result, backup, name) for name in ("kv", *windows)
        )


def tokens(pages: int, *, start: int = 0) -> list[int]:
    """Tokens of a prompt of so many pages; prompts of another start share no page."""
    return list(range(start, start + pages * PAGE_SIZE))
