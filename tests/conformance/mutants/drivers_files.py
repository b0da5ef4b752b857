"""Right drivers of several processes on a directory, made of small steps."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import os
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from drivers_memory import PATH
from mutant import IN_PROCESS

from hicache_storage.objects import ObjectStorage
from hicache_storage.spec import DriverConfig, Durability, HungReads, Sharing, parse_bytes

BETWEEN_PROCESSES = replace(
    IN_PROCESS, sharing=Sharing.PROCESSES, durability=Durability.PROCESS, may_hang=False
)
BUFFERED = replace(BETWEEN_PROCESSES, may_hang=True, hung_reads=HungReads.BOUNCE_BUFFER)
PAGE, DRAFT = ".page", ".draft"


class FilesConfig(DriverConfig, frozen=True, kw_only=True):
    path: str
    capacity: str = "1TiB"


class Files(ObjectStorage):
    """Keeps a file for each page, in a directory for each namespace; a page appears by a rename."""

    promises = BETWEEN_PROCESSES
    spec = MappingProxyType({"config": "drivers_files:FilesConfig", "trial_config": PATH})
    drafts = itertools.count()

    def __init__(self, identity, config):
        super().__init__(identity, driver_name=type(self).__name__, capabilities=self.promises)
        self.root = Path(config.path)
        self.limit = parse_bytes(config.capacity)

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def path(self, namespace, key):
        name = hashlib.blake2b(key.encode(), digest_size=20).hexdigest() + PAGE
        return self.root / namespace.name / name

    def draft(self, path):
        # The writer's process stands in the name, so that others can tell when it is nobody's any
        # more.
        return path.with_name(f"{os.getpid()}-{next(self.drafts)}{DRAFT}")

    def there(self, namespace, key):
        try:
            return self.path(namespace, key).stat().st_size == namespace.object_bytes
        except FileNotFoundError:
            return False

    def content(self, path):
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def take(self, read):
        return read.fill(self.content(self.path(read.namespace, read.key)))

    def put(self, write, call):
        path = self.path(write.namespace, write.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        try:
            self.fill_draft(draft, write)
            if call.expired():
                return False
            self.publish(draft, path, write)
        finally:
            self.tidy(draft)
        return True

    def fill_draft(self, draft, write):
        draft.write_bytes(write.tobytes())

    def publish(self, draft, path, write):
        draft.rename(path)

    def tidy(self, draft):
        draft.unlink(missing_ok=True)

    def collect(self):
        """Remove what writers that were killed have left."""
        for draft in self.root.glob(f"*/*{DRAFT}"):
            if not Path("/proc", draft.name.partition("-")[0]).exists():
                draft.unlink(missing_ok=True)

    def discard(self, read):
        """Take a damaged page away; one that somebody has repaired meanwhile is put back."""
        path = self.path(read.namespace, read.key)
        taken = self.draft(path)
        try:
            path.rename(taken)
            if not read.has_read(taken.read_bytes()):
                os.link(taken, path)
        except (FileNotFoundError, FileExistsError):
            pass
        finally:
            taken.unlink(missing_ok=True)

    def doomed(self, namespace):
        yield from (self.root / namespace.name).glob(f"*{PAGE}")

    def remove(self, path):
        try:
            path.unlink()
        except FileNotFoundError:
            return False
        return True

    # The driver
    # --------------------------------------------------------------------------------------------------

    def connect(self):
        self.root.mkdir(parents=True, exist_ok=True)
        self.collect()

    def objects_exist(self, batches, call):
        return [[self.there(batch.namespace, key) for key in batch.keys] for batch in batches]

    def read_objects(self, batches, call):
        return [[self.take(read) for read in batch.reads] for batch in batches]

    def write_objects(self, batches, call):
        return [[self.put(write, call) for write in batch.writes] for batch in batches]

    def discard_objects(self, batches, call):
        for batch in batches:
            for read in batch.reads:
                self.discard(read)
        return True

    def delete_objects(self, batches, call):
        return [
            [self.remove(self.path(batch.namespace, key)) for key in batch.keys]
            for batch in batches
        ]

    def clear_namespaces(self, namespaces, call):
        for namespace in namespaces:
            for path in self.doomed(namespace):
                self.remove(path)


class BoundedFiles(Files):
    """Evicts the least recently used files of the whole directory.

    Files' times tell all processes what was used.
    """

    promises = replace(BETWEEN_PROCESSES, evicts=True)
    spec = MappingProxyType({**Files.spec, "capacity_option": "capacity"})
    moment = 0
    """Of the last use by this process; no two have the same, however coarse the clock."""

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def counted(self):
        """The files that count."""
        return [*self.root.glob(f"*/*{PAGE}"), *self.root.glob(f"*/*{DRAFT}")]

    def victims(self):
        """What may be evicted, the first victim first."""
        return sorted(self.root.glob(f"*/*{PAGE}"), key=mtime)

    def touch(self, namespace, keys):
        """Note a use, the last key first, so that tails are older than heads."""
        BoundedFiles.moment = max(BoundedFiles.moment, self.now())
        for key in reversed(keys):
            BoundedFiles.moment += 1
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path(namespace, key), ns=(0, BoundedFiles.moment))

    def now(self):
        """The time by the file system's clock, which all processes share."""
        (self.root / "clock").touch()
        return mtime(self.root / "clock")

    def make_room(self, namespace, wanted):
        excess = sum(map(size, self.counted())) + wanted - self.limit
        for path in self.victims():
            if excess <= 0:
                break
            excess -= size(path)
            self.count_evictions(namespace, self.remove(path))

    def count_evictions(self, namespace, pages):
        self.recorder.count(namespace.pool, pages_evicted=pages)

    def use_found(self, batch, found, call):
        keys = [key for key, ok in zip(batch.keys, found, strict=True) if ok]
        self.touch(batch.namespace, [*call.prefix_keys, *keys])

    def use_read(self, batch, call):
        self.touch(batch.namespace, [*call.prefix_keys, *[read.key for read in batch.reads]])

    def write_batch(self, batch, call):
        some = batch.writes[: self.limit // batch.namespace.object_bytes]
        self.make_room(batch.namespace, len(some) * batch.namespace.object_bytes)
        done = [self.put(write, call) for write in some]
        self.touch(batch.namespace, [*call.prefix_keys, *[write.key for write in some]])
        return [*done, *[False] * (len(batch.writes) - len(some))]

    # The driver
    # --------------------------------------------------------------------------------------------------

    def objects_exist(self, batches, call):
        answers = super().objects_exist(batches, call)
        for batch, found in zip(batches, answers, strict=True):
            self.use_found(batch, found, call)
        return answers

    def read_objects(self, batches, call):
        answers = super().read_objects(batches, call)
        for batch in batches:
            self.use_read(batch, call)
        return answers

    def write_objects(self, batches, call):
        # One writer at a time, of any process.
        with (self.root / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.collect()
            return [self.write_batch(batch, call) for batch in batches]


def mtime(path):
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def size(path):
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


class SteadyFiles(Files):
    """Says that its directory may hang, and reads into buffers of its own."""

    promises = BUFFERED
