"""A right driver for several processes, made of small steps, so that each can be made wrong."""

from __future__ import annotations

import hashlib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from hicache_storage.objects import ObjectRead, ObjectStorage
from hicache_storage.spec import Capabilities, DriverConfig, Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.objects import (
        Call,
        LookupBatch,
        Namespace,
        ObjectWrite,
        ReadBatch,
        WriteBatch,
    )
    from hicache_storage.spec import StorageIdentity

BETWEEN_PROCESSES = Capabilities(
    sharing=Sharing.PROCESSES,
    durability=Durability.PROCESS,
    deletes=True,
    clears=True,
    may_hang=False,
)
PAGE, DRAFT = ".page", ".draft"


class SharedFilesConfig(DriverConfig, frozen=True, kw_only=True):
    path: str


class SharedFiles(ObjectStorage):
    """Keeps a file for each page, in a directory for each namespace; a page appears by a rename."""

    promises: ClassVar[Capabilities] = BETWEEN_PROCESSES
    drafts: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, driver_name=type(self).__name__, capabilities=self.promises)
        self.root = Path(config.path)

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def path(self, namespace: Namespace, key: str) -> Path:
        return (
            self.root
            / namespace.name
            / (hashlib.blake2b(key.encode(), digest_size=20).hexdigest() + PAGE)
        )

    def draft(self, path: Path) -> Path:
        # The writer's process stands in the name, so that others can tell when it is nobody's any
        # more.
        return path.with_name(f"{os.getpid()}-{next(self.drafts)}{DRAFT}")

    def there(self, namespace: Namespace, key: str) -> bool:
        try:
            return self.path(namespace, key).stat().st_size == namespace.object_bytes
        except FileNotFoundError:
            return False

    def take(self, read: ObjectRead) -> bool:
        try:
            return read.fill(self.path(read.namespace, read.key).read_bytes())
        except FileNotFoundError:
            return False

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path = self.path(write.namespace, write.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        try:
            draft.write_bytes(write.tobytes())
            if call.expired():
                return False
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
        return True

    def collect(self) -> None:
        """Remove what writers that were killed have left."""
        for draft in self.root.glob(f"*/*{DRAFT}"):
            if not Path("/proc", draft.name.partition("-")[0]).exists():
                draft.unlink(missing_ok=True)

    def discard(self, read: ObjectRead) -> None:
        """Take a damaged page away; one that somebody has repaired meanwhile is put back."""
        path = self.path(read.namespace, read.key)
        taken = self.draft(path)
        try:
            path.rename(taken)
            again = ObjectRead(
                read.namespace,
                read.key,
                [memoryview(bytearray(len(buffer))) for buffer in read.buffers],
            )
            if again.fill(taken.read_bytes()) and again.verify():
                os.link(taken, path)
        except (FileNotFoundError, FileExistsError):
            pass
        finally:
            taken.unlink(missing_ok=True)

    def doomed(self, namespace: Namespace) -> Iterator[Path]:
        yield from (self.root / namespace.name).glob(f"*{PAGE}")

    # The driver
    # --------------------------------------------------------------------------------------------------

    def connect(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.collect()

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [[self.there(batch.namespace, key) for key in batch.keys] for batch in batches]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        return [[self.take(read) for read in batch.reads] for batch in batches]

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        return [[self.put(write, call) for write in batch.writes] for batch in batches]

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        for batch in batches:
            for read in batch.reads:
                self.discard(read)
        return True

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        return [
            [self._remove(self.path(batch.namespace, key)) for key in batch.keys]
            for batch in batches
        ]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        for namespace in namespaces:
            for path in self.doomed(namespace):
                self._remove(path)

    def _remove(self, path: Path) -> bool:
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True
