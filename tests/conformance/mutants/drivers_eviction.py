"""A right driver that keeps a capacity, and drivers that evict wrongly in one way each."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from drivers_files import BETWEEN_PROCESSES, DRAFT, PAGE, SharedFiles, SharedFilesConfig
from drivers_sharing import ToldOfRemovals

from hicache_storage.spec import Capabilities, parse_bytes

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


class BoundedFilesConfig(SharedFilesConfig, frozen=True, kw_only=True):
    capacity: str = "1TiB"


class BoundedFiles(SharedFiles):
    """Evicts the least recently used files of the whole directory.

    Files' times tell all processes what was used.
    """

    promises: ClassVar[Capabilities] = replace(BETWEEN_PROCESSES, evicts=True)
    moment: ClassVar[int] = 0
    """Of the last use by this process; no two have the same, however coarse the clock."""

    def __init__(self, identity: StorageIdentity, config: BoundedFilesConfig) -> None:
        super().__init__(identity, config)
        self.limit = parse_bytes(config.capacity)

    # Steps that a fault replaces
    # ---------------------------------------------------------------------------------

    def counted(self) -> list[Path]:
        """The files that count."""
        return [*self.root.glob(f"*/*{PAGE}"), *self.root.glob(f"*/*{DRAFT}")]

    def victims(self, namespace: Namespace) -> list[Path]:
        """What may be evicted for a page of `namespace`, the first victim first."""
        return sorted(self.root.glob(f"*/*{PAGE}"), key=_mtime)

    def fitting(self, batch: WriteBatch) -> Sequence[ObjectWrite]:
        return batch.writes[: self.limit // batch.namespace.object_bytes]

    def touch(self, namespace: Namespace, keys: Sequence[str]) -> None:
        """Note a use, the last key first, so that tails are older than heads."""
        BoundedFiles.moment = max(BoundedFiles.moment, self.now())
        for key in reversed(keys):
            BoundedFiles.moment += 1
            with contextlib.suppress(FileNotFoundError):
                os.utime(self.path(namespace, key), ns=(0, BoundedFiles.moment))

    def now(self) -> int:
        """The time by the file system's clock, which all processes share."""
        (self.root / "clock").touch()
        return _mtime(self.root / "clock")

    def make_room(self, namespace: Namespace, wanted: int) -> None:
        excess = sum(map(_size, self.counted())) + wanted - self.limit
        evicted = 0
        for path in self.victims(namespace):
            if excess <= 0:
                break
            excess -= _size(path)
            evicted += self._remove(path)
        self.recorder.count(namespace.pool, pages_evicted=evicted)

    def use_found(self, batch: LookupBatch, found: Sequence[bool], call: Call) -> None:
        self.touch(
            batch.namespace,
            [*call.prefix_keys, *[key for key, ok in zip(batch.keys, found, strict=True) if ok]],
        )

    def use_read(self, batch: ReadBatch, call: Call) -> None:
        self.touch(batch.namespace, [*call.prefix_keys, *[read.key for read in batch.reads]])

    def write_batch(self, batch: WriteBatch, call: Call) -> list[bool]:
        some = self.fitting(batch)
        self.make_room(batch.namespace, len(some) * batch.namespace.object_bytes)
        done = [self.put(write, call) for write in some]
        self.touch(batch.namespace, [*call.prefix_keys, *[write.key for write in some]])
        return [*done, *[False] * (len(batch.writes) - len(some))]

    # The driver
    # --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One writer at a time, of any process."""
        with (self.root / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def objects_exist(self, batches: Sequence[LookupBatch], call: Call) -> list[list[bool]]:
        answers = super().objects_exist(batches, call)
        for batch, found in zip(batches, answers, strict=True):
            self.use_found(batch, found, call)
        return answers

    def read_objects(self, batches: Sequence[ReadBatch], call: Call) -> list[list[bool]]:
        answers = super().read_objects(batches, call)
        for batch in batches:
            self.use_read(batch, call)
        return answers

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        with self.alone():
            self.collect()
            return [self.write_batch(batch, call) for batch in batches]


def _mtime(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


# What counts
# ----------------------------------------------------------------------------------------------------------


class IgnoresItsCapacity(BoundedFiles):
    def make_room(self, namespace: Namespace, wanted: int) -> None:
        pass


class CountsItsOwnWritesOnly(BoundedFiles):
    """What other storages have written since it was opened is not counted."""

    def __init__(self, identity: StorageIdentity, config: BoundedFilesConfig) -> None:
        super().__init__(identity, config)
        self.mine = list[Path]()

    def counted(self) -> list[Path]:
        return self.mine

    def victims(self, namespace: Namespace) -> list[Path]:
        return [path for path in self.mine if path.exists()]

    def put(self, write: ObjectWrite, call: Call) -> bool:
        self.mine.append(self.path(write.namespace, write.key))
        return super().put(write, call)


class EvictsTheIndexOnly(BoundedFiles):
    """Evicted pages are renamed and not found any more; their files stay."""

    def _remove(self, path: Path) -> bool:
        path.rename(path.with_suffix(".evicted"))
        return True


class _Slow(BoundedFiles):
    """Takes much room and a while to write a page, so that whoever kills it finds it at that."""

    def draft(self, path: Path) -> Path:
        draft = super().draft(path)
        draft.write_bytes(bytes(64 << 10))
        time.sleep(0.005)
        return draft

    def collect(self) -> None:
        """What is left stays."""


class LeavesDraftsUncounted(_Slow):
    def counted(self) -> list[Path]:
        return [path for path in super().counted() if path.suffix != DRAFT]


class CountsDraftsForGood(_Slow):
    """Leftovers take the room of pages, and nobody ever removes them."""


class ToldOfEvictions(BoundedFiles, ToldOfRemovals):
    """Tells the others of what it has evicted when it has written, too."""

    def write_objects(self, batches: Sequence[WriteBatch], call: Call) -> list[list[bool]]:
        answers = super().write_objects(batches, call)
        self.announce()
        return answers


class EvictsByName(BoundedFiles):
    """Keeps a capacity for each model, and tells the models' files apart by how their names end."""

    def path(self, namespace: Namespace, key: str) -> Path:
        plain = super().path(namespace, key)
        model = self.identity.model.replace("/", "_")
        return plain.with_name(f"{plain.stem}_{model}{PAGE}")

    def counted(self) -> list[Path]:
        return self.victims(None)

    def victims(self, namespace: Namespace | None) -> list[Path]:
        model = self.identity.model.replace("/", "_")
        return sorted(self.root.glob(f"*/*_{model}{PAGE}"), key=_mtime)


class CountsNoEvictions(BoundedFiles):
    def make_room(self, namespace: Namespace, wanted: int) -> None:
        before = self.recorder.enabled
        self.recorder.enabled = False
        super().make_room(namespace, wanted)
        self.recorder.enabled = before


# What goes first
# ------------------------------------------------------------------------------------------------------


class HeadsFirst(BoundedFiles):
    def touch(self, namespace: Namespace, keys: Sequence[str]) -> None:
        super().touch(namespace, keys[::-1])


class ForgetsPrefixes(BoundedFiles):
    """Tails first within a call.

    Of chains that were written in several it evicts the head first.
    """

    def write_batch(self, batch: WriteBatch, call: Call) -> list[bool]:
        call.prefix_keys = ()
        return super().write_batch(batch, call)


class EvictsAnyPage(BoundedFiles):
    """By the hash of the key, which has nothing to do with use."""

    def victims(self, namespace: Namespace) -> list[Path]:
        return sorted(self.root.glob(f"*/*{PAGE}"), key=lambda path: path.name)


class RefreshesOnWrites(BoundedFiles):
    def use_found(self, batch: LookupBatch, found: Sequence[bool], call: Call) -> None:
        pass

    def use_read(self, batch: ReadBatch, call: Call) -> None:
        pass


class LookupsAreNoUse(BoundedFiles):
    def use_found(self, batch: LookupBatch, found: Sequence[bool], call: Call) -> None:
        pass


class ReadsAreNoUse(BoundedFiles):
    def use_read(self, batch: ReadBatch, call: Call) -> None:
        pass


class BelievesItsClock(BoundedFiles):
    def now(self) -> int:
        return time.time_ns()


class EvictsEverything(BoundedFiles):
    def make_room(self, namespace: Namespace, wanted: int) -> None:
        if sum(map(_size, self.counted())) + wanted > self.limit:
            super().make_room(namespace, self.limit)
