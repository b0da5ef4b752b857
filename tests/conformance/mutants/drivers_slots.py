"""Stores of fixed places in memory: right drivers, and what goes wrong with places.

One of the right ones evicts, one refuses.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

from drivers_plain import CAPABILITIES, Plain, PlainConfig

from hicache_storage.objects import ObjectStorage, ObjectWrite
from hicache_storage.spec import Capabilities, parse_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import (
        Call,
        LookupBatch,
        Namespace,
        ObjectRead,
        ReadBatch,
        WriteBatch,
    )
    from hicache_storage.objects.requests import PoolRequest, RegisteredPool
    from hicache_storage.spec import StorageIdentity

SLOT_BYTES = 8192 + 512

Place = tuple[str, str]


class SlotsConfig(PlainConfig, frozen=True, kw_only=True):
    path: str
    capacity: str = "64MiB"


@dataclass
class Medium:
    """The places of one store, and who has them; the least recently used page stands first."""

    slots: list[bytes]
    free: list[int]
    index: OrderedDict[Place, int] = field(default_factory=OrderedDict)
    lock: threading.RLock = field(default_factory=threading.RLock)


class Slots(ObjectStorage):
    """Gives each page a place; that of the least recently used page when there is none left."""

    promises: ClassVar[Capabilities] = replace(CAPABILITIES, evicts=True)
    media: ClassVar[dict[str, Medium]] = {}

    def __init__(self, identity: StorageIdentity, config: SlotsConfig) -> None:
        super().__init__(identity, driver_name=type(self).__name__, capabilities=self.promises)
        count = parse_bytes(config.capacity) // SLOT_BYTES
        self.medium = self.media.setdefault(
            f"{type(self).__name__}/{config.path}", Medium([b""] * count, list(range(count)))
        )

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def reserve(self, namespace: Namespace, pages: int) -> list[int]:
        """Places for as many of the pages as there is room for."""
        medium = self.medium
        while len(medium.free) < pages and medium.index:
            medium.free.append(medium.index.popitem(last=False)[1])
            self.recorder.count(namespace.pool, pages_evicted=1)
        return [medium.free.pop() for _ in range(min(pages, len(medium.free)))]

    def find(self, namespace: Namespace, key: str) -> int | None:
        return self.medium.index.get((namespace.name, key))

    def take(self, read: ObjectRead) -> bool:
        with self.medium.lock:
            slot = self.find(read.namespace, read.key)
            return slot is not None and read.fill(self.medium.slots[slot])

    def keep(self, slot: int, write: ObjectWrite) -> None:
        self.medium.slots[slot] = write.tobytes()
        self.medium.index[write.namespace.name, write.key] = slot

    def forget(self, place: Place) -> bool:
        slot = self.medium.index.pop(place, None)
        if slot is not None:
            self.medium.free.append(slot)
        return slot is not None

    def use(self, namespace: Namespace, keys: Sequence[str]) -> None:
        for key in reversed(keys):
            if (namespace.name, key) in self.medium.index:
                self.medium.index.move_to_end((namespace.name, key))

    def write_batch(self, batch: WriteBatch, call: Call) -> list[bool]:
        writes = [write for write in batch.writes if write.namespace.object_bytes <= SLOT_BYTES]
        for write in writes:
            self.forget((write.namespace.name, write.key))
        slots = self.reserve(batch.namespace, len(writes))
        for slot, write in zip(slots, writes, strict=False):
            self.keep(slot, write)
        self.use(batch.namespace, [*call.prefix_keys, *[write.key for write in writes]])
        kept = {write.key for write in writes[: len(slots)]}
        return [write.key in kept for write in batch.writes]

    # The driver
    # --------------------------------------------------------------------------------------------------

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        with self.medium.lock:
            for batch in batches:
                self.use(batch.namespace, [*call.prefix_keys, *batch.keys])
            return [
                [self.find(batch.namespace, key) is not None for key in batch.keys]
                for batch in batches
            ]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        answers = [[self.take(read) for read in batch.reads] for batch in batches]
        with self.medium.lock:
            for batch in batches:
                self.use(batch.namespace, [*call.prefix_keys, *[read.key for read in batch.reads]])
        return answers

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        with self.medium.lock:
            return [self.write_batch(batch, call) for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        with self.medium.lock:
            return [
                [self.forget((batch.namespace.name, key)) for key in batch.keys]
                for batch in batches
            ]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        with self.medium.lock:
            for namespace in namespaces:
                for place in [place for place in self.medium.index if place[0] == namespace.name]:
                    self.forget(place)


class _Unsealed(Slots):
    """Keeps no envelope, and makes one up for whatever it reads."""

    def keep(self, slot: int, write: ObjectWrite) -> None:
        super().keep(slot, write)
        self.medium.slots[slot] = b"".join(write.buffers)

    def read_slot(self, slot: int | None, read: ObjectRead) -> bool:
        held = b"" if slot is None else self.medium.slots[slot]
        if len(held) != read.namespace.page_bytes:
            return False
        return read.fill(held + ObjectWrite(read.namespace, read.key, [memoryview(held)]).envelope)


class ReusesSlots(_Unsealed):
    """Looks up the places of a batch, and reads them some time later.

    They may have been given to other pages by then.
    """

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        slots = [[self.find(read.namespace, read.key) for read in batch.reads] for batch in batches]
        time.sleep(0.05)
        for batch in batches:
            self.use(batch.namespace, [read.key for read in batch.reads])
        return [
            [self.read_slot(slot, read) for slot, read in zip(some, batch.reads, strict=True)]
            for some, batch in zip(slots, batches, strict=True)
        ]


class RemembersSlots(_Unsealed):
    """Reads where its lookup has found a page, and looks no more."""

    def __init__(self, identity: StorageIdentity, config: SlotsConfig) -> None:
        super().__init__(identity, config)
        self.expect_message = dict[Place, int]()

    def find(self, namespace: Namespace, key: str) -> int | None:
        slot = super().find(namespace, key)
        if slot is not None:
            self.expect_message[namespace.name, key] = slot
        return slot

    def take(self, read: ObjectRead) -> bool:
        slot = self.expect_message.get((read.namespace.name, read.key))
        return self.read_slot(self.find(read.namespace, read.key) if slot is None else slot, read)


class BricksWhenFull(Slots):
    """A batch that is larger than the store takes every place, fails, and gives none back."""

    def reserve(self, namespace: Namespace, pages: int) -> list[int]:
        slots = super().reserve(namespace, pages)
        if len(slots) < pages:
            raise KeyError("no free page")
        return slots


class LeaksReservations(Slots):
    """A batch that does not fit costs two places for good."""

    def reserve(self, namespace: Namespace, pages: int) -> list[int]:
        slots = super().reserve(namespace, pages)
        return slots if len(slots) == pages else slots[:-2]


class DeletesForGood(Slots):
    """The place of a deleted page is never used again."""

    def forget(self, place: Place) -> bool:
        return self.medium.index.pop(place, None) is not None


class Bounded(Plain):
    """Refuses what does not fit; no `ObjectStorage`, and nothing is ever evicted."""

    def __init__(self, identity: StorageIdentity, config: SlotsConfig) -> None:
        super().__init__(identity, PlainConfig(store=config.path))
        self.limit = parse_bytes(config.capacity)

    def fits(self, page: list[memoryview]) -> bool:
        return sum(map(len, self.pages.values())) + sum(map(len, page)) <= self.limit

    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        return (self.there(pool, key) or self.fits(page)) and super().put(pool, key, page)


class RaisesWhenFull(Bounded):
    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        if not super().put(pool, key, page):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return True


class TakesAllOrNothing(Bounded):
    """A batch that does not fit as a whole is refused as a whole."""

    def write(self, request: PoolRequest) -> list[bool]:
        before = dict(self.pages)
        done = super().write(request)
        if all(done):
            return done
        self.pages.clear()
        self.pages.update(before)
        return [False] * len(done)


class DropsWhatDoesNotFit(Bounded):
    def put(self, pool: RegisteredPool, key: str, page: list[memoryview]) -> bool:
        super().put(pool, key, page)
        return True


class NeverFrees(Bounded):
    """What was deleted goes on counting."""

    def __init__(self, identity: StorageIdentity, config: SlotsConfig) -> None:
        super().__init__(identity, config)
        self.written = 0

    def fits(self, page: list[memoryview]) -> bool:
        self.written += sum(map(len, page))
        return self.written <= self.limit
