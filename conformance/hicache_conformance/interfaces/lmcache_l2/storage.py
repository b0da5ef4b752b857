"""`AdapterStorage`: adapts an L2 adapter of LMCache to the contract.

One storage is one worker of an engine behind LMCache's server, with the adapter under test. A page
is an object in LMCache's L1 memory; the pools of a case are object groups. What LMCache would load
it looks up and locks first, and it stores without asking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey

from hicache_conformance.interfaces.foreign_storage import element_type, torch_type
from hicache_conformance.interfaces.lmcache_l2.engine import Arena, Controllers, layout_of
from hicache_conformance.interfaces.presence_storage import PageMemory, PresenceStorage

if TYPE_CHECKING:
    from lmcache.v1.memory_management import MemoryObj

    from hicache_storage.spec import DriverConfig, StorageIdentity


class AdapterStorage(PresenceStorage):
    """A worker's objects in LMCache's server, with the adapter attached."""

    # A chunk's hash is of all tokens up to its end; the name of a LoRA goes into it, too.
    hashed = ("page_size", "adapter", "salt")
    one_rank_stores = True

    def __init__(self, identity: StorageIdentity, config: DriverConfig) -> None:
        super().__init__(identity, config)
        # Of a model with latent attention, all TP ranks hold the same, and LMCache counts them once.
        tp_size, tp_rank = (
            (1, 0) if identity.kv_replicated else (identity.tp_size, identity.tp_rank)
        )
        workers = tp_size * identity.pp_size * identity.cp_size
        worker = (identity.pp_rank * tp_size + tp_rank) * identity.cp_size + identity.cp_rank
        self._kv_rank = ObjectKey.ComputeKVRank(workers, worker, workers, worker)

    def _start(self) -> tuple[Controllers, dict[str, PageMemory]]:
        layouts: dict[int, MemoryLayoutDesc] = {}
        counts = dict[int, int]()
        for name, pool in self._pools.items():
            geometry, group = pool.geometry, self._groups[name]
            dtype = torch_type(element_type(geometry, self._identity))
            layouts[group] = layout_of(geometry.page_bytes, geometry.page_size, dtype)
            counts[group] = geometry.size // geometry.page_size
        arena = Arena(layouts, counts)
        memories = {
            name: PageMemory(arena.objects[self._groups[name]], _bytes_of) for name in self._pools
        }
        return Controllers(self._entry(), arena, layouts), memories

    def _plugin(self, module: str, name: str) -> dict[str, Any]:
        return {
            "type": "plugin",
            "module_path": module,
            "class_name": name,
            "adapter_params": self._options,
        }

    def _key(self, pool: str, key: bytes) -> ObjectKey:
        return ObjectKey(
            chunk_hash=key,
            model_name=self._identity.model,
            kv_rank=self._kv_rank,
            object_group_id=self._groups[pool],
            cache_salt=self._identity.tenant,
        )


def _bytes_of(item: MemoryObj) -> memoryview:
    # Not the view itself: Python writes into views of its own formats only.
    return np.frombuffer(item.byte_array, np.uint8).data
