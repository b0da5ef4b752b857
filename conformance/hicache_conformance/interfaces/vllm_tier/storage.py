"""`TierStorage`: adapts a secondary tier of vLLM to the contract.

One storage is one replica of an engine: its scheduler, its CPU tier, and the tier under test. A row
of the CPU tier is a page, and holds the bytes of all workers; the pools of a case are KV cache
groups. What vLLM would load it looks up first, and it stores without asking.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Final

from vllm.v1.kv_offload.base import OffloadKey, make_offload_key

from hicache_conformance.interfaces.foreign_storage import element_type
from hicache_conformance.interfaces.presence_storage import PageMemory, PresenceStorage
from hicache_conformance.interfaces.vllm_tier.engine import (
    Rows,
    Scheduler,
    TierSpec,
    offloading_config,
)

LAYERS: Final = 4
"""Of a model whose identity names no range."""


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
