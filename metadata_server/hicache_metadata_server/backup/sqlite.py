"""SQLite stores, filled from a snapshot: in a file aside, which then takes the place of the
other."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_metadata_server.backup.capture import snapshot_of
from hicache_metadata_server.backup.offline import opened_store
from hicache_metadata_server.backup.parts import (
    Counters,
    EmptySlots,
    Pages,
    ScopeHeader,
    SnapshotError,
    Tally,
)
from hicache_metadata_server.core.changes import Changes, ScopeRecord
from hicache_metadata_server.core.codec import SlotChanges, SlotLeases, SlotStates
from hicache_metadata_server.core.invariants import audit
from hicache_metadata_server.core.slot_table import FREE, LIVE, QUARANTINED
from hicache_metadata_server.storage.fsync import sync_directory
from hicache_metadata_server.storage.schema import APPLICATION
from hicache_metadata_server.storage.sqlite import SqliteStore, StoreLock
from hicache_metadata_server.storage.store import SQLITE, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from hicache_metadata_server.backup.parts import SnapshotPart

INCOMING: Final = ".incoming"
REPLACED: Final = ".replaced"


class StoreStamp(NamedTuple):
    """Tells whether somebody has had a store that was closed."""

    inode: int
    changed: int
    size: int

    @classmethod
    def of(cls, url: str) -> StoreStamp:
        """Of the store as it is now."""
        file = Path(url.removeprefix(SQLITE))
        found = file.stat()
        return cls(
            found.st_ino,
            found.st_mtime_ns,
            sum(path.stat().st_size for path in (file, *_logs(file))),
        )


class SqliteTarget:
    """One SQLite file; it is locked as a server would lock it.

    Raises:
        StoreError: a server has it, or it cannot be made.
        SnapshotError: it holds scopes, and `replace` is false.
    """

    def __init__(self, file: str, *, replace: bool) -> None:
        self._file, self._aside = Path(file), Path(f"{file}{INCOMING}")
        self._lock = StoreLock(f"{file}.lock")
        try:
            if _holds_scopes(self._file) and not replace:
                raise SnapshotError(f"{file} holds scopes already; with --replace they make room")
            _remove(self._aside)
        except BaseException:
            self._lock.release()
            raise

    def load(self, parts: Iterable[SnapshotPart]) -> None:
        """All goes through the log of a new store, which is folded when it is opened again."""
        store = SqliteStore(str(self._aside))
        try:
            store.recover(time.time())
            for changes in _changes(parts):
                store.write(changes)
        finally:
            store.close()

    def read_back(self) -> tuple[Tally, list[str]]:
        """As a server would."""
        tally = Tally()
        with opened_store(f"{SQLITE}{self._aside}") as service:
            for _ in tally.over(snapshot_of(service, time.time())):
                pass
            problems = list(service.recovery_problems)
            for name, scope in service.scopes.items():
                problems += [f"{name}: {problem}" for piece in audit(scope) for problem in piece]
        return tally, problems

    def commit(self) -> None:
        """Rename, with the old file out of the way, so that it never has the new one's log or the
        new one its."""
        old = self._file.with_name(f"{self._file.name}{REPLACED}")
        try:
            if any(_logs(self._aside)) or Path(f"{self._aside}-wal").exists():
                raise StoreError(f"not all of {self._aside} is in the database")
            with contextlib.suppress(FileNotFoundError):
                self._file.rename(old)
            _remove(self._file)
            self._aside.rename(self._file)
            sync_directory(self._file.parent)
            old.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"{self._file} cannot be replaced: {error}") from error

    def close(self) -> None:
        """Remove what is left aside, and let the lock go."""
        try:
            _remove(self._aside)
            Path(f"{self._aside}.lock").unlink(missing_ok=True)
        finally:
            self._lock.release()


def _changes(parts: Iterable[SnapshotPart]) -> Iterator[Changes]:
    """What a server would have written."""
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
                            else _rests(part, epoch)
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


def _rests(empty: EmptySlots, epoch: int) -> SlotChanges:
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
    """Whether a store has anything to lose.

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
                if database.execute("SELECT count(*) FROM scopes").fetchone()[0]:
                    return True
        except sqlite3.Error as error:
            raise StoreError(f"{file} is no store: {error}") from error
    # What is in a log may not be in the database yet.
    return any(log.stat().st_size for log in _logs(file))


def _logs(file: Path) -> Iterable[Path]:
    return file.parent.glob(f"{file.name}.log-*")


def _remove(file: Path) -> None:
    """A database and what lies beside it, but for its lock."""
    for path in (file, Path(f"{file}-wal"), Path(f"{file}-shm"), *_logs(file)):
        path.unlink(missing_ok=True)
