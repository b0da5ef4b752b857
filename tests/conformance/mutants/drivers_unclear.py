"""Drivers that take an error, or a silence, for more than it says.

And two right ones that do not.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar
from uuid import uuid4

from drivers_faults import SteadyFiles
from drivers_files import PAGE
from drivers_slots import SLOT_BYTES, Medium, Place, Slots, SlotsConfig

from hicache_storage.spec import (
    Capabilities,
    HungReads,
    PoolTransferResult,
    StorageUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.objects import (
        Call,
        LookupBatch,
        Namespace,
        ObjectRead,
        ObjectWrite,
        ReadBatch,
        WriteBatch,
    )
    from hicache_storage.spec import (
        HiCacheStorageExtraInfo,
        PoolName,
        PoolTransfer,
        StorageIdentity,
    )


def listed(directory: Path, index: Callable[[list[Path]], dict[str, str]]) -> dict[str, str]:
    """What `index` makes of the paths of all pages, in order. A directory without a change is not
    listed again: a listing for each key would be a second fault, in the time of a lookup."""
    try:
        changed = directory.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    known, found = LISTINGS.get((directory, index), (0, {}))
    if changed != known:
        found = index(sorted(directory.glob(f"*{PAGE}")))
        # Another change in the same tick of the file system's clock leaves the time as it is.
        if time.time_ns() - changed > TICK_NS:
            LISTINGS[directory, index] = changed, found
    return found


LISTINGS: dict[tuple[Path, Callable[..., object]], tuple[int, dict[str, str]]] = {}
TICK_NS = 50_000_000


def by_number(paths: list[Path]) -> dict[str, str]:
    """The file of each page, by the page's plain name; of two files of one number the last one
    counts, which is the fault planted here."""
    numbered = dict[str, str]()
    for path in paths:
        # Empty files are strangers.
        with suppress(FileNotFoundError):
            if path.stat().st_size:
                numbered[path.name.rpartition("-")[0]] = path.name
    return {name.rpartition("-")[2]: name for name in numbered.values()}


def by_stem(paths: list[Path]) -> dict[str, str]:
    """The file with the longest page, by the stem of the page's plain name."""
    return {path.name.rpartition("-")[0]: path.name for path in paths}


# What a request that failed has done
# --------------------------------------------------------------------------------


class ReusesNumbers(SteadyFiles):
    """Numbers its files, and gives the number of a rename that failed to the next one.

    One number stands for one file.
    """

    def __init__(self, identity: StorageIdentity, config: object) -> None:
        super().__init__(identity, config)
        self.writer = uuid4().hex[:8]
        self.next = 0
        self.turn = threading.RLock()

    def path(self, namespace: Namespace, key: str) -> Path:
        plain = super().path(namespace, key)
        own = f"{self.writer}-{self.next:06}-{plain.name}"
        return plain.with_name(listed(plain.parent, by_number).get(plain.name, own))

    def delete_objects(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        deleted = super().delete_objects(batches, call)
        # Two processes that set a page at once have each numbered a file for it.
        for batch in batches:
            for key in batch.keys:
                while self._remove(self.path(batch.namespace, key)):
                    pass
        return deleted

    def put(self, write: ObjectWrite, call: Call) -> bool:
        with self.turn:
            done = super().put(write, call)
            self.next += 1
        return done


class SwallowsFailedClears(SteadyFiles):
    def clear(self) -> None:
        with suppress(StorageUnavailableError):
            super().clear()


class RaisesWhatStopsAClear(SteadyFiles):
    def clear(self) -> None:
        try:
            super().clear()
        except StorageUnavailableError as error:
            raise OSError(f"cannot clear: {error}") from error


class OneFaultForAll(SteadyFiles):
    """Refuses everything for a while after five calls in a row during which the store failed.

    Whichever of them it was.
    """

    def __init__(self, identity: StorageIdentity, config: object) -> None:
        super().__init__(identity, config)
        self.row = 0
        self.until = 0.0
        self.turn = threading.Lock()

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        before = self.fault_count()
        answer = super().batch_set_v2(transfers, extra_info)
        with self.turn:
            self.row = self.row + 1 if self.fault_count() > before else 0
            if self.row >= 5:
                self.until = time.monotonic() + 1.0
        return answer

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        refused = time.monotonic() < self.until
        return super().batch_exists_v2([] if refused else keys, pool_transfers, extra_info)


# Deadlines and forks
# ------------------------------------------------------------------------------------------------


class WaitsAsItIsTold(SteadyFiles):
    """Hands the deadline of a lookup to a lock as it is."""

    def __init__(self, identity: StorageIdentity, config: object) -> None:
        super().__init__(identity, config)
        self.turn, self.process = threading.Lock(), os.getpid()

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        if self.process != os.getpid():
            self.turn, self.process = threading.Lock(), os.getpid()
        seconds = None if extra_info is None else extra_info.deadline_seconds
        mine = self.turn.acquire(timeout=60.0 if seconds is None else seconds)
        try:
            return super().batch_exists_v2(keys if mine else [], pool_transfers, extra_info)
        finally:
            if mine:
                self.turn.release()


HELD_SECONDS = 0.001


class KeepsItsLockOverForks(SteadyFiles):
    """One lookup at a time, by a lock that a child inherits as it was."""

    def __init__(self, identity: StorageIdentity, config: object) -> None:
        super().__init__(identity, config)
        self.turn = threading.Lock()

    def batch_exists_v2(
        self,
        keys: Sequence[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        with self.turn:
            # Not longer: a call that hangs would hold up the others, which is another fault.
            time.sleep(HELD_SECONDS)
        return super().batch_exists_v2(keys, pool_transfers, extra_info)


# The directory
# ------------------------------------------------------------------------------------------------------


class ComparesAbsence(SteadyFiles):
    """While its directory is not there, believes in what it has written since it noticed."""

    def __init__(self, identity: StorageIdentity, config: object) -> None:
        super().__init__(identity, config)
        self.absent = False
        self.known = set[Path]()

    def there(self, namespace: Namespace, key: str) -> bool:
        if self.root.exists():
            return super().there(namespace, key)
        if not self.absent:
            self.absent = True
            self.known.clear()
        return self.path(namespace, key) in self.known

    def put(self, write: ObjectWrite, call: Call) -> bool:
        done = super().put(write, call)
        if done:
            self.known.add(self.path(write.namespace, write.key))
        return done


class BelievesFileNames(SteadyFiles):
    """Says in a file's name how long its page is.

    It takes the longest that stands there for the page.
    """

    def path(self, namespace: Namespace, key: str) -> Path:
        plain = super().path(namespace, key)
        own = f"{plain.stem}-{namespace.object_bytes:08x}{PAGE}"
        return plain.with_name(listed(plain.parent, by_stem).get(plain.stem, own))


# Places that change hands
# -------------------------------------------------------------------------------------------


@dataclass
class FileMedium(Medium):
    reserved: dict[int, float] = field(default_factory=dict[int, float])
    """When each place was given to a writer that has not yet written there."""


class FileSlots(Slots):
    """Right: places of a file.

    What a writer was given stays its own until it has written, whatever others do meanwhile.
    """

    promises: ClassVar[Capabilities] = replace(
        Slots.promises, may_hang=True, hung_reads=HungReads.BOUNCE_BUFFER
    )
    media: ClassVar[dict[str, Medium]] = {}
    medium: FileMedium

    def __init__(self, identity: StorageIdentity, config: SlotsConfig) -> None:
        super().__init__(identity, config)
        kept = self.medium
        if not isinstance(kept, FileMedium):
            name = next(name for name, medium in self.media.items() if medium is kept)
            self.media[name] = self.medium = FileMedium(kept.slots, kept.free)
        self.file = Path(config.path).with_suffix(".slots")

    def connect(self) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.touch()

    def take(self, read: ObjectRead) -> bool:
        with self.medium.lock:
            slot = self.find(read.namespace, read.key)
        if slot is None:
            return False
        with self.file.open("rb", buffering=0) as file:
            return read.fill(
                os.pread(file.fileno(), read.namespace.object_bytes, slot * SLOT_BYTES)
            )

    def write_batch(self, batch: WriteBatch, call: Call) -> list[bool]:
        with self.medium.lock:
            slots = self.reserve(batch.namespace, len(batch.writes))
            self.medium.reserved |= dict.fromkeys(slots, time.monotonic())
        pairs = list(zip(slots, batch.writes, strict=False))
        done = list[bool]()
        try:
            self.look()
            with self.file.open("r+b", buffering=0) as file:
                for slot, write in pairs:
                    done.append(
                        os.pwrite(file.fileno(), write.tobytes(), slot * SLOT_BYTES) > 0
                        and not call.expired()
                    )
        finally:
            with self.medium.lock:
                for (slot, write), ok in zip(
                    pairs, [*done, *[False] * (len(pairs) - len(done))], strict=True
                ):
                    self.medium.reserved.pop(slot, None)
                    self.settle(slot, (write.namespace.name, write.key), ok=ok)
        return [*done, *[False] * (len(batch.writes) - len(done))]

    def look(self) -> None:
        """Make sure that the file is there, after places were given and before they are written."""
        with self.file.open("rb", buffering=0) as file:
            file.seek(0, os.SEEK_END)

    def settle(self, slot: int, place: Place, *, ok: bool) -> None:
        """A writer has done with its place: it holds a page now, or nobody's."""
        if ok:
            self.forget(place)
            self.medium.index[place] = slot
        else:
            self.medium.free.append(slot)

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        return [self.write_batch(batch, call) for batch in batches]

    def discard_objects(self, batches: Sequence[ReadBatch], call: Call) -> bool:
        return False


class ClearsUnderWriters(FileSlots):
    """A clear gives back the places, too, that writers are about to write into."""

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        super().clear_namespaces(namespaces, call)
        with self.medium.lock:
            self.medium.free += self.medium.reserved
            self.medium.reserved.clear()


LEASE_SECONDS = 0.25
"""Shorter than the suite holds up a writer (0.3 s)."""


class LeasesRunOut(FileSlots):
    """Gives a writer's place to the next one after a while, and nobody asks before it writes."""

    def reserve(self, namespace: Namespace, pages: int) -> list[int]:
        late = [
            slot
            for slot, since in self.medium.reserved.items()
            if time.monotonic() - since > LEASE_SECONDS
        ]
        for slot in late:
            del self.medium.reserved[slot]
        self.medium.free += late
        return super().reserve(namespace, pages)

    def clear_namespaces(self, namespaces: Sequence[Namespace], call: Call) -> None:
        super().clear_namespaces(namespaces, call)
        # The case with a clear in the middle of a set is about `ClearsUnderWriters`: here leases
        # outlast it.
        with self.medium.lock:
            kept = time.monotonic() + 60
            self.medium.reserved = dict.fromkeys(self.medium.reserved, kept)
