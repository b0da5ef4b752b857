"""SQLite stores as targets of snapshots: a new file is filled and renamed over the old one."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.backup.offline import opened_store, snapshot_of
from hicache_metadata_server.core.changes import Changes, ScopeRecord
from hicache_metadata_server.core.codec import SlotChanges, SlotLeases, SlotStates
from hicache_metadata_server.core.errors import SnapshotError, StoreError
from hicache_metadata_server.core.invariants import audit
from hicache_metadata_server.core.slot_table import FREE, LIVE, QUARANTINED
from hicache_metadata_server.core.snapshot_parts import (
    Counters,
    EmptySlots,
    Pages,
    ScopeHeader,
    Tally,
)
from hicache_metadata_server.storage.factory import SQLITE
from hicache_metadata_server.storage.fsync import sync_directory
from hicache_metadata_server.storage.schema import APPLICATION
from hicache_metadata_server.storage.sqlite import SqliteStore, StoreLock

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicache_metadata_server.core.snapshot_parts import SnapshotPart

INCOMING: Final = ".incoming"
REPLACED: Final = ".replaced"


class StoreStamp(NamedTuple):
    """Identity and size of a closed store, to detect a use in between."""

    inode: int
    changed: int
    size: int

    @classmethod
    def of(cls, url: str) -> StoreStamp:
        """Return the stamp of a store as it is now."""
        file = Path(url.removeprefix(SQLITE))
        found = file.stat()
        return cls(
            found.st_ino,
            found.st_mtime_ns,
            found.st_size,
        )


class SqliteTarget:
    """One SQLite file as the target of a snapshot, locked as a server locks it.

    Raises:
        StoreError: a server has it open, or it cannot be created.
        SnapshotError: it holds scopes, and `replace` is false.
    """

    def __init__(self, file: str, *, replace: bool) -> None:
        self._file = Path(file)
        self._incoming = Path(f"{file}{INCOMING}")
        self._lock = StoreLock(f"{file}.lock")
        try:
            if _holds_scopes(self._file) and not replace:
                raise SnapshotError(f"{file} holds scopes already; --replace replaces them")
            _remove(self._incoming)
        except BaseException:
            self._lock.release()
            raise

    def load(self, parts: Iterable[SnapshotPart]) -> None:
        """Write all changes to the log of a new store, which compacts it at the next start."""
        store = SqliteStore(str(self._incoming))
        try:
            store.recover(time.time())
            for changes in changes_of_snapshot(parts):
                store.write(changes)
        finally:
            store.close()

    def read_back(self) -> tuple[Tally, list[str]]:
        """Recover the new store as a server does; audit its scopes."""
        tally = Tally()
        with opened_store(f"{SQLITE}{self._incoming}") as service:
            # Recovery has also compacted the log, which `commit` relies on.
            for _ in tally.over(snapshot_of(service, time.time())):
                pass
            problems = list(service.recovery_problems)
            for name, scope in service.scopes.items():
                problems += [f"{name}: {problem}" for piece in audit(scope) for problem in piece]
        return tally, problems

    def commit(self) -> None:
        """Rename the new file to the place of the old one.

        The old one is renamed first: at no time a database lies beside the log of the other, which
        a server would apply to it.
        """
        old = self._file.with_name(f"{self._file.name}{REPLACED}")
        try:
            # Only the database is renamed, so that all content has to be in it.
            if Path(f"{self._incoming}-wal").exists():
                raise StoreError(f"not all of {self._incoming} is in the database")
            with contextlib.suppress(FileNotFoundError):
                self._file.rename(old)
            _remove(self._file)
            self._incoming.rename(self._file)
            sync_directory(self._file.parent)
            # Only now: until the directory is synced a crash may bring back the state before.
            old.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self._file} cannot be replaced: {error}") from error

    def close(self) -> None:
        """Remove the unfinished file, and release the lock."""
        try:
            _remove(self._incoming)
            Path(f"{self._incoming}.lock").unlink(missing_ok=True)
        finally:
            self._lock.release()


def changes_of_snapshot(parts: Iterable[SnapshotPart]) -> Iterator[Changes]:
    """Yield the changes that a server would have written."""
    number, epoch = 0, 0
    for part in parts:
        match part:
            case ScopeHeader():
                number, epoch = number + 1, part.epoch
                yield Changes(
                    scopes=[
                        ScopeRecord(
                            number, part.geometry, epoch, tenant=part.tenant, model=part.model
                        )
                    ]
                )
            case Pages() | EmptySlots():
                if part:
                    yield Changes(
                        slots={
                            number: _pages(part, epoch)
                            if isinstance(part, Pages)
                            else _empty_slots(part, epoch)
                        }
                    )
            case Counters():
                yield Changes(counters={"lease": part.lease, "pin": part.pin})


def _pages(pages: Pages, epoch: int) -> SlotChanges:
    order = sorted(range(len(pages)), key=pages.slots.__getitem__)
    slots = _wide(pages.slots, order)
    states = SlotStates(
        epoch,
        slots,
        bytes([LIVE]) * len(order),
        b"",
        _wide(pages.lengths, order),
        _wide(pages.checksums, order),
    )
    leases = SlotLeases(
        slots,
        _wide(pages.generations, order),
        _wide(pages.uses, order),
        [pages.keys[i] for i in order],
        [pages.prefixes[i] for i in order],
        [],
    )
    return SlotChanges(states, leases)


def _empty_slots(empty: EmptySlots, epoch: int) -> SlotChanges:
    order = sorted(range(len(empty)), key=empty.slots.__getitem__)
    slots, until = _wide(empty.slots, order), array("d", [empty.until[i] for i in order])
    states = SlotStates(
        epoch,
        slots,
        bytes(QUARANTINED if end > 0 else FREE for end in until),
        until.tobytes(),
        b"",
        b"",
    )
    nothing, names = bytes(8 * len(order)), [""] * len(order)
    return SlotChanges(
        states, SlotLeases(slots, _wide(empty.generations, order), nothing, names, [], [])
    )


def _wide(column: Sequence[int], order: Sequence[int]) -> bytes:
    return array("Q", [column[i] for i in order]).tobytes()


def _holds_scopes(file: Path) -> bool:
    """Return True if a file is a store with scopes.

    Raises:
        StoreError: the file is something else.
    """
    if file.exists() and file.stat().st_size:
        try:
            with contextlib.closing(
                sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
            ) as database:
                if database.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
                    raise StoreError(f"{file} is a database of something else")
                for table in ("scopes", "log"):
                    # Scopes of the log may not be in their table yet.
                    if database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]:
                        return True
        except sqlite3.Error as error:
            raise StoreError(f"{file} is no store: {error}") from error
    return False


def _remove(file: Path) -> None:
    """Remove a database and the files that belong to it, except its lock."""
    # The lock file stays: a server that waits for it would lock a file without a name.
    for path in (file, Path(f"{file}-wal"), Path(f"{file}-shm")):
        path.unlink(missing_ok=True)
