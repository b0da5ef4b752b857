"""A storage in memory."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

from hicache_storage.objects import ObjectRemoval, ObjectStorage, this_process
from hicache_storage.spec import Capabilities, Durability, RemovalReason, RemovalScope, Sharing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.objects import Call, LookupBatch, Namespace, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity

CAPABILITIES = Capabilities(
    sharing=Sharing.PROCESS,
    durability=Durability.REOPEN,
    deletes=True,
    clears=True,
    removals=RemovalScope.PROCESS,
    # A dictionary does not hang, so the deadline layer needs no thread.
    may_hang=False,
)


class MemoryObjects(dict[str, bytes]):
    """Objects by name, and what storages that share them have removed."""

    def __init__(self) -> None:
        self.pages: dict[str, tuple[str, str]] = {}
        """By name of an object, its namespace and key."""
        self.removed: list[ObjectRemoval] = []


class MemoryStorage(ObjectStorage):
    """A driver that stores objects in a dictionary, and records its operations.

    Thread-safe: each operation on the dictionary is atomic.

    Args:
        identity: identity of the pages.
        objects: dictionary of the objects by name; storages that are given the same one share their
            pages. Removals are reported of `MemoryObjects` only.
        driver_name: name in metrics and messages.
        capabilities: capabilities to declare, such as those of a driver that may hang.
        verifies_checksums: compare the checksum of each page that is read.
    """

    def __init__(
        self,
        identity: StorageIdentity,
        objects: dict[str, bytes] | None = None,
        *,
        driver_name: str = "memory",
        capabilities: Capabilities = CAPABILITIES,
        verifies_checksums: bool = True,
    ) -> None:
        self.objects: dict[str, bytes] = MemoryObjects() if objects is None else objects
        """Stored objects by name, envelopes included; a test may damage or remove them."""
        if not isinstance(self.objects, MemoryObjects):
            capabilities = replace(capabilities, removals=RemovalScope.NONE)
        super().__init__(
            identity,
            driver_name=driver_name,
            capabilities=capabilities,
            verifies_checksums=verifies_checksums,
        )
        self._collected: int | None = None
        """How many of the removals have been reported; None before the first call."""
        self.operations: list[str] = []
        """Operations so far.

        `connect`, `exist`, `read`, `write`, `delete`, `clear`, `removals`, `disconnect`.
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
            for write in batch.writes:
                name = write.namespace.object_name(write.key)
                if isinstance(self.objects, MemoryObjects):
                    self.objects.pages[name] = write.namespace.name, write.key
                self.objects[name] = write.tobytes()
        return [[True] * len(batch.writes) for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        self._record("delete")
        return [
            [
                self._remove(batch.namespace.object_name(key), RemovalReason.DELETED)
                for key in batch.keys
            ]
            for batch in batches
        ]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        self._record("clear")
        names = tuple(namespace.name for namespace in namespaces)
        # A list first: other threads set and delete meanwhile.
        for name in list(self.objects):
            if name.startswith(names):
                self._remove(name, RemovalReason.CLEARED)

    def collect_removals(
        self, namespaces: Sequence[Namespace], call: Call
    ) -> tuple[list[ObjectRemoval], bool]:
        self._record("removals")
        assert isinstance(self.objects, MemoryObjects)
        # One length for both: other threads remove meanwhile.
        known, start = len(self.objects.removed), self._collected
        self._collected = known
        return self.objects.removed[known if start is None else start : known], False

    def connect(self) -> None:
        self._record("connect")

    def disconnect(self) -> None:
        self._record("disconnect")

    def _remove(self, name: str, reason: RemovalReason) -> bool:
        removed = self.objects.pop(name, None) is not None
        if removed and isinstance(self.objects, MemoryObjects) and name in self.objects.pages:
            self.objects.removed.append(
                ObjectRemoval(*self.objects.pages[name], reason, time.time(), this_process())
            )
        return removed

    def _record(self, operation: str) -> None:
        self.operations.append(operation)
        # Recorded before it runs: an operation that blocks or fails has been asked for, too.
        self.before(operation)
