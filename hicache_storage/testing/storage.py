"""A storage in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.objects import ObjectStorage
from hicache_storage.spec import Capabilities, Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.objects import Call, LookupBatch, Namespace, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity

CAPABILITIES = Capabilities(
    sharing=Sharing.PROCESS,
    durability=Durability.REOPEN,
    deletes=True,
    clears=True,
    # A dictionary does not hang, so the deadline layer needs no thread.
    may_hang=False,
)


class MemoryStorage(ObjectStorage):
    """A driver that stores objects in a dictionary, and records its operations.

    Thread-safe: each operation on the dictionary is atomic.

    Args:
        identity: identity of the pages.
        objects: dictionary of the objects by name; storages that are given the same one share their
            pages.
        driver_name: name in metrics and messages.
        capabilities: capabilities to declare, such as those of a driver that may hang.
        verifies_checksums: compare the checksum of each page that is read.
        metrics: count pages, bytes and latencies.
    """

    def __init__(
        self,
        identity: StorageIdentity,
        objects: dict[str, bytes] | None = None,
        *,
        driver_name: str = "memory",
        capabilities: Capabilities = CAPABILITIES,
        verifies_checksums: bool = True,
        metrics: bool = True,
    ) -> None:
        super().__init__(
            identity,
            driver_name=driver_name,
            capabilities=capabilities,
            verifies_checksums=verifies_checksums,
            metrics=metrics,
        )
        self.objects: dict[str, bytes] = {} if objects is None else objects
        """Stored objects by name, envelopes included; a test may damage or remove them."""
        self.operations: list[str] = []
        """Operations so far.

        `connect`, `exist`, `read`, `write`, `delete`, `clear`, `disconnect`.
        """
        self.before: Callable[[str], None] = lambda operation: None
        """Called with the name of each operation before it runs.

        May block or raise, to simulate a failing store.
        """

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        self._record("exist")
        return [
            [batch.namespace.object_name(key) in self.objects for key in batch.keys]
            for batch in batches
        ]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        self._record("read")
        return [
            [
                read.fill(self.objects.get(read.namespace.object_name(read.key)))
                for read in batch.reads
            ]
            for batch in batches
        ]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        self._record("write")
        for batch in batches:
            self.objects.update(
                {write.namespace.object_name(write.key): write.tobytes() for write in batch.writes}
            )
        return [[True] * len(batch.writes) for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        self._record("delete")
        return [
            [
                self.objects.pop(batch.namespace.object_name(key), None) is not None
                for key in batch.keys
            ]
            for batch in batches
        ]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        self._record("clear")
        names = tuple(namespace.name for namespace in namespaces)
        # A list first: a dictionary must not shrink while it is iterated over.
        for name in [name for name in self.objects if name.startswith(names)]:
            del self.objects[name]

    def connect(self) -> None:
        self._record("connect")

    def disconnect(self) -> None:
        self._record("disconnect")

    def _record(self, operation: str) -> None:
        self.operations.append(operation)
        # Recorded before it runs: an operation that blocks or fails has been asked for, too.
        self.before(operation)
