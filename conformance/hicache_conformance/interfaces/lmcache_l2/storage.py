"""`AdapterStorage`: adapts an L2 adapter of LMCache to the contract.

One storage is one worker of an engine behind LMCache's server, with the adapter under test. A page
is an object in LMCache's L1 memory; the pools of a case are object groups. LMCache's two controllers
call the adapter: what LMCache would load they look up and lock first, and they store without asking.
"""

from __future__ import annotations

import select
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.error import L1Error
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.memory_manager import L1MemoryManager
from lmcache.v1.platform import consume_fd

from hicache_conformance.interfaces.foreign_storage import element_type, torch_type
from hicache_conformance.interfaces.presence_storage import (
    EngineThread,
    PageMemory,
    PresenceStorage,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

    from lmcache.lmcache_native import Bitmap
    from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2StoreResult
    from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
    from lmcache.v1.memory_management import MemoryObj

    from hicache_storage.spec import DriverConfig, StorageIdentity

ALIGN_BYTES: Final = 4096
"""LMCache's own; objects begin at multiples of it."""
POLL_MS: Final = 1


def create_adapter(entry: Mapping[str, Any], memory: L1MemoryDesc) -> L2AdapterInterface:
    """Make an adapter as LMCache's server does, of an entry of `--l2-adapter`."""
    config = get_l2_adapter_config_class(str(entry["type"])).from_dict(dict(entry))
    adapter = create_l2_adapter(config, memory)
    adapter.set_backend_identity(str(entry["type"]), shared=False)
    return adapter


def layout_of(page_bytes: int, tokens: int, dtype: torch.dtype) -> MemoryLayoutDesc:
    """Layout of an object of so many bytes, as one tensor; of bytes, where elements do not fit."""
    row, rest = divmod(page_bytes, tokens * dtype.itemsize)
    if rest or not row:
        return MemoryLayoutDesc([torch.Size((page_bytes,))], [torch.uint8])
    return MemoryLayoutDesc([torch.Size((tokens, row))], [dtype])


class Arena:
    """LMCache's L1 memory, and the objects that its own allocator has made in it."""

    def __init__(self, layouts: Mapping[int, MemoryLayoutDesc], counts: Mapping[int, int]) -> None:
        sizes = [
            counts[group] * -(-sum(_bytes_of(layout)) // ALIGN_BYTES) * ALIGN_BYTES
            for group, layout in layouts.items()
        ]
        self._manager = L1MemoryManager(
            L1MemoryManagerConfig(
                size_in_bytes=sum(sizes), use_lazy=False, align_bytes=ALIGN_BYTES, shm_name=""
            )
        )
        self.objects: dict[int, list[MemoryObj]] = {}
        for group, layout in layouts.items():
            error, objects = self._manager.allocate(layout, counts[group])
            if error is not L1Error.SUCCESS:
                raise MemoryError(f"LMCache has no memory for {counts[group]} objects: {error}")
            self.objects[group] = objects

    @property
    def memory(self) -> L1MemoryDesc:
        """What adapters are told of it."""
        return self._manager.get_l1_memory_desc()

    def close(self) -> None:
        """Free the objects and the memory."""
        for objects in self.objects.values():
            self._manager.free(objects)
        self.objects.clear()
        self._manager.close()


@dataclass(slots=True)
class _Tasks:
    """Tasks of one kind that are under way, and the bitmaps of those that have ended."""

    query: Callable[[int], Bitmap | None]
    under_way: set[int]
    ended: dict[int, Bitmap]

    def signaled(self) -> None:
        """Ask for each task that is under way; only now, as LMCache does."""
        for task in list(self.under_way):
            if (bitmap := self.query(task)) is not None:
                self.under_way.remove(task)
                self.ended[task] = bitmap


class Controllers:
    """LMCache's store controller and prefetch controller, each a thread that polls descriptors."""

    def __init__(
        self, entry: Mapping[str, Any], arena: Arena, layouts: Mapping[int, MemoryLayoutDesc]
    ) -> None:
        self._arena = arena
        self._layouts = dict(layouts)
        self.adapter = create_adapter(entry, arena.memory)
        self._stored: dict[int, L2StoreResult] = {}
        self._lookups = _Tasks(self.adapter.query_lookup_and_lock_result, set(), {})
        self._loads = _Tasks(self.adapter.query_load_result, set(), {})
        self._store_events = select.poll()
        self._prefetch_events = select.poll()
        self._store_events.register(self.adapter.get_store_event_fd(), select.POLLIN)
        for descriptor in (
            self.adapter.get_lookup_and_lock_event_fd(),
            self.adapter.get_load_event_fd(),
        ):
            self._prefetch_events.register(descriptor, select.POLLIN)
        self._store_thread = EngineThread("lmcache-store-controller", self._poll_stores)
        self._prefetch_thread = EngineThread("lmcache-prefetch-controller", self._poll_prefetches)

    def look_up(self, keys: Sequence[ObjectKey], before: int) -> list[bool]:
        """Look keys up, and unlock those that were found."""
        return self._prefetch_thread.run(self._look_up(keys, keeps=False))

    def load(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], before: int
    ) -> list[bool]:
        """Look keys up, and load those that are there; whether each was loaded."""
        return self._prefetch_thread.run(self._prefetch(keys, objects))

    def store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj], before: int) -> bool:
        """Store objects; LMCache is told of a task as a whole."""
        return self._store_thread.run(self._store(keys, objects)).is_successful()

    def close(self) -> None:
        """End the threads, and close the adapter behind them as LMCache does; free the memory."""
        self._store_thread.close()
        self._prefetch_thread.close()
        try:
            self.adapter.close()
        finally:
            self._arena.close()

    # In the controllers' threads
    # ----------------------------------------------------------------------------------------------

    def _store(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> Generator[str, None, L2StoreResult]:
        task = self.adapter.submit_store_task(list(keys), list(objects))
        while task not in self._stored:
            yield f"a store of {len(keys)} objects was not reported"
        return self._stored.pop(task)

    def _look_up(
        self, keys: Sequence[ObjectKey], *, keeps: bool
    ) -> Generator[str, None, list[bool]]:
        task = self.adapter.submit_lookup_and_lock_task(list(keys), dict(self._layouts))
        found = yield from self._ended(self._lookups, task, len(keys), "lookup")
        if not keeps:
            self._unlock(keys, found)
        return found

    def _prefetch(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> Generator[str, None, list[bool]]:
        found = yield from self._look_up(keys, keeps=True)
        hits = [index for index, is_hit in enumerate(found) if is_hit]
        loaded = [False] * len(keys)
        if hits:
            task = self.adapter.submit_load_task(
                [keys[index] for index in hits], [objects[index] for index in hits]
            )
            answers = yield from self._ended(self._loads, task, len(hits), "load")
            for index, answer in zip(hits, answers, strict=True):
                loaded[index] = answer
            self._unlock(keys, found)
        return loaded

    def _ended(
        self, tasks: _Tasks, task: int, keys: int, kind: str
    ) -> Generator[str, None, list[bool]]:
        tasks.under_way.add(task)
        while task not in tasks.ended:
            yield f"a {kind} of {keys} objects was not reported"
        bitmap = tasks.ended.pop(task)
        return [bool(bitmap.test(index)) for index in range(keys)]

    def _unlock(self, keys: Sequence[ObjectKey], found: Iterable[bool]) -> None:
        locked = [key for key, is_there in zip(keys, found, strict=True) if is_there]
        if locked:
            self.adapter.submit_unlock(locked)

    def _poll_stores(self) -> None:
        for descriptor, _ in self._store_events.poll(POLL_MS):
            consume_fd(descriptor)
            self._stored.update(self.adapter.pop_completed_store_tasks())

    def _poll_prefetches(self) -> None:
        for descriptor, _ in self._prefetch_events.poll(POLL_MS):
            consume_fd(descriptor)
            is_lookup = descriptor == self.adapter.get_lookup_and_lock_event_fd()
            (self._lookups if is_lookup else self._loads).signaled()


def _bytes_of(layout: MemoryLayoutDesc) -> list[int]:
    return [
        shape.numel() * dtype.itemsize
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    ]


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
            name: PageMemory(arena.objects[self._groups[name]], _view_of) for name in self._pools
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


def _view_of(item: MemoryObj) -> memoryview:
    # Not the view itself: Python writes into views of its own formats only.
    return np.frombuffer(item.byte_array, np.uint8).data
