"""Pages in dictionaries, one for each store of this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache_storage.objects import ObjectStorage

from hicache_memory_driver.plugin import CAPABILITIES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import (
        Call,
        LookupBatch,
        Namespace,
        ObjectRead,
        ObjectWrite,
        ReadBatch,
        WriteBatch,
    )
    from hicache_storage.spec import StorageIdentity

    from hicache_memory_driver.config import MemoryConfig


class MemoryStorage(ObjectStorage):
    """Each single operation on a dictionary is atomic, so that no lock is needed."""

    _stores: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self, identity: StorageIdentity, config: MemoryConfig) -> None:
        super().__init__(identity, driver_name="memory", capabilities=CAPABILITIES)
        self._objects = self._stores.setdefault(config.store, {})

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [[self._is_whole(batch.namespace, key) for key in batch.keys] for batch in batches]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        return [[self._fill(read) for read in batch.reads] for batch in batches]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        return [[self._put(write, call) for write in batch.writes] for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [[self._remove(batch.namespace, key) for key in batch.keys] for batch in batches]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        prefixes = tuple(f"{namespace.name}-" for namespace in namespaces)
        for name in [name for name in list(self._objects) if name.startswith(prefixes)]:
            self._objects.pop(name, None)

    def _is_whole(self, namespace: Namespace, key: str) -> bool:
        """An object of another length is damaged: the next set replaces it."""
        return len(self._objects.get(namespace.object_name(key), b"")) == namespace.object_bytes

    def _fill(self, read: ObjectRead) -> bool:
        return read.fill(self._objects.get(read.namespace.object_name(read.key)))

    def _put(self, write: ObjectWrite, call: Call) -> bool:
        payload = write.tobytes()
        if call.expired():
            # The caller may have been answered, and have reused the memory of these bytes.
            return False
        self._objects[write.namespace.object_name(write.key)] = payload
        return True

    def _remove(self, namespace: Namespace, key: str) -> bool:
        return self._objects.pop(namespace.object_name(key), None) is not None
