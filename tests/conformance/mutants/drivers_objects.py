"""Drivers over `ObjectStorage`: right ones, and ones with one planted fault each.

Of damage, promises and counters.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from drivers_plain import CAPABILITIES, PlainConfig

from hicache_storage.objects import ObjectStorage
from hicache_storage.spec import (
    Capabilities,
    StorageStats,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import Call, LookupBatch, Namespace, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity


class Objects(ObjectStorage):
    """A right driver over `ObjectStorage`."""

    stores: ClassVar[dict[str, dict[str, bytes]]] = {}
    promises: ClassVar[Capabilities] = CAPABILITIES
    verifies: ClassVar[bool] = True

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(
            identity,
            driver_name="sample",
            capabilities=self.promises,
            verifies_checksums=self.verifies,
        )
        self.objects = self.stores.setdefault(f"{type(self).__name__}/{config.store}", {})

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [
            [batch.namespace.object_name(key) in self.objects for key in batch.keys]
            for batch in batches
        ]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        return [
            [
                read.fill(self.objects.get(read.namespace.object_name(read.key)))
                for read in batch.reads
            ]
            for batch in batches
        ]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        for batch in batches:
            self.objects.update(
                {write.namespace.object_name(write.key): write.tobytes() for write in batch.writes}
            )
        return [[True] * len(batch.writes) for batch in batches]

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        for batch in batches:
            for read in batch.reads:
                self.objects.pop(read.namespace.object_name(read.key), None)
        return True

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [
            [
                self.objects.pop(batch.namespace.object_name(key), None) is not None
                for key in batch.keys
            ]
            for batch in batches
        ]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        for name in list(self.objects):
            if name.startswith(tuple(namespace.name for namespace in namespaces)):
                self.objects.pop(name, None)


class PromisesNothing(Objects):
    """Keeps pages for itself only, and says so."""

    promises = Capabilities(may_hang=False)

    def __init__(self, identity: StorageIdentity, config: PlainConfig) -> None:
        super().__init__(identity, config)
        self.objects = {}


class PromisesTooLittle(Objects):
    """Shares pages without saying so."""

    promises = Capabilities(may_hang=False)


class PromisesTooMuch(PromisesNothing):
    """Says that it shares and keeps pages, and does not."""

    promises = CAPABILITIES


class CountsNoBytes(Objects):
    def get_stats(self) -> StorageStats:
        stats = super().get_stats()
        for pool in stats.pools.values():
            pool.bytes_read = 0
        return stats


class TrustsBytes(Objects):
    """Verifies no checksum, and does not say so."""

    verifies = False

    def get_stats(self) -> StorageStats:
        return replace(super().get_stats(), verifies_checksums=True)


class LeavesChecksumsOut(Objects):
    """Verifies no checksum, as an operator may have asked, and says so."""

    verifies = False


class HidesDamage(Objects):
    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        filled = super().read_objects(batches, call)
        answer = [
            [ok and read.verify() for ok, read in zip(done, batch.reads, strict=True)]
            for done, batch in zip(filled, batches, strict=True)
        ]
        for batch in batches:
            for read in batch.reads:
                read.damaged = False
        return answer


class KeepsDamage(Objects):
    """Puts a damaged object back under the set that repairs it."""

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        for batch in batches:
            for write in batch.writes:
                self.objects.setdefault(write.namespace.object_name(write.key), write.tobytes())
        return [[True] * len(batch.writes) for batch in batches]

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        return False
