"""Pages in dictionaries, one for each store of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache_memory_driver.plugin import CAPABILITIES
from hicache_storage.objects import Call, LookupBatch, Namespace, ObjectStorage, ReadBatch, WriteBatch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_memory_driver.config import MemoryConfig
    from hicache_storage.spec import StorageIdentity


class MemoryStorage(ObjectStorage):
    """Each single operation on a dictionary is atomic, so that no lock is needed."""

    _stores: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, identity: StorageIdentity, config: MemoryConfig) -> None:
        super().__init__(identity, driver_name="memory", capabilities=CAPABILITIES)
        self._objects = self._stores.setdefault(config.store, {})

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [[self._is_whole(batch.namespace, key) for key in batch.keys] for batch in batches]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        return [
            [read.fill(self._objects.get(batch.namespace.object_name(read.key))) for read in batch.reads] for batch in batches
        ]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        for batch in batches:
            for write in batch.writes:
                self._objects[batch.namespace.object_name(write.key)] = write.tobytes()
        return [[True] * len(batch.writes) for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [
            [self._objects.pop(batch.namespace.object_name(key), None) is not None for key in batch.keys] for batch in batches
        ]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        prefixes = tuple(f"{namespace.name}-" for namespace in namespaces)
        for name in [name for name in list(self._objects) if name.startswith(prefixes)]:
            self._objects.pop(name, None)

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        for batch in batches:
            for read in batch.reads:
                self._objects.pop(batch.namespace.object_name(read.key), None)
        return True

    def _is_whole(self, namespace: Namespace, key: str) -> bool:
        """An object of another length is damaged: the next set replaces it."""
        return len(self._objects.get(namespace.object_name(key), b"")) == namespace.object_bytes
