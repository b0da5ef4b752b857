"""A store in one SQLite file, in WAL mode: one transaction for each group of changes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from hicache_metadata_server.protocol import Durability, ScopeGeometry
from hicache_metadata_server.service.changes import AnswerRecord, PinRecord, Recovered, ScopeRecord
from hicache_metadata_server.state.written import SlotChanges
from hicache_metadata_server.stores.blocks import BLOCK, Block
from hicache_metadata_server.stores.folds import PIECE, WINDOW_BYTES, Folds
from hicache_metadata_server.stores.schema import APPLICATION, SCOPE_BITS, TABLES, VERSION
from hicache_metadata_server.stores.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from hicache_metadata_server.service.changes import Changes
    from hicache_metadata_server.state.restoring import SlotRows

T = TypeVar("T")

MOST_JOURNAL_BYTES: Final = 64 << 20
"""Before folding it can wait no longer: some 5,000 batches of 128 pages, reserved and committed."""
GATHER_BYTES: Final = 96 << 10
GATHER_SHARES: Final = 1024
"""Of the journal, read at once: in about a millisecond."""
CHECKPOINT_WRITES: Final = 6000
"""Between checkpoints: some 100 MiB. A checkpoint waits for the disk, and writes wait for a part of it."""
IDLE_CHECKPOINT_WRITES: Final = 500
CHECKPOINT_PASSES: Final = 3
MOST_LOG_PAGES: Final = 200_000
"""Where the checkpoints beside the writes do not keep up, a write does one."""
FORGET_SECONDS: Final = 1.0
_GROUP: Final = msgspec.msgpack.Decoder(dict[int, SlotChanges])


class SqliteStore:
    """One file, and beside it SQLite's own and a lock that keeps a second server out.

    `Durability.PROCESS` survives kill -9; after a loss of power it may lack the last changes, and is whole. `MACHINE` has reached the
    disk before `write` returns.
    """

    def __init__(self, file: str, durability: Durability = Durability.PROCESS) -> None:
        self.durability = durability
        self._lock = _Lock(f"{file}.lock")
        self._forget_at = 0.0
        self._folds = Folds()
        self._journal_bytes = self._last_group = 0
        self._since_checkpoint = 0
        try:
            self._database = _open(file, durability)
            self._checkpoints = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
        except (sqlite3.Error, StoreError, OSError) as error:
            self._lock.release()
            raise StoreError(f"cannot open {file}: {error}") from error

    def recover(self, now: float) -> Recovered:
        """Everything but slots."""
        database = self._database
        with _told("read"):
            self._journal_bytes, self._last_group = database.execute(
                "SELECT coalesce(sum(length(slots)), 0), coalesce(max(number), 0) FROM journal"
            ).fetchone()
        while self._journal_bytes:
            self.tidy()
        with _told("read"):
            database.execute("DELETE FROM pins WHERE until <= ?", (now,))
            database.execute("DELETE FROM answers WHERE until <= ?", (now,))
            return Recovered(
                scopes=[
                    ScopeRecord(
                        number, ScopeGeometry(scope=name, slots=slots, slot_bytes=slot_bytes, geometry=geometry, identity=identity), *rest
                    )
                    for number, name, slots, slot_bytes, geometry, identity, *rest in database.execute("SELECT * FROM scopes")
                ],
                pins=[
                    PinRecord(pin, until, msgspec.msgpack.decode(slots, type=dict[int, list[int]]))
                    for pin, until, slots in database.execute("SELECT * FROM pins")
                ],
                answers=[AnswerRecord(*row) for row in database.execute("SELECT * FROM answers")],
                counters=dict(database.execute("SELECT name, ceiling FROM counters")),
            )  # fmt: skip

    def rows(self, scope: int) -> Iterator[SlotRows]:
        """The slots of a scope, in ascending order, some at a time."""
        first = scope << SCOPE_BITS
        with _told("read"):
            found = self._database.execute(
                "SELECT place - ?, slots FROM blocks WHERE place >= ? AND place < ? ORDER BY place",
                (first, first, (scope + 1) << SCOPE_BITS),
            )
            for number, blob in found:
                rows = Block.decode(blob).rows(number * BLOCK)
                if rows is not None:
                    yield rows

    def write(self, changes: Changes, now: float) -> None:
        """One transaction."""
        with _told("written"):
            self._database.execute("BEGIN IMMEDIATE")
            try:
                written = self._write(changes, now)
                self._database.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
        self._since_checkpoint += 1
        if written:
            self._last_group += 1
            self._journal_bytes += written

    @property
    def is_quick(self) -> bool:
        """Whether nothing waits for the disk."""
        return self.durability is not Durability.MACHINE

    def wants_tidying(self, *, idle: bool) -> bool:
        """Whether the journal is long, or there is time."""
        return self._journal_bytes > (0 if idle else MOST_JOURNAL_BYTES)

    def tidy(self) -> None:
        """Gather some of the journal, or write some of the blocks that it changes."""
        if not self._journal_bytes:
            return
        if self._folds.is_gathering:
            self._gather()
            return
        # Where changes are scattered over many blocks, each write has to fold more.
        most = PIECE * (1 + self._journal_bytes // MOST_JOURNAL_BYTES)
        with _told("written"):
            blocks, is_last = self._folds.piece(most, self._read)
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", blocks)
                if is_last:
                    self._database.execute("DELETE FROM journal WHERE number <= ?", (self._folds.last,))
                self._database.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
        if is_last:
            self._journal_bytes -= self._folds.journal_bytes
        self._folds.done()
        self._since_checkpoint += len(blocks)

    def wants_checkpoint(self, *, idle: bool) -> bool:
        """Whether the log has become long, or there is time: done while nobody writes, it lets the log begin anew."""
        return self._since_checkpoint > (IDLE_CHECKPOINT_WRITES if idle and not self._journal_bytes else CHECKPOINT_WRITES)

    def checkpoint(self) -> None:
        """Fold SQLite's own log into the file."""
        self._since_checkpoint = 0
        with _told("written"):
            # One pass moves nearly all while others write; the next finds so little left that the log can begin anew.
            for _ in range(CHECKPOINT_PASSES):
                self._checkpoints.execute("PRAGMA wal_checkpoint(PASSIVE)")

    def _gather(self) -> None:
        size = shares = 0
        with _told("read"):
            found = self._database.execute(
                "SELECT number, slots FROM journal WHERE number > ? ORDER BY number", (self._folds.last,)
            )
            for number, slots in found:
                shares += self._folds.add(_GROUP.decode(slots), number, len(slots))
                size += len(slots)
                if size >= GATHER_BYTES or shares >= GATHER_SHARES:
                    break
            found.close()
        if self._folds.last == self._last_group or self._folds.journal_bytes >= WINDOW_BYTES:
            self._folds.seal()

    def _read(self, place: int) -> Block | None:
        found = self._database.execute("SELECT slots FROM blocks WHERE place = ?", (place,)).fetchone()
        return Block.decode(found[0]) if found else None

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.execute("ROLLBACK")

    def close(self) -> None:
        """Fold what is left, and let go of the file."""
        try:
            with contextlib.suppress(StoreError):
                while self._journal_bytes:
                    self.tidy()
            self._checkpoints.close()
            self._database.close()
        finally:
            self._lock.release()

    def _write(self, changes: Changes, now: float) -> int:
        """Returns by how many bytes the journal has grown."""
        written = 0
        run, run_each = self._database.execute, self._database.executemany
        for record in changes.scopes:
            one = record.geometry
            run(
                "INSERT OR REPLACE INTO scopes VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    record.number,
                    one.scope,
                    one.slots,
                    one.slot_bytes,
                    one.geometry,
                    one.identity,
                    record.epoch,
                    record.cleared_until,
                ),
            )
        if changes.slots:
            blob = msgspec.msgpack.encode(changes.slots)
            # The number is ours: a table that was emptied begins anew.
            run("INSERT INTO journal VALUES (?, ?)", (self._last_group + 1, blob))
            written = len(blob)
        if changes.counters:
            run_each("INSERT OR REPLACE INTO counters VALUES (?, ?)", changes.counters.items())
        for pin in changes.pins:
            run("INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", (pin.pin, pin.until, msgspec.msgpack.encode(pin.slots)))
        if changes.unpinned:
            run_each("DELETE FROM pins WHERE pin = ?", [(pin,) for pin in changes.unpinned])
        for answer in changes.answers:
            run(
                "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
                (answer.once, answer.until, answer.digest, answer.content_type, answer.status, answer.body),
            )
        if now >= self._forget_at:
            self._forget_at = now + FORGET_SECONDS
            run("DELETE FROM answers WHERE until <= ?", (now,))
            run("DELETE FROM pins WHERE until <= ?", (now,))
        return written


@contextlib.contextmanager
def _told(done: str) -> Generator[None]:
    try:
        yield
    except (sqlite3.Error, msgspec.DecodeError, ValueError) as error:
        raise StoreError(f"the store cannot be {done}: {error}") from error


def _open(file: str, durability: Durability) -> sqlite3.Connection:
    if not Path(file).parent.is_dir():
        raise StoreError(f"there is no directory {Path(file).parent}")
    # Used by one thread at a time, though not always by the same.
    database = sqlite3.connect(file, isolation_level=None, check_same_thread=False, cached_statements=64)
    try:
        _prepare(database, durability)
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, durability: Durability) -> None:
    version, application = _only(database, "PRAGMA user_version"), _only(database, "PRAGMA application_id")
    tables = _only(database, "SELECT count(*) FROM sqlite_master")
    if tables and application != APPLICATION:
        raise StoreError("this is a database of something else")
    if tables and version < VERSION:
        raise StoreError(f"it was written by an earlier version of this server (schema {version}; this one needs {VERSION})")
    if version > VERSION:
        raise StoreError(f"it was written by a later version of this server (schema {version}; this one knows {VERSION})")
    if sys.byteorder != "little":
        raise StoreError("a store's columns are those of little-endian machines")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute(f"PRAGMA synchronous = {'FULL' if durability is Durability.MACHINE else 'NORMAL'}")
    database.execute(f"PRAGMA wal_autocheckpoint = {MOST_LOG_PAGES}")
    database.execute("PRAGMA cache_size = -16384")
    # Where it is built in, what is folded would be written once more, as zeros.
    database.execute("PRAGMA secure_delete = OFF")
    if not tables:
        database.executescript(f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; COMMIT;")


def _only(database: sqlite3.Connection, query: str) -> int:
    found: Sequence[int] = database.execute(query).fetchone()
    return found[0]


class _Lock:
    """Held by one server at a time. The kernel lets it go with the process, however that ends."""

    def __init__(self, file: str) -> None:
        try:
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise StoreError(f"cannot open {file}: {error.strerror}") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise StoreError(f"another server has this store: {file} is locked by process {holder or 'unknown'}") from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Let it go; the file stays, or two servers could hold two of the same name."""
        os.close(self._descriptor)
