"""`AdapterStorage`: adapts an L2 adapter of LMCache to the contract.

One storage is one worker of an engine behind LMCache's server, with the adapter under test. A page
is an object in LMCache's L1 memory; the pools of a case are object groups. What LMCache would load
it looks up and locks first, and it stores without asking.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lmcache.v1.distributed.api import ObjectKey

from hicache_conformance.interfaces.foreign_storage import load_class
from hicache_conformance.interfaces.lmcache_l2.engine import Arena, Controllers, layout_of
from hicache_conformance.interfaces.lmcache_l2.interface import HASHED
from hicache_conformance.interfaces.mirror import Mirror
from hicache_conformance.interfaces.presence_storage import (
    PresenceStorage,
    element_type,
    pool_order,
)
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lmcache.v1.distributed.api import MemoryLayoutDesc
    from lmcache.v1.memory_management import MemoryObj

    from hicache_conformance.interfaces.presence_storage import Page
    from hicache_storage.spec import DriverConfig, StorageIdentity


class _Objects:
    """The objects that a pool's pages have."""

    def __init__(self, objects: Sequence[MemoryObj]) -> None:
        self.objects = objects

    def content(self, page: int) -> bytes:
        """The bytes of a page."""
        return _bytes_of(self.objects[page]).tobytes()

    def put(self, page: int, content: bytes) -> None:
        """Replace the bytes of a page."""
        _bytes_of(self.objects[page])[:] = np.frombuffer(content, np.uint8)


class AdapterStorage(PresenceStorage):
    """A worker's objects in LMCache's server, with the adapter attached."""

    def __init__(self, identity: StorageIdentity, config: DriverConfig) -> None:
        super().__init__(identity, config, HASHED)
        self._groups: dict[str, int] = {}
        self._memories: dict[str, _Objects] = {}
        self._layouts: dict[int, MemoryLayoutDesc] = {}
        self._arena: Arena | None = None
        # Of a model with latent attention, all TP ranks hold the same, and LMCache counts them once.
        tp_size, tp_rank = (
            (1, 0) if identity.kv_replicated else (identity.tp_size, identity.tp_rank)
        )
        workers = tp_size * identity.pp_size * identity.cp_size
        worker = (identity.pp_rank * tp_size + tp_rank) * identity.cp_size + identity.cp_rank
        self._kv_rank = ObjectKey.ComputeKVRank(workers, worker, workers, worker)

    def _attach(self) -> Controllers:
        names = pool_order(self._pools)
        # KV is a group of every model.
        names = names if PoolName.KV in names else [PoolName.KV, *names]
        self._groups = {name: group for group, name in enumerate(names)}
        sizes: dict[str, tuple[MemoryLayoutDesc, int]] = {}
        for name, pool in self._pools.items():
            geometry = pool.geometry
            layout = layout_of(
                geometry.page_bytes,
                geometry.page_size,
                _torch_type(element_type(geometry, self._identity)),
            )
            self._layouts[self._groups[name]] = layout
            sizes[name] = layout, geometry.size // geometry.page_size
        arena = self._arena = Arena(sizes)
        for name, pool in self._pools.items():
            memory = self._memories[name] = _Objects(arena.objects[name])
            self._mirrors[name] = Mirror(pool, memory)
        return Controllers(self._entry(), arena.memory)

    def _entry(self) -> dict[str, Any]:
        if not self._setup.target:
            return {"type": self._setup.backend, **self._options}
        # Here, because LMCache reports what cannot be imported less clearly.
        load_class(self._setup.target)
        module, _, name = self._setup.target.partition(":")
        return {
            "type": "plugin",
            "module_path": module,
            "class_name": name,
            "adapter_params": self._options,
        }

    def _detach(self, driver: Controllers) -> None:
        try:
            driver.close()
        finally:
            self._memories.clear()
            if self._arena is not None:
                self._arena.close()

    # The data path
    # ----------------------------------------------------------------------------------------------

    def _look_up(self, pool: str, keys: Sequence[bytes], prefix: Sequence[bytes]) -> list[bool]:
        controllers: Controllers = self._attached()
        return controllers.look_up([self._key(pool, key) for key in keys], self._layouts)

    def _load(self, pages: Sequence[Page], prefix: Sequence[bytes]) -> list[bool]:
        controllers: Controllers = self._attached()
        return controllers.load(*self._placed(pages), self._layouts)

    def _store(self, pages: Sequence[Page], prefix: Sequence[bytes]) -> list[bool]:
        controllers: Controllers = self._attached()
        if not self._identity.is_writer(PoolName.KV):
            # The engine does not ask a rank that is not the writer.
            return controllers.look_up(self._placed(pages)[0], self._layouts)
        # LMCache is told of a task as a whole.
        return [controllers.store(*self._placed(pages)).is_successful()] * len(pages)

    def _placed(self, pages: Sequence[Page]) -> tuple[list[ObjectKey], list[MemoryObj]]:
        return (
            [self._key(page.pool, page.key) for page in pages],
            [self._memories[page.pool].objects[page.number] for page in pages],
        )

    def _key(self, pool: str, key: bytes) -> ObjectKey:
        return ObjectKey(
            chunk_hash=key,
            model_name=self._identity.model,
            kv_rank=self._kv_rank,
            object_group_id=self._groups[pool],
            cache_salt=self._identity.tenant,
        )


def _bytes_of(item: MemoryObj) -> np.ndarray[Any, np.dtype[np.uint8]]:
    # Not the view itself: Python writes into views of its own formats only.
    return np.frombuffer(item.byte_array, np.uint8)


def _torch_type(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    return found if isinstance(found, torch.dtype) else torch.uint8
