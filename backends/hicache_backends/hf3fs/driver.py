"""The 3FS driver: pages in slots of large files, which a metadata server maps."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.plugin import CAPABILITIES
from hicache_backends.hf3fs.reader import read_pages
from hicache_backends.hf3fs.slots.names import metadata_keys, page_key
from hicache_backends.hf3fs.store import TIMEOUT_SECONDS, Store
from hicache_backends.hf3fs.writer import PageWriter
from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import InUseError
from hicache_storage.objects import Call, ObjectRemoval, ObjectStorage
from hicache_storage.spec import Durability, Health, HungReads, RemovalReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.hf3fs.config import Hf3fsConfig
    from hicache_backends.hf3fs.slots.files import SlotFile
    from hicache_storage.objects import LookupBatch, Namespace, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity

POLL_SECONDS: Final = 1.0
"""Interval of the attempts to drop a scope whose slots are not free yet."""
MARGIN_SECONDS: Final = 0.1


class Hf3fsStorage(ObjectStorage):
    """Storage whose pages lie in slots.

    A stored page is visible to the next call of any storage on the same directory and metadata
    server. It survives the death of all of them and of the server.
    """

    writes_find_existing = True

    def __init__(self, identity: StorageIdentity, config: Hf3fsConfig) -> None:
        super().__init__(
            identity,
            driver_name="hf3fs",
            capabilities=CAPABILITIES,
            verifies_checksums=config.verify_checksums,
        )
        self._config = config
        self._cursors: dict[str, str | None] = {}
        """Removals of each scope that `collect_removals` has read."""
        self._removed: list[ObjectRemoval] = []
        """Those of a call that has failed, and whether further ones may be missing."""
        self._lost = False

    def connect(self) -> None:
        store = self.store = Store(self._config, self.recorder.count_failover)
        """The open store: the SDK makes no call before this one, and none after `disconnect`."""
        self._writer = PageWriter(store, self._count_evicted)
        is_in_memory = store.metadata.about.durability is p.StoreDurability.NONE
        self._capabilities = replace(
            self._capabilities,
            durability=Durability.REOPEN if is_in_memory else Durability.PROCESS,
            hung_reads=HungReads.BOUNCE_BUFFER if store.engine.buffered else HungReads.WAIT,
        )

    def disconnect(self) -> None:
        self.store.close()

    def check_health(self) -> Health:
        about = self.store.metadata.refresh(Call(TIMEOUT_SECONDS))
        problem, stuck = self.store.metadata.problem(), self.store.engine.stuck()
        reasons = [*filter(None, [problem]), *self.store.refusals()]
        hanging = f"; {stuck} requests hang" if stuck else ""
        rate = about.limits.sustained(self._config.file_bytes) / 1e6
        return Health(
            ok=True,
            detail=f"{about.server} at {self.store.metadata.endpoint}, engine "
            f"{self.store.engine.name}, a full file takes {rate:.3g} MB/s for long{hanging}"
            f"{''.join(f'; {reason}' for reason in reasons)}",
            writable=not reasons,
        )

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        files = self.store.files([batch.namespace for batch in batches])
        found = self.store.metadata.lookup(_lookups(files, batches), call)
        return [
            [length == batch.namespace.object_bytes for length in part.lengths]
            for part, batch in zip(found, batches, strict=True)
        ]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        outcome = read_pages(self.store, batches, call)
        self.note_partial_faults(outcome.faults, served=bool(outcome.arrived))
        return [[read in outcome.arrived for read in batch.reads] for batch in batches]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        outcome = self._writer.write(batches, call)
        self.note_partial_faults(outcome.faults, served=bool(outcome.stored))
        return [[write in outcome.stored for write in batch.writes] for batch in batches]

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        files = self.store.files([batch.namespace for batch in batches])
        asked = [
            p.DeleteScope(scope=lookup.scope, keys=lookup.keys)
            for lookup in _lookups(files, batches)
        ]
        return self.store.metadata.delete(asked, call)

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        files = self.store.files(namespaces)
        self.store.metadata.clear(list(dict.fromkeys(file.scope for file in files)), call)

    def collect_removals(
        self, namespaces: Sequence[Namespace], call: Call
    ) -> tuple[list[ObjectRemoval], bool]:
        scopes = {file.scope: file.namespace for file in self.store.files(namespaces)}
        self._cursors |= dict.fromkeys(scopes.keys() - self._cursors.keys())
        # Kept in the storage until all are known: if a request fails, the next call has them.
        for name, part in self.store.metadata.removals(self._cursors, call):
            self._removed += _removals(scopes[name], part)
            self._lost |= part.lost
        removed, lost = self._removed, self._lost
        self._removed = []
        self._lost = False
        return removed, lost

    def recall_removals(self, batches: Sequence[LookupBatch], call: Call) -> list[ObjectRemoval]:
        metadata, found = self.store.metadata, list[ObjectRemoval]()
        files = self.store.files([batch.namespace for batch in batches])
        for file, batch in zip(files, batches, strict=True):
            keys, everything = set(batch.keys), metadata.removals({file.scope: ""}, call)
            for _, part in everything:
                found += [one for one in _removals(batch.namespace, part) if one.key in keys]
        return sorted(found, key=lambda one: one.seconds)

    def remove_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> bool:
        files = self.store.files(namespaces)
        # Slots that were freed just now are free after the quarantine. Each attempt is a line in the
        # server's audit log, so the first one comes then, where there is the time.
        pause = self.store.metadata.about.limits.quarantine_seconds + MARGIN_SECONDS
        left = call.remaining()
        if left is None or left > pause:
            time.sleep(pause)
        while True:
            try:
                self.store.metadata.drop([file.scope for file in files], call)
                break
            except InUseError:
                left = call.remaining()
                # Another client uses them, or used them lately.
                if left is not None and left <= POLL_SECONDS:
                    return False
            time.sleep(POLL_SECONDS)
        # After the drop: until then other clients use the slots.
        for file in files:
            file.remove()
        return True

    def described_namespaces(self) -> list[Namespace]:
        return self.store.described_namespaces()

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        return all(self._discard(batch, call) for batch in batches)

    def _discard(self, batch: ReadBatch, call: Call) -> bool:
        """Delete the pages that are damaged. True if the state of all is certain."""
        [file] = self.store.files([batch.namespace])
        keys = list(dict.fromkeys(read.key for read in batch.reads))
        pages = self.store.live_pages(file, keys, call)
        _, certain = self.store.delete_damaged(file, pages, Call(call.remaining()))
        return certain

    def _count_evicted(self, namespace: Namespace, pages: int) -> None:
        self.recorder.count(namespace.pool, pages_evicted=pages)


def _removals(namespace: Namespace, part: p.RemovedPages) -> list[ObjectRemoval]:
    return [
        ObjectRemoval(namespace.name, page_key(key), RemovalReason(reason), seconds, by)
        for key, reason, seconds, by in zip(
            part.keys, part.reasons, part.times, part.by, strict=True
        )
    ]


def _lookups(files: Sequence[SlotFile], batches: Sequence[LookupBatch]) -> list[p.LookupScope]:
    return [
        p.LookupScope(scope=file.scope, keys=metadata_keys(batch.keys))
        for file, batch in zip(files, batches, strict=True)
    ]
