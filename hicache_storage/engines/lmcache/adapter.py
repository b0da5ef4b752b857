"""The L2 adapter that LMCache's server loads."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Final

import torch
from lmcache.lmcache_native import Bitmap
from lmcache.logging import init_logger
from lmcache.v1.distributed.api import KeyEntry, KeyListPage
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.platform import create_event_notifier

from hicache_storage.engines.async_calls import AsyncCalls
from hicache_storage.engines.bridge_storage import RefusedCalls, minor_version, open_storage
from hicache_storage.engines.engine_pool import EnginePool
from hicache_storage.engines.lmcache.identity import (
    ObjectLayout,
    Place,
    adapter_config,
    object_key,
    place_identity,
)
from hicache_storage.engines.page_events import PageEvents, PageId
from hicache_storage.observability.logs import log_like
from hicache_storage.observability.prometheus import process_collector
from hicache_storage.plugins import create_storage
from hicache_storage.spec import (
    AskedScope,
    ConfigError,
    HiCacheStorage,
    InvalidPoolError,
    PoolName,
    PoolTransfer,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.distributed.internal_api import L1MemoryDesc
    from lmcache.v1.memory_management import MemoryObj

    from hicache_storage.spec import Health


logger = init_logger(__name__)

HEALTH_SECONDS: Final = 5.0
"""How old the health of `report_status` may be: asking a store may take as long as a call."""

MAX_LAYOUTS: Final = 256
"""Limit of the layouts that are remembered: an engine has one for each group of layers."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """What a store task has stored."""

    answers: list[bool]
    written: int = 0
    """Bytes."""


class HiCacheL2Adapter(L2AdapterInterface):
    """Adapter: serves LMCache's L2 from a driver of this project, zero copy.

    Objects lie in LMCache's L1 arena, and are read and written there. Each place (model, worker,
    object group and layout) has a storage of its own, opened when it is first named.

    Construction fails, with the field to mend, where the configuration cannot be served. After that
    nothing is raised into LMCache: each task is reported once, a fault is a 0 bit or an object that
    was not stored, logged once for each reason and counted. Nothing is locked: a page that is
    evicted between lookup and load is a 0 bit.

    Thread-safe.

    Args:
        config: `adapter_params`; see `AdapterConfig`.
        l1_memory_desc: LMCache's arena.

    Raises:
        ConfigError: the configuration cannot be served; the message says what to change.
    """

    def __init__(
        self, config: Mapping[str, object], l1_memory_desc: L1MemoryDesc | None = None
    ) -> None:
        # LMCache evicts nothing here: the driver has a capacity of its own.
        super().__init__(max_capacity_bytes=0)
        self._config = adapter_config(config)
        log_like(logger)
        if l1_memory_desc is None:
            raise ConfigError(
                "hicache bridge: LMCache has no contiguous L1 arena; use its default L1 memory"
            )
        self._arena = l1_memory_desc
        # The arena outlives the adapter.
        arena = (ctypes.c_char * l1_memory_desc.size).from_address(l1_memory_desc.ptr)
        self._view = memoryview(arena).cast("B")
        self._version = minor_version("lmcache")
        # A driver or an option that is wrong is told now, and not by each call.
        create_storage(
            self._config.driver,
            place_identity(
                Place("probe", 0, 0, ObjectLayout((), ())), self._config, version=self._version
            ),
            self._config.driver_config,
        ).close()
        # Guards `_storages`; never held while a storage opens.
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._storages = dict[Place, HiCacheStorage]()
        self._refusals = RefusedCalls("LMCache")
        self._page_events = PageEvents[tuple["ObjectKey", int]](self._publish, self._refusals)
        """Of keys, with the bytes of their objects."""
        self._health: tuple[float, list[Health]] = (0.0, [])
        self._tasks = itertools.count()
        self._store_event = create_event_notifier()
        self._lookup_event = create_event_notifier()
        self._load_event = create_event_notifier()
        threads, seconds = self._config.threads, self._config.deadline_seconds
        self._stores = AsyncCalls[_Stored]("hicache-store", threads, self._store_event.notify)
        self._lookups = AsyncCalls[list[bool]](
            "hicache-lookup", threads, self._lookup_event.notify, seconds, self._refusals
        )
        self._loads = AsyncCalls[list[bool]](
            "hicache-load", threads, self._load_event.notify, seconds, self._refusals
        )
        # LMCache's `/metrics` serves the default registry.
        process_collector().add(self)

    @property
    def refused_calls(self) -> int:
        """Number of calls that could not be served, and were answered as misses."""
        return self._refusals.count

    def get_store_event_fd(self) -> int:
        """Descriptor that is readable when store tasks have ended."""
        return self._store_event.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        """Descriptor that is readable when lookup tasks have ended."""
        return self._lookup_event.fileno()

    def get_load_event_fd(self) -> int:
        """Descriptor that is readable when load tasks have ended."""
        return self._load_event.fileno()

    # Tasks
    # ----------------------------------------------------------------------------------------------

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to store objects of the arena."""
        task, keys, objects = next(self._tasks), list(keys), list(objects)
        self._stores.submit(task, partial(self._store, keys, objects), _Stored([False] * len(keys)))
        return task

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Report the store tasks that have ended since the last call, once."""
        return {
            task: L2StoreResult(all(stored.answers), stored.written)
            for task, stored in self._stores.finished()
        }

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        """Begin to find out which objects are stored; a group without a layout has none."""
        task, keys = next(self._tasks), list(keys)
        layouts = {
            group: ObjectLayout.of(layout.shapes, layout.dtypes)
            for group, layout in group_layout_descs.items()
        }
        self._lookups.submit(task, partial(self._look_up, keys, layouts), [False] * len(keys))
        return task

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Report a lookup task once; None while it runs."""
        return _bitmap(self._lookups.take(task_id))

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: objects are not locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        """Begin to load objects into the arena."""
        task, keys, objects = next(self._tasks), list(keys), list(objects)
        self._loads.submit(task, partial(self._load, keys, objects), [False] * len(keys))
        return task

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Report a load task once; None while it runs."""
        return _bitmap(self._loads.take(task_id))

    # Directory
    # ----------------------------------------------------------------------------------------------

    def delete(self, keys: list[ObjectKey]) -> None:
        """Delete objects, and report those that are gone to the listeners. Blocks.

        An object stays where the driver cannot delete, and where this adapter has not yet seen an
        object of its model, worker and group: LMCache's keys do not tell the layout.
        """
        with self._lock:
            storages = list(self._storages.items())
        for place, storage in storages:
            texts = [object_key(key) for key in keys if _place(key, place.layout) == place]
            if texts:
                try:
                    storage.delete(texts)
                except (Exception, SystemExit) as error:  # noqa: BLE001 - counted and logged; it may not end a thread of LMCache's server
                    self._refusals.note("delete", place.model, error)
                self._page_events.confirm(_page(storage, text) for text in texts)

    def list_l2_keys(
        self, model_name: str | None = None, page_size: int = 500, cursor: str | None = None
    ) -> KeyListPage:
        """List the objects that this adapter has stored or loaded and that are not removed.

        Those that others have stored are not among them: a store keeps no keys of LMCache's.

        Raises:
            ValueError: `page_size` is not positive, or the cursor is none of this adapter.
        """
        if page_size <= 0:
            raise ValueError(f"page_size must be positive, got {page_size}")
        try:
            after = -1 if cursor is None else int(cursor)
        except ValueError:
            raise ValueError(f"cursor must be that of an earlier page, got {cursor!r}") from None
        known = self._page_events.published(after)
        listed = [
            (number, key, size)
            for number, (key, size) in known
            if model_name is None or key.model_name == model_name
        ]
        shown = listed[:page_size]
        return KeyListPage(
            tuple(KeyEntry(key.to_encoded_object_key(), size) for _, key, size in shown),
            str(shown[-1][0]) if len(listed) > page_size else None,
        )

    def close(self) -> None:
        """End the threads, close the storages and the descriptors. Idempotent."""
        process_collector().remove(self)
        with ExitStack() as steps:
            # The last one is called first.
            for event in (self._store_event, self._lookup_event, self._load_event):
                steps.callback(event.close)
            with self._lock:
                for storage in self._storages.values():
                    steps.callback(storage.close)
            steps.callback(self._page_events.close)
            for calls in (self._stores, self._lookups, self._loads):
                steps.callback(calls.close)

    def get_stats(self) -> StorageStats:
        """Return the counters of all storages, summed."""
        with self._lock:
            storages = list(self._storages.values())
        return StorageStats.total(
            self._config.driver, (storage.get_stats() for storage in storages)
        )

    def report_status(self) -> dict[str, object]:
        """Report health and counters; asks the stores every few seconds at most."""
        with self._lock:
            storages = list(self._storages.values())
        checked, found = self._health
        if time.monotonic() - checked > HEALTH_SECONDS:
            found = [storage.health() for storage in storages]
            self._health = time.monotonic(), found
        pools = self.get_stats().pools.values()
        return {
            "is_healthy": all(health.ok for health in found),
            "is_writable": all(health.writable for health in found),
            "type": type(self).__name__,
            "driver": self._config.driver,
            "places": len(storages),
            "pages_read": sum(pool.pages_read for pool in pools),
            "pages_written": sum(pool.pages_written for pool in pools),
            "pages_damaged": sum(pool.pages_damaged for pool in pools),
            "faults": sum(storage.fault_count() for storage in storages),
            "refused_calls": self.refused_calls,
        }

    # How it is done
    # ----------------------------------------------------------------------------------------------

    def _look_up(
        self, keys: Sequence[ObjectKey], layouts: Mapping[int, ObjectLayout]
    ) -> list[bool]:
        """Answer for each key whether it is stored. Blocks."""
        places = [
            _place(key, layouts[key.object_group_id]) if key.object_group_id in layouts else None
            for key in keys
        ]

        def ask(storage: HiCacheStorage, indices: list[int]) -> list[bool]:
            texts = [object_key(keys[index]) for index in indices]
            found = storage.batch_present(texts)
            self._page_events.doubt(
                _page(storage, text)
                for text, is_there in zip(texts, found, strict=True)
                if not is_there
            )
            return found

        return self._by_place("batch_present", places, ask)

    def _load(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> list[bool]:
        """Load objects. Blocks."""
        answers = self._move("batch_get_v2", keys, objects)
        # Here and not at a lookup, as LMCache's own adapters do.
        self._notify_keys_accessed(
            [key for key, answer in zip(keys, answers, strict=True) if answer]
        )
        return answers

    def _store(self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]) -> _Stored:
        """Store objects. Blocks."""
        # No request waits for a store: what it spends in the queue does not count.
        with AskedScope():
            answers = self._move("batch_set_v2", keys, objects)
        written = sum(
            item.get_size() for item, answer in zip(objects, answers, strict=True) if answer
        )
        return _Stored(answers, written)

    def _publish(self, pages: Sequence[tuple[ObjectKey, int]], *, removed: bool) -> None:
        notify = self._notify_keys_deleted if removed else self._notify_keys_stored
        notify([key for key, _ in pages], [size for _, size in pages])

    def _move(
        self, call: str, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> list[bool]:
        layouts = [_layout(item) for item in objects]

        def move(storage: HiCacheStorage, indices: list[int]) -> list[bool]:
            texts = [object_key(keys[index]) for index in indices]
            slots = torch.tensor([self._slot(objects[index]) for index in indices])
            transfer = PoolTransfer(PoolName.KV, slots, keys=texts)
            answers = [False] * len(indices)
            with self._page_events.call(
                [_page(storage, text) for text in texts],
                [(keys[index], objects[index].get_size()) for index in indices],
                answers,
            ):
                moved = (
                    storage.batch_set_v2([transfer])
                    if call == "batch_set_v2"
                    else storage.batch_get_v2([transfer])
                )
                answers[:] = moved[PoolName.KV]
            return answers

        places = [_place(key, layout) for key, layout in zip(keys, layouts, strict=True)]
        return self._by_place(call, places, move)

    def _by_place(
        self,
        call: str,
        places: Sequence[Place | None],
        ask: Callable[[HiCacheStorage, list[int]], list[bool]],
    ) -> list[bool]:
        """Ask the storage of each place for its objects; a failure is `False` for these."""
        answers = [False] * len(places)
        shares = dict[Place, list[int]]()
        for index, place in enumerate(places):
            if place is not None:
                shares.setdefault(place, []).append(index)
        for place, indices in shares.items():
            try:
                found = ask(self._storage(place), indices)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - counted and logged; it may not end a thread of LMCache's server
                self._refusals.note(call, place.model, error)
                continue
            for index, answer in zip(indices, found, strict=True):
                answers[index] = answer
        return answers

    def _storage(self, place: Place) -> HiCacheStorage:
        """Return the storage of a place, opened if it is new."""
        with self._lock:
            found = self._storages.get(place)
        if found is not None:
            return found
        with self._opening:
            with self._lock:
                found = self._storages.get(place)
            if found is None:
                found = self._open(place)
                self._page_events.watch(found)
                with self._lock:
                    self._storages[place] = found
        return found

    def _open(self, place: Place) -> HiCacheStorage:
        pool = EnginePool(
            self._view,
            stride=self._arena.align_bytes,
            page_bytes=_bytes_of(place.layout),
            layout="lmcache",
        )
        identity = place_identity(place, self._config, version=self._version)
        return open_storage(self._config, identity, {PoolName.KV: pool})

    def _slot(self, item: MemoryObj) -> int:
        """Return the slot that an object begins at.

        Raises:
            InvalidPoolError: it does not lie in the arena, or is shorter than its tensors.
        """
        offset = item.data_ptr - self._arena.ptr
        size = _bytes_of(_layout(item))
        if item.get_size() != size:
            raise InvalidPoolError(
                f"an object of {item.get_size()} bytes whose tensors have {size}: objects that "
                "LMCache transforms (serde) are not served"
            )
        if offset % self._arena.align_bytes or not 0 <= offset <= self._arena.size - size:
            raise InvalidPoolError(f"an object {offset} bytes from the start of LMCache's arena")
        return offset // self._arena.align_bytes


def _bitmap(answers: list[bool] | None) -> Bitmap | None:
    if answers is None:
        return None
    found = Bitmap(len(answers))
    found.batched_set([index for index, answer in enumerate(answers) if answer])
    return found


def _place(key: ObjectKey, layout: ObjectLayout) -> Place:
    return Place(key.model_name, key.kv_rank, key.object_group_id, layout)


def _page(storage: HiCacheStorage, key: str) -> PageId:
    return PageId(storage, PoolName.KV, key)


def _layout(item: MemoryObj) -> ObjectLayout:
    return _known_layout(tuple(item.get_shapes()), tuple(item.get_dtypes()))


@lru_cache(maxsize=MAX_LAYOUTS)
def _known_layout(shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...]) -> ObjectLayout:
    return ObjectLayout.of(shapes, dtypes)


@lru_cache(maxsize=MAX_LAYOUTS)
def _bytes_of(layout: ObjectLayout) -> int:
    return sum(
        torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True)
    )
