"""Drivers for several processes with one planted fault each.

Small pauses make their races long enough to be met.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, ClassVar

from drivers_files import DRAFT, PAGE, SharedFiles, SharedFilesConfig

from hicache_storage.objects import Call, LookupBatch, ObjectRead, ObjectStorage, ObjectWrite
from hicache_storage.spec import Capabilities, Durability, Sharing

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_storage.objects import Namespace, ReadBatch, WriteBatch
    from hicache_storage.spec import StorageIdentity


ONE_PROCESS = Capabilities(
    sharing=Sharing.PROCESS,
    durability=Durability.PROCESS,
    deletes=True,
    clears=True,
    may_hang=False,
)


def pause(max_ms: float = 2.0) -> None:
    """As if the disk were slow."""
    time.sleep(Random().uniform(0.3, 1.0) * max_ms / 1000)


class Trusting(SharedFiles):
    """Verifies nothing, so that its faults reach the reader as bytes."""

    def take(self, read: ObjectRead) -> bool:
        done = super().take(read)
        read.damaged = False
        if not done:
            return False
        # Sealed here and not where it was written, an envelope says nothing.
        read.envelope = ObjectWrite(read.namespace, read.key, read.buffers).envelope
        return True


# Whole or not at all
# -----------------------------------------------------------------------------------------------------


class WritesInPlace(SharedFiles):
    """Makes room for the page under its own name, then fills it.

    And leaves there what was never filled.
    """

    def discard(self, read: ObjectRead) -> None:
        """Leave it to the next writer, who will find that it exists."""

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path, content = self.path(write.namespace, write.key), write.tobytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(len(content))
            for start in range(0, len(content), 8192):
                file.write(content[start : start + 8192])
                file.flush()
                pause(20)
        return True


class RenamesTooSoon(Trusting):
    """Gives the page its name when half of its bytes are there."""

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path, content = self.path(write.namespace, write.key), write.tobytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft, half = self.draft(path), len(content) // 2
        with draft.open("wb") as file:
            file.truncate(len(content))
            file.write(content[:half])
            file.flush()
            draft.rename(path)
            pause(20)
            file.write(content[half:])
        return True


class OneDraftForAll(SharedFiles):
    """All writers of a page use the same temporary name."""

    def draft(self, path: Path) -> Path:
        return path.with_suffix(DRAFT)

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path, content = self.path(write.namespace, write.key), write.tobytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self.draft(path).open("wb") as file:
            file.truncate(len(content))
            file.write(content[: len(content) // 2])
            file.flush()
            pause(4)
            file.write(content[len(content) // 2 :])
        try:
            self.draft(path).rename(path)
        except FileNotFoundError:
            return path.exists()
        return True


class MixesWriters(Trusting):
    """Writers that find the page there each write both halves into the same file.

    The first one brings it whole, so that what a reader finds is always made of writers' halves.
    """

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path, content = self.path(write.namespace, write.key), write.tobytes()
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        draft.write_bytes(content)
        try:
            path.hardlink_to(draft)
        except FileExistsError:
            half = len(content) // 2
            with path.open("r+b", buffering=0) as file:
                for start, end in ((half, len(content)), (0, half)):
                    file.seek(start)
                    file.write(content[start:end])
                    pause(4)
        finally:
            draft.unlink()
        return True


class LosersLeaveDrafts(SharedFiles):
    """A writer that finds the page there when it has written it forgets what it has written."""

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path = self.path(write.namespace, write.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        draft.write_bytes(write.tobytes())
        pause(4)
        if not path.exists() or write.replaces:
            draft.rename(path)
        return True


# What others do
# ----------------------------------------------------------------------------------------------------------


class LearnsNothingOfOthers(SharedFiles):
    """Remembers what was missing, for good."""

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.missing = set[Path]()

    def there(self, namespace: Namespace, key: str) -> bool:
        path = self.path(namespace, key)
        if path in self.missing:
            return False
        found = super().there(namespace, key)
        if not found:
            self.missing.add(path)
        return found

    def take(self, read: ObjectRead) -> bool:
        return self.there(read.namespace, read.key) and super().take(read)

    def put(self, write: ObjectWrite, call: Call) -> bool:
        self.missing.discard(self.path(write.namespace, write.key))
        return super().put(write, call)


class TrustsItsList(SharedFiles):
    """Remembers what was there, for good.

    A set of what another process has removed answers True and writes nothing.
    """

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.known = set[Path]()

    def there(self, namespace: Namespace, key: str) -> bool:
        path = self.path(namespace, key)
        if path not in self.known and super().there(namespace, key):
            self.known.add(path)
        return path in self.known

    def _remove(self, path: Path) -> bool:
        self.known.discard(path)
        return super()._remove(path)


class SetsOnItsOwn(SharedFiles):
    """Asks of existing pages what it has itself seen.

    It writes once more what others have written.
    """

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.written = set[Path]()

    def there(self, namespace: Namespace, key: str) -> bool:
        return self.path(namespace, key) in self.written and super().there(namespace, key)

    def batch_exists_v2(self, *arguments: Any, **options: Any) -> Any:
        written = self.written
        self.written = Everything()  # type: ignore[assignment]
        try:
            return super().batch_exists_v2(*arguments, **options)
        finally:
            self.written = written

    def put(self, write: ObjectWrite, call: Call) -> bool:
        self.written.add(self.path(write.namespace, write.key))
        return super().put(write, call)


class Everything:
    def __contains__(self, path: object) -> bool:
        return True


class ToldOfRemovals(SharedFiles):
    """Believes in the pages that it has seen, until a log that all share says that they are gone.

    Right but for the order: it removes a batch first, and writes the log when the batch is done.
    """

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.known = set[Path]()
        self.removed = list[Path]()
        self.heard = 0

    def there(self, namespace: Namespace, key: str) -> bool:
        path = self.path(namespace, key)
        told = self.log.read_text() if self.log.exists() else ""
        self.known.difference_update(map(Path, told[self.heard :].split()))
        self.heard = len(told)
        if path not in self.known and super().there(namespace, key):
            self.known.add(path)
        return path in self.known

    def take(self, read: ObjectRead) -> bool:
        done = super().take(read)
        if not done:
            self.known.discard(self.path(read.namespace, read.key))
        return done

    def put(self, write: ObjectWrite, call: Call) -> bool:
        done = super().put(write, call)
        self.known.add(self.path(write.namespace, write.key))
        return done

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        answers = super().delete_objects(batches, call)
        self.announce()
        return answers

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        super().clear_namespaces(namespaces, call)
        self.announce()

    @property
    def log(self) -> Path:
        return self.root / "log"

    def announce(self) -> None:
        with self.log.open("a") as log:
            log.write("".join(f"{path}\n" for path in self.removed))
        self.removed.clear()

    def _remove(self, path: Path) -> bool:
        self.known.discard(path)
        self.removed.append(path)
        return super()._remove(path)


class ClearsItsOwnView(SharedFiles):
    """Hides what is cleared from itself, and leaves it to the others."""

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.hidden = set[Path]()

    def there(self, namespace: Namespace, key: str) -> bool:
        return self.path(namespace, key) not in self.hidden and super().there(namespace, key)

    def take(self, read: ObjectRead) -> bool:
        return self.there(read.namespace, read.key) and super().take(read)

    def put(self, write: ObjectWrite, call: Call) -> bool:
        done = super().put(write, call)
        self.hidden.discard(self.path(write.namespace, write.key))
        return done

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        for namespace in namespaces:
            self.hidden.update(self.doomed(namespace))


class SaltsItsKeys(SharedFiles):
    """Names a page by Python's own hash, which differs between interpreters."""

    def path(self, namespace: Namespace, key: str) -> Path:
        return self.root / namespace.name / f"{hash(key) & (1 << 64) - 1:016x}{PAGE}"


class NeverForgetsDamage(SharedFiles):
    """What it has once found damaged it reads no more, whoever has repaired it."""

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.bad = set[Path]()

    def take(self, read: ObjectRead) -> bool:
        path = self.path(read.namespace, read.key)
        done = path not in self.bad and super().take(read)
        if done and not read.verify():
            self.bad.add(path)
        return done

    def put(self, write: ObjectWrite, call: Call) -> bool:
        self.bad.discard(self.path(write.namespace, write.key))
        return super().put(write, call)


class DiscardsByName(SharedFiles):
    """Looks once more whether a page is damaged, and then removes whatever has its name."""

    def discard(self, read: ObjectRead) -> None:
        again = ObjectRead.aside(read.namespace, read.key, verifies_checksum=True)
        if not (self.take(again) and again.verify()):
            self.delete_objects([LookupBatch(read.namespace, [read.key])], Call())


class DiscardsBlindly(SharedFiles):
    """Removes the page of a key that it has found damaged, whatever has its name by now."""

    def discard(self, read: ObjectRead) -> None:
        self._remove(self.path(read.namespace, read.key))


# Slots and an index
# ------------------------------------------------------------------------------------------------------


class SlotFiles(ObjectStorage):
    """Keeps pages in numbered files, and an index of which page has which number.

    Right, but for its faults below.
    """

    promises: ClassVar[Capabilities] = SharedFiles.promises

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, driver_name=type(self).__name__, capabilities=self.promises)
        self.home = config.path
        self.lock = threading.Lock()

    def connect(self) -> None:
        os.makedirs(self.home, exist_ok=True)

    @contextmanager
    def index(self) -> Iterator[dict[str, int]]:
        """The numbers by name, for one process at a time; what is changed in it is saved."""
        with self.lock, open(f"{self.home}/lock", "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            known = self.load()
            before = dict(known)
            yield known
            if known != before:
                self.save(known)

    def load(self) -> dict[str, int]:
        try:
            with open(f"{self.home}/index") as file:
                loaded: dict[str, int] = json.load(file)
                return loaded
        except FileNotFoundError:
            return {}

    def save(self, known: dict[str, int]) -> None:
        with open(f"{self.home}/index.new", "w") as file:
            json.dump(known, file)
        os.rename(f"{self.home}/index.new", f"{self.home}/index")

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        with self.index() as known:
            return [
                [batch.namespace.object_name(key) in known for key in batch.keys]
                for batch in batches
            ]

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        return [[self.take(read) for read in batch.reads] for batch in batches]

    def take(self, read: ObjectRead) -> bool:
        with self.index() as known:
            slot = known.get(read.namespace.object_name(read.key))
        if slot is None:
            return False
        # Long enough for others to give the slot to another page, on a busy machine too.
        pause(10)
        try:
            with open(f"{self.home}/{slot}", "rb") as file:
                done = read.fill(file.read())
        except FileNotFoundError:
            return False
        read.envelope = ObjectWrite(read.namespace, read.key, read.buffers).envelope
        return done

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        with self.index() as known:
            return [[self.put(known, write) for write in batch.writes] for batch in batches]

    def put(self, known: dict[str, int], write: ObjectWrite) -> bool:
        name = write.namespace.object_name(write.key)
        if name not in known or write.replaces:
            slot = next(number for number in range(len(known) + 1) if number not in known.values())
            draft = f"{self.home}/draft"
            with open(draft, "wb") as file:
                file.write(write.tobytes())
            os.rename(draft, f"{self.home}/{slot}")
            known[name] = slot
        return True

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        with self.index() as known:
            return [
                [
                    known.pop(batch.namespace.object_name(key), None) is not None
                    for key in batch.keys
                ]
                for batch in batches
            ]

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        with self.index() as known:
            for name in [
                name for name in known if name[:32] in {namespace.name for namespace in namespaces}
            ]:
                del known[name]


class LooksUpAndReads(SlotFiles):
    """A reader goes to the place that it has looked up, whoever has got it meanwhile."""


class KeepsItsIndexOpen(SlotFiles):
    """Goes on with the index that it has opened, also when another one has taken its place."""

    def connect(self) -> None:
        super().connect()
        self.file = open(f"{self.home}/index", "a+")  # noqa: SIM115 - `disconnect` closes it

    def disconnect(self) -> None:
        self.file.close()

    @contextmanager
    def index(self) -> Iterator[dict[str, int]]:
        with self.lock:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            try:
                self.file.seek(0)
                known = json.loads(self.file.read() or "{}")
                yield known
                self.file.truncate(0)
                json.dump(known, self.file)
                self.file.flush()
            finally:
                fcntl.flock(self.file, fcntl.LOCK_UN)


class SavesItsIndexLate(SlotFiles):
    """Keeps the index in memory, and saves it now and then."""

    promises = ONE_PROCESS
    indexes: ClassVar[dict[str, dict[str, int]]] = {}
    guard: ClassVar[threading.Lock] = threading.Lock()
    changes = 0

    @contextmanager
    def index(self) -> Iterator[dict[str, int]]:
        with self.guard:
            known = self.indexes.setdefault(self.home, {}) or self.indexes[self.home]
            if not known:
                known.update(self.load())
            before = dict(known)
            yield known
            if known != before:
                self.changes += 1
                if self.changes % 12 == 0:
                    self.save(known)

    def disconnect(self) -> None:
        with self.guard:
            self.save(self.indexes.get(self.home, {}))


# Death
# -------------------------------------------------------------------------------------------------------------------


class WritesBehind(SharedFiles):
    """Answers at once, and writes a little later."""

    promises = ONE_PROCESS

    def __init__(self, identity: StorageIdentity, config: SharedFilesConfig) -> None:
        super().__init__(identity, config)
        self.waiting: queue.Queue[tuple[Path, bytes] | None] = queue.Queue()
        self.contents = dict[Path, bytes]()
        self.thread = threading.Thread(target=self.drain, daemon=True)

    def connect(self) -> None:
        super().connect()
        self.thread.start()

    def drain(self) -> None:
        while (item := self.waiting.get()) is not None:
            time.sleep(0.003)
            path, content = item
            path.parent.mkdir(parents=True, exist_ok=True)
            draft = self.draft(path)
            draft.write_bytes(content)
            draft.rename(path)
            self.contents.pop(path, None)

    def there(self, namespace: Namespace, key: str) -> bool:
        return self.path(namespace, key) in self.contents or super().there(namespace, key)

    def take(self, read: ObjectRead) -> bool:
        content = self.contents.get(self.path(read.namespace, read.key))
        return read.fill(content) if content is not None else super().take(read)

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path, content = self.path(write.namespace, write.key), write.tobytes()
        self.contents[path] = content
        self.waiting.put((path, content))
        return True

    def disconnect(self) -> None:
        self.waiting.put(None)
        self.thread.join()


class CollectsNoDrafts(SharedFiles):
    """Never looks for what killed writers have left."""

    def put(self, write: ObjectWrite, call: Call) -> bool:
        path = self.path(write.namespace, write.key)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = self.draft(path)
        draft.write_bytes(write.tobytes())
        # Nearly all the time that a set takes, on a busy machine too, so that nearly every kill
        # meets it here.
        time.sleep(0.08)
        draft.rename(path)
        return True

    def collect(self) -> None:
        pass


class LeavesItsLock(SharedFiles):
    """Locks the store with a file that a killed writer does not remove."""

    def put(self, write: ObjectWrite, call: Call) -> bool:
        lock = self.root / "lock"
        for _ in range(20):
            try:
                os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
                break
            except FileExistsError:
                time.sleep(0.001)
        else:
            return False
        try:
            pause(4)
            return super().put(write, call)
        finally:
            lock.unlink()
