"""Right drivers in memory, made of small steps, so that each can be made wrong."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType
from typing import ClassVar

from mutant import IN_PROCESS

from hicache_storage.objects import ObjectRemoval, ObjectStorage
from hicache_storage.objects.namespace import Namespace
from hicache_storage.objects.requests import RegisteredPool, pool_requests
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import (
    DriverConfig,
    Health,
    HiCacheStorage,
    PoolName,
    PoolPresence,
    RemovalReason,
    RemovalScope,
    StorageClosedError,
    StorageStats,
    UnknownPoolError,
    common_hit,
    parse_bytes,
)
from hicache_storage.spec.arguments import check_keys
from hicache_storage.testing import MemoryStorage

PATH = {"path": "{tmp}/store"}
SLOT_BYTES = 8192 + 512


def fill(page, content):
    """Copy the bytes of a page, if they are as many as it has."""
    if content is None or len(content) != sum(map(len, page)):
        return False
    start = 0
    for buffer in page:
        buffer[:] = content[start : start + len(buffer)]
        start += len(buffer)
    return True


class PlainConfig(DriverConfig, frozen=True, kw_only=True):
    store: str = "default"


class PathConfig(PlainConfig, frozen=True, kw_only=True):
    path: str


class SlotsConfig(PathConfig, frozen=True, kw_only=True):
    capacity: str = "64MiB"


class Plain(HiCacheStorage):
    """Keeps the bytes of each page in a dictionary, without an envelope.

    So nothing notices what a fault does to them.
    """

    promises = IN_PROCESS
    spec = MappingProxyType({"config": "drivers_memory:PlainConfig"})
    stores: ClassVar[dict] = {}

    def __init__(self, identity, config):
        self._identity = identity
        self.config = config
        store = f"{type(self).__name__}/{config.store}/{getattr(config, 'path', '')}"
        self.pages = self.stores.setdefault(store, {})
        self.pools = {}
        self.closed = False

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def place(self, pool, key):
        return (pool.namespace.name, key)

    def put(self, pool, key, page):
        self.pages.setdefault(self.place(pool, key), b"".join(page))
        return True

    def there(self, pool, key):
        return self.place(pool, key) in self.pages

    def take(self, pool, key, page):
        return fill(page, self.pages.get(self.place(pool, key)))

    def drop(self, pool, key):
        return self.pages.pop(self.place(pool, key), None) is not None

    def read(self, request):
        try:
            return self.deliver(request)
        except RuntimeError:
            # The engine's pool failed.
            return [False] * len(request.keys)

    def deliver(self, request):
        targets = request.pool.access.targets(request.slots)
        done = [
            self.take(request.pool, key, page)
            for key, page in zip(request.keys, targets, strict=True)
        ]
        whole = list(compress(request.slots, done)), list(compress(targets, done))
        request.pool.access.deliver(*whole)
        return done

    def writes(self, name):
        return self.identity.is_writer(name)

    def write(self, request):
        if not self.writes(request.pool.name):
            return [self.there(request.pool, key) for key in request.keys]
        try:
            sources = request.pool.access.sources(request.slots)
        except RuntimeError:
            return [False] * len(request.keys)
        return [
            self.put(request.pool, key, page)
            for key, page in zip(request.keys, sources, strict=True)
        ]

    def present(self, name, keys):
        pool = self.pools.get(name)
        return [pool is not None and self.there(pool, key) for key in keys]

    def fold(self, kv, pools):
        return common_hit(kv, pools)

    def doomed(self):
        own = {pool.namespace.name for pool in self.pools.values()}
        return [place for place in list(self.pages) if place[0] in own]

    def wipe(self):
        for place in self.doomed():
            self.pages.pop(place, None)

    def check_open(self):
        if self.closed:
            raise StorageClosedError("closed")

    # The contract
    # ------------------------------------------------------------------------------------------------

    @property
    def identity(self):
        return self._identity

    @property
    def capabilities(self):
        return self.promises

    def register_mem_host_pool_v2(self, host_pool, host_pool_name):
        name, access = PoolName(host_pool_name), page_access(host_pool)
        namespace = Namespace(self._identity, name, access.geometry)
        self.pools[name] = RegisteredPool(name, access, namespace)

    def batch_exists_v2(self, keys, pool_transfers=None, extra_info=None):
        self.check_open()
        check_keys(keys)
        asked = [
            PoolPresence.of(transfer, self.present(transfer.name, keys))
            for transfer in pool_transfers or ()
        ]
        return self.fold(self.present(PoolName.KV, keys), asked)

    def batch_get_v2(self, transfers, extra_info=None):
        self.check_open()
        requests = pool_requests(transfers, self.pools, distinct_slots=True)
        return {name: self.read(request) for name, request in requests.items()}

    def batch_set_v2(self, transfers, extra_info=None):
        self.check_open()
        requests = pool_requests(transfers, self.pools, distinct_slots=False)
        return {name: self.write(request) for name, request in requests.items()}

    def delete(self, keys, *, pool=PoolName.KV):
        self.check_open()
        if PoolName(pool) not in self.pools:
            raise UnknownPoolError(f"pool {pool!r} is not registered")
        check_keys(keys)
        return [self.drop(self.pools[PoolName(pool)], key) for key in keys]

    def clear(self):
        self.check_open()
        self.wipe()

    def get_stats(self):
        return StorageStats(type(self).__name__)

    def health(self):
        return Health(ok=not self.closed)

    def open(self):
        self.check_open()

    def close(self):
        self.closed = True


class PlainPath(Plain):
    """Has a directory, too."""

    spec = MappingProxyType({"config": "drivers_memory:PathConfig", "trial_config": PATH})


class Objects(MemoryStorage):
    """Keeps objects in a dictionary, over `ObjectStorage`."""

    promises = IN_PROCESS
    spec = Plain.spec
    stores: ClassVar[dict] = {}
    verifies = True

    def __init__(self, identity, config):
        super().__init__(
            identity,
            self.stores.setdefault(f"{type(self).__name__}/{config.store}", {}),
            driver_name="sample",
            capabilities=self.promises,
            verifies_checksums=self.verifies,
        )


@dataclass
class Medium:
    """The places of one store, and who has them; the least recently used page stands first."""

    slots: list[bytes]
    free: list[int]
    index: OrderedDict[tuple[str, str], int] = field(default_factory=OrderedDict)
    lock: threading.RLock = field(default_factory=threading.RLock)
    reserved: dict[int, float] = field(default_factory=dict)
    """When each place was given to a writer that has not yet written there."""
    told: list[ObjectRemoval] = field(default_factory=list)
    """Removals by all storages."""


class Slots(ObjectStorage):
    """Gives each page a place; that of the least recently used page when there is none left."""

    promises = replace(IN_PROCESS, evicts=True)
    spec = MappingProxyType(
        {
            "config": "drivers_memory:SlotsConfig",
            "trial_config": PATH,
            "capacity_option": "capacity",
        }
    )
    media: ClassVar[dict] = {}

    def __init__(self, identity, config):
        super().__init__(identity, driver_name=type(self).__name__, capabilities=self.promises)
        count = parse_bytes(config.capacity) // SLOT_BYTES
        self.medium = self.media.setdefault(
            f"{type(self).__name__}/{config.path}", Medium([b""] * count, list(range(count)))
        )

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def reserve(self, namespace, pages):
        """Places for as many of the pages as there is room for."""
        medium = self.medium
        while len(medium.free) < pages and medium.index:
            medium.free.append(medium.index.popitem(last=False)[1])
            self.recorder.count(namespace.pool, pages_evicted=1)
        return [medium.free.pop() for _ in range(min(pages, len(medium.free)))]

    def find(self, namespace, key):
        return self.medium.index.get((namespace.name, key))

    def take(self, read):
        with self.medium.lock:
            slot = self.find(read.namespace, read.key)
            return slot is not None and read.fill(self.medium.slots[slot])

    def take_batch(self, batch):
        return [self.take(read) for read in batch.reads]

    def wait(self):
        """Nothing to wait for between getting places and writing into them."""

    def keep(self, slot, write):
        place = write.namespace.name, write.key
        self.forget(place)
        self.medium.slots[slot] = write.tobytes()
        self.medium.index[place] = slot

    def forget(self, place):
        slot = self.medium.index.pop(place, None)
        if slot is not None:
            self.medium.free.append(slot)
        return slot is not None

    def use(self, namespace, keys):
        for key in reversed(keys):
            if (namespace.name, key) in self.medium.index:
                self.medium.index.move_to_end((namespace.name, key))

    def write_batch(self, batch, call):
        writes = [write for write in batch.writes if write.namespace.object_bytes <= SLOT_BYTES]
        with self.medium.lock:
            slots = self.reserve(batch.namespace, len(writes))
            self.medium.reserved |= dict.fromkeys(slots, time.monotonic())
        self.wait()
        with self.medium.lock:
            # What a writer was given stays its own until it has written, whatever others do.
            kept = {} if call.expired() else dict(zip(slots, writes, strict=False))
            for slot in slots:
                self.medium.reserved.pop(slot, None)
            for slot, write in kept.items():
                self.keep(slot, write)
            self.medium.free += slots[len(kept) :]
            self.use(batch.namespace, [*call.prefix_keys, *[write.key for write in writes]])
        done = {write.key for write in kept.values()}
        return [write.key in done for write in batch.writes]

    # The driver
    # --------------------------------------------------------------------------------------------------

    def objects_exist(self, batches, call):
        with self.medium.lock:
            for batch in batches:
                self.use(batch.namespace, [*call.prefix_keys, *batch.keys])
            return [
                [self.find(batch.namespace, key) is not None for key in batch.keys]
                for batch in batches
            ]

    def read_objects(self, batches, call):
        answers = [self.take_batch(batch) for batch in batches]
        with self.medium.lock:
            for batch in batches:
                self.use(batch.namespace, [*call.prefix_keys, *[read.key for read in batch.reads]])
        return answers

    def write_objects(self, batches, call):
        return [self.write_batch(batch, call) for batch in batches]

    def delete_objects(self, batches, call):
        with self.medium.lock:
            return [
                [self.forget((batch.namespace.name, key)) for key in batch.keys]
                for batch in batches
            ]

    def clear_namespaces(self, namespaces, call):
        names = {namespace.name for namespace in namespaces}
        with self.medium.lock:
            for place in [place for place in self.medium.index if place[0] in names]:
                self.forget(place)


class Telling(Slots):
    """Tells all storages of the process what each of them has removed."""

    promises = replace(Slots.promises, removals=RemovalScope.PROCESS)

    def __init__(self, identity, config):
        super().__init__(identity, config)
        self.heard = len(self.medium.told)

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def tell(self, reason, place):
        self.medium.told.append(ObjectRemoval(*place, reason))

    def remove(self, place, reason):
        with self.medium.lock:
            removed = self.forget(place)
            if removed:
                self.tell(reason, place)
            return removed

    def reserve(self, namespace, pages):
        before = list(self.medium.index)
        slots = super().reserve(namespace, pages)
        for place in before:
            if place not in self.medium.index:
                self.tell(RemovalReason.EVICTED, place)
        return slots

    # The driver
    # --------------------------------------------------------------------------------------------------

    def delete_objects(self, batches, call):
        return [
            [self.remove((batch.namespace.name, key), RemovalReason.DELETED) for key in batch.keys]
            for batch in batches
        ]

    def clear_namespaces(self, namespaces, call):
        names = {namespace.name for namespace in namespaces}
        for place in [place for place in list(self.medium.index) if place[0] in names]:
            self.remove(place, RemovalReason.CLEARED)

    def collect_removals(self, namespaces, call):
        start, self.heard = self.heard, len(self.medium.told)
        return self.medium.told[start : self.heard], False
