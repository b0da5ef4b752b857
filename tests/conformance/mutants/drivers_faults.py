"""Drivers on a disk that cannot take a fault, each in its own way, and one that can."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from drivers_files import BETWEEN_PROCESSES, SharedFiles, SharedFilesConfig

from hicache_storage.spec import HungReads

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import (
        Call,
        Namespace,
        ObjectRead,
        ObjectWrite,
        ReadBatch,
        WriteBatch,
    )
    from hicache_storage.spec import (
        Capabilities,
        HiCacheStorageExtraInfo,
        PoolName,
        PoolTransfer,
        StorageIdentity,
    )

logger = logging.getLogger(__name__)

ON_ANY_MOUNT = replace(BETWEEN_PROCESSES, may_hang=True)
BUFFERED = replace(ON_ANY_MOUNT, hung_reads=HungReads.BOUNCE_BUFFER)


class SteadyFiles(SharedFiles):
    """Right: says that its directory may hang, and reads into buffers of its own."""

    promises: ClassVar[Capabilities] = BUFFERED


class HangsForGood(SharedFiles):
    """Says that it cannot hang."""

    promises = replace(BETWEEN_PROCESSES, may_hang=False)


class RaisesWhatTheDiskRaises(SteadyFiles):
    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        for transfer in transfers:
            for key in transfer.keys or ():
                with contextlib.suppress(FileNotFoundError):
                    self.path(self.pools[transfer.name].namespace, key).read_bytes()
        return super().batch_get_v2(transfers, extra_info)


class CountsNoFaults(SteadyFiles):
    """Takes every error for a page that is not there."""

    def there(self, namespace: Namespace, key: str) -> bool:
        try:
            return super().there(namespace, key)
        except OSError:
            return False

    def take(self, read: ObjectRead) -> bool:
        try:
            return super().take(read)
        except OSError:
            return False

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        return [
            [True if self.stored(write, call) else self.recorded() for write in batch.writes]
            for batch in batches
        ]

    def stored(self, write: ObjectWrite, call: Call) -> bool:
        try:
            return self.put(write, call)
        except OSError:
            return False

    def recorded(self) -> bool:
        # Not even as refused.
        self.recorder.count("kv", pages_refused=-1)
        return False


class RestsWhenFull(SteadyFiles):
    """After three sets that the disk has refused it leaves the disk alone, gets included."""

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.refused = 0

    def take(self, read: ObjectRead) -> bool:
        return self.refused < 3 and super().take(read)

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        self.refused += 1
        answers = super().write_objects(batches, call)
        self.refused = 0
        return answers


class TriesItsDirectory(SteadyFiles):
    """Opens where it can write alone."""

    def connect(self) -> None:
        super().connect()
        (self.root / "probe").write_bytes(b"probe")


class HidesThatItIsFull(SteadyFiles):
    """Answers False for what the disk has no room for, as if nobody had asked."""

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        try:
            return super().write_objects(batches, call)
        except OSError:
            return [[False] * len(batch.writes) for batch in batches]


class StartsItsCollectorLast(SteadyFiles):
    """Opens a file, then starts a thread; where that fails, nobody closes the file."""

    promises = replace(BUFFERED, may_hang=False)

    def connect(self) -> None:
        super().connect()
        self.log = os.open(self.root / "log", os.O_CREAT | os.O_WRONLY)
        self.ended = threading.Event()
        self.collector = threading.Thread(target=self.ended.wait, daemon=True)
        self.collector.start()

    def disconnect(self) -> None:
        self.ended.set()
        self.collector.join()
        os.close(self.log)


class NotesPagesTooSoon(SteadyFiles):
    """Notes a page before it writes it, and takes that back where an `Exception` comes."""

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.noted = set[Path]()

    def there(self, namespace: Namespace, key: str) -> bool:
        return self.path(namespace, key) in self.noted or super().there(namespace, key)

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path = self.path(write.namespace, write.key)
        self.noted.add(path)
        try:
            done = super().put(write, call)
        except Exception:
            self.noted.discard(path)
            raise
        return done

    def _remove(self, path: Path) -> bool:
        self.noted.discard(path)
        return super()._remove(path)


class LogsEachPage(SteadyFiles):
    def take(self, read: ObjectRead) -> bool:
        try:
            return super().take(read)
        except OSError as error:
            logger.warning("cannot read %s: %s", read.key, error)
            self.recorder.count_fault()
            return False


class PoisonedByTornFiles(SteadyFiles):
    """A file of the wrong length exists, cannot be read, and is not written again."""

    def there(self, namespace: Namespace, key: str) -> bool:
        return self.path(namespace, key).exists()

    def take(self, read: ObjectRead) -> bool:
        try:
            content = self.path(read.namespace, read.key).read_bytes()
        except FileNotFoundError:
            return False
        if len(content) != read.namespace.object_bytes:
            raise OSError(errno.EIO, "a short file")
        return read.fill(content)


class PublishesLate(SteadyFiles):
    """Reads the host page when its file is open at last.

    It does not check whether the page is still wanted.
    """

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path = self.path(write.namespace, write.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        with draft.open("wb") as file:
            file.write(write.tobytes())
        draft.rename(path)
        return True


class ReadsLate(SteadyFiles):
    """Says that it reads into buffers of its own, and reads straight into the host page."""

    def take(self, read: ObjectRead) -> bool:
        try:
            with self.path(read.namespace, read.key).open("rb", buffering=0) as file:
                wanted = read.namespace.object_bytes
                return (
                    os.fstat(file.fileno()).st_size == wanted
                    and os.readv(file.fileno(), read.parts) == wanted
                )
        except FileNotFoundError:
            return False


class ShortReadsAreHits(SteadyFiles):
    """Keeps the envelope in front, and believes that a page whose front is there is there."""

    def __init__(self, identity: StorageIdentity, config: object) -> None:
        super().__init__(identity, config)
        self._verifies_checksums = False

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path = self.path(write.namespace, write.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        draft.write_bytes(b"".join([write.envelope, *write.buffers]))
        if call.expired():
            return False
        draft.rename(path)
        return True

    def take(self, read: ObjectRead) -> bool:
        try:
            content = self.path(read.namespace, read.key).read_bytes()
        except FileNotFoundError:
            return False
        size = len(read.envelope)
        read.envelope = content[:size].ljust(size, b"\0")
        pages = content[size:].ljust(read.namespace.page_bytes, b"\0")
        for buffer in read.buffers:
            buffer[:], pages = pages[: len(buffer)], pages[len(buffer) :]
        return True


class ShortWritesAreDone(SteadyFiles):
    """Does not look at how many bytes were written."""

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path = self.path(write.namespace, write.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT)
        try:
            os.write(descriptor, write.tobytes())
        finally:
            os.close(descriptor)
        if call.expired():
            return False
        draft.rename(path)
        return True


class LeavesDrafts(SteadyFiles):
    """Does not remove the file that it could not write."""

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path = self.path(write.namespace, write.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        draft.write_bytes(write.tobytes())
        if call.expired():
            return False
        draft.rename(path)
        return True


class GivesUpForGood(SteadyFiles):
    """When it may open no more files, it never opens one again."""

    broken = False

    def take(self, read: ObjectRead) -> bool:
        if self.broken:
            raise OSError(errno.EMFILE, "no more descriptors")
        try:
            return super().take(read)
        except OSError as error:
            self.broken = error.errno == errno.EMFILE
            raise


class KeepsDeadDescriptors(SteadyFiles):
    """Opens each file once, and reads it through that descriptor, whatever becomes of it."""

    def __init__(self, identity: StorageIdentity, config: object) -> None:
        super().__init__(identity, config)
        self.files = dict[Path, int]()

    def take(self, read: ObjectRead) -> bool:
        path = self.path(read.namespace, read.key)
        try:
            if path not in self.files:
                self.files[path] = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        return read.fill(os.pread(self.files[path], read.namespace.object_bytes + 1, 0))

    def disconnect(self) -> None:
        for descriptor in self.files.values():
            with contextlib.suppress(OSError):
                os.close(descriptor)


class OnePageFailsAll(SteadyFiles):
    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        answers = super().batch_set_v2(transfers, extra_info)
        return {
            name: pages if all(pages) else [False] * len(pages) for name, pages in answers.items()
        }


class OpensForAsLongAsItTakes(SteadyFiles):
    """Waits in open() until its directory is there, and says that it cannot hang."""

    promises = replace(BUFFERED, may_hang=False)

    def connect(self) -> None:
        while True:
            try:
                return super().connect()
            except OSError:
                time.sleep(0.02)


class LeavesAThreadBehind(SteadyFiles):
    """Starts a thread that watches each read, and ends it only when all was read."""

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        done = threading.Event()
        threading.Thread(target=done.wait, name="watches-a-read", daemon=True).start()
        answers = super().read_objects(batches, call)
        # Not `call.expired()`: a read that the deadline has ended may be told a moment before it.
        if all(map(all, answers)):
            done.set()
        return answers


class TrustsTheDisk(SteadyFiles):
    """Believes that what it reads is what was written, and says that it verifies."""

    def __init__(self, identity: StorageIdentity, config: object) -> None:
        super().__init__(identity, config)
        self._verifies_checksums = False


class LosesTheQueue(SteadyFiles):
    """Answers True first and writes later; what cannot be written then is lost."""

    def put(self, write: ObjectWrite, call: Call) -> bool:
        with contextlib.suppress(OSError):
            super().put(write, call)
        return True
