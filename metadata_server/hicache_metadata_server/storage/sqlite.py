"""The SQLite store: a write-ahead log, compacted into blocks of a SQLite file.

A compaction is one transaction, so a crash leaves all or none of it, and the log has its changes
until a checkpoint has synced them. docs/design/metadata-storage.md has every step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_metadata_server.core.changes import AnswerRecord, Recovered, ScopeRecord
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.pins import PinRecord
from hicache_metadata_server.protocol import ScopeGeometry, StoreDurability
from hicache_metadata_server.storage.blocks import BLOCK, SlotBlock, changed_blocks
from hicache_metadata_server.storage.compaction import BATCH_BLOCKS, CompactionBatch, DirtyBlocks
from hicache_metadata_server.storage.replay import replayed
from hicache_metadata_server.storage.schema import (
    APPLICATION,
    BLOCK_MASK,
    CHANGES,
    COMPACTED,
    LINEAGE,
    OLDEST,
    SCOPE_BITS,
    TABLES,
    VERSION,
)
from hicache_metadata_server.storage.wal import WriteAheadLog

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence

    from hicache_metadata_server.core.changes import Changes
    from hicache_metadata_server.core.restore import SlotRows
    from hicache_metadata_server.core.scope import Scope

MAX_LOG_BYTES: Final = 64 << 20
"""Length of the log from which each write also compacts: about 5,000 batches of 128 pages, reserved
and committed."""
CHECKPOINT_BLOCKS: Final = 6000
"""Blocks between checkpoints, about 50 MiB."""
IDLE_CHECKPOINT_BLOCKS: Final = 500
"""The same in an idle server whose log is compacted."""
CHECKPOINT_PASSES: Final = 3
"""Passes of one checkpoint, each of which moves what was written during the one before."""
MAX_WAL_PAGES: Final = 200_000
"""Length of SQLite's log at which a compaction does a checkpoint, if the thread cannot keep up."""
_ENCODER: Final = msgspec.msgpack.Encoder()


class SqliteStore:
    """A SQLite file, its write-ahead log, SQLite's own files, and a lock file.

    With `StoreDurability.PROCESS` a written group survives kill -9; after a loss of power the last
    groups may be missing. With `MACHINE` the group is on the disk when `write` returns.

    Raises:
        StoreError: the file cannot be opened, or another server has it open.
    """

    def __init__(self, file: str, durability: StoreDurability = StoreDurability.PROCESS) -> None:
        self.durability = durability
        self._file = file
        _check_directory(file)
        self._lock = StoreLock(f"{file}.lock")
        self._dirty = DirtyBlocks()
        self._last_group = 0
        self._compacted_group = 0
        self._log_bytes = 0
        """Bytes of groups in the log that are not compacted."""
        self._since_checkpoint = 0
        """Blocks compacted since the last checkpoint."""
        self._is_replayed = False
        try:
            self._database = _open(file)
            # Of their own: a connection runs one statement at a time.
            self._checkpoints = sqlite3.connect(file, isolation_level=None, check_same_thread=False)
            lineage = _scalar(
                self._database, f"SELECT ceiling FROM counters WHERE name = '{LINEAGE}'"
            )
            self._log = WriteAheadLog(
                file, lineage, synchronous=durability is StoreDurability.MACHINE
            )
        except (sqlite3.Error, StoreError, OSError, ValueError) as error:
            self._lock.release()
            raise StoreError(f"cannot open {file}: {error}{_hint(error, file)}") from error

    def recover(self, now: float) -> Recovered:
        """Replay the log, then read everything but slots."""
        database = self._database
        with self._store_errors("read"):
            self._replay(now)
            database.execute("DELETE FROM pins WHERE until <= ?", (now,))
            database.execute("DELETE FROM answers WHERE until <= ?", (now,))
            return Recovered(
                scopes=[
                    ScopeRecord(
                        number,
                        ScopeGeometry(
                            scope=name,
                            slots=slots,
                            slot_bytes=slot_bytes,
                            geometry=geometry,
                            identity=identity,
                        ),
                        *rest,
                    )
                    for number, name, slots, slot_bytes, geometry, identity, *rest in database.execute(
                        "SELECT * FROM scopes"
                    )
                ],
                pins=[
                    PinRecord(pin, until, msgspec.msgpack.decode(slots, type=dict[int, list[int]]))
                    for pin, until, slots in database.execute("SELECT * FROM pins")
                ],
                answers=[AnswerRecord(*row) for row in database.execute("SELECT * FROM answers")],
                counters=dict(
                    database.execute(
                        "SELECT name, ceiling FROM counters WHERE name NOT IN (?, ?)",
                        (COMPACTED, LINEAGE),
                    )
                ),
            )

    def rows(self, scope: int) -> Iterator[SlotRows]:
        """Read the slots of a scope, in ascending order, one block at a time."""
        first = scope << SCOPE_BITS
        with self._store_errors("read"):
            found = self._database.execute(
                "SELECT place - ?, slots FROM blocks WHERE place >= ? AND place < ? ORDER BY place",
                (first, first, (scope + 1) << SCOPE_BITS),
            )
            for number, blob in found:
                rows = SlotBlock.decode(blob).rows(number * BLOCK)
                if rows is not None:
                    yield rows

    def write(self, changes: Changes) -> None:
        """Append one record to the log."""
        # The number of a failed record is not used again: a torn record of it may be in the file.
        self._last_group += 1
        payload = _ENCODER.encode(changes)
        with self._store_errors("written"):
            self._log.append(self._last_group, payload)
        self._log_bytes += len(payload)
        places = [
            (scope << SCOPE_BITS) + block
            for scope, slots in changes.slots.items()
            for block in changed_blocks(slots)
        ]
        self._dirty.mark(places, self._last_group, len(payload), changes)

    writer = None

    @property
    def is_quick(self) -> bool:
        """True if `write` does not sync."""
        return self.durability is not StoreDurability.MACHINE

    def wants_compaction(self, *, idle: bool) -> bool:
        """True if the log is long, or, in an idle server, not compacted."""
        return self._log_bytes > (0 if idle else MAX_LOG_BYTES)

    def collect(self, scope_of: Callable[[int], Scope]) -> CompactionBatch:
        """Encode the next dirty blocks, as they are in memory."""
        # The longer the log, the larger the batches: scattered changes dirty more blocks than
        # batches of the usual size compact.
        most = BATCH_BLOCKS * (1 + self._log_bytes // MAX_LOG_BYTES)
        return self._dirty.take(
            most,
            lambda place: SlotBlock.of(scope_of(place >> SCOPE_BITS), place & BLOCK_MASK).encode(),
        )

    def compact(self, batch: CompactionBatch, now: float) -> None:
        """Write blocks in one transaction."""
        try:
            with self._store_errors("written"):
                self._compact(batch, now)
        except BaseException:
            self._dirty.put_back(batch)
            raise
        self._log_bytes -= batch.log_bytes
        self._since_checkpoint += len(batch.blocks)

    def put_back(self, batch: CompactionBatch) -> None:
        """Queue the blocks of a batch again."""
        self._dirty.put_back(batch)

    def wants_checkpoint(self, *, idle: bool) -> bool:
        """True if SQLite's own log is long; in an idle server earlier."""
        return self._since_checkpoint > (
            IDLE_CHECKPOINT_BLOCKS if idle and not self._log_bytes else CHECKPOINT_BLOCKS
        )

    def checkpoint(self) -> None:
        """Move SQLite's own log into the file, then delete the compacted part of the log."""
        self._since_checkpoint = 0
        # Read before the checkpoint begins: later compactions may not be part of it.
        compacted = self._compacted_group
        with self._store_errors("written"):
            # Compactions go on meanwhile. The first pass moves nearly everything, and a later one
            # catches up with them, so that SQLite can begin its log anew.
            for _ in range(CHECKPOINT_PASSES):
                _, pages, moved = self._checkpoints.execute(
                    "PRAGMA wal_checkpoint(PASSIVE)"
                ).fetchone()
                if pages == moved:
                    # Only now are the compacted blocks on the disk.
                    self._log.delete_through(compacted)
                    compacted = 0

    def sizes(self) -> dict[str, int]:
        """Bytes of the database, of SQLite's log (`wal`), and of the write-ahead log (`log`)."""
        return {
            "database": _size(self._file),
            "wal": _size(f"{self._file}-wal"),
            "log": self._log.size(),
        }

    def close(self) -> None:
        """Close the files. If everything is compacted, only the database remains."""
        try:
            # On an error the log stays, and the next start replays it. So does a log that was never
            # replayed.
            with contextlib.suppress(StoreError, OSError, sqlite3.Error):
                if self._is_replayed and not self._log_bytes:
                    self._settle_log()
            self._log.close()
            self._checkpoints.close()
            self._database.close()
        finally:
            self._lock.release()

    def _replay(self, now: float) -> None:
        found = self._database.execute(
            "SELECT ceiling FROM counters WHERE name = ?", (COMPACTED,)
        ).fetchone()
        self._compacted_group = found[0] if found else 0
        self._last_group = self._compacted_group
        for batch in replayed(self._log.groups(self._last_group), self._read):
            self._compact(batch, now)
            self._last_group = batch.last_group
        self._is_replayed = True
        self._settle_log()

    def _settle_log(self) -> None:
        """Checkpoint, then delete the log, all of which is compacted.

        Raises:
            StoreError: another program reads the database, so the checkpoint is incomplete. The log
                must not be appended to: after a loss of power its old part may have lost groups,
                and the new ones would follow the gap.
        """
        if self._log.is_empty:
            return
        blocked, _, _ = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        if blocked:
            raise StoreError("another program is reading the database; end that, and start again")
        self._log.delete_all()

    @contextlib.contextmanager
    def _store_errors(self, done: str) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, msgspec.DecodeError, ValueError) as error:
            raise StoreError(
                f"the store {self._file} cannot be {done}: {error}{_hint(error, self._file)}"
            ) from error

    def _read(self, place: int) -> SlotBlock | None:
        found = self._database.execute(
            "SELECT slots FROM blocks WHERE place = ?", (place,)
        ).fetchone()
        return SlotBlock.decode(found[0]) if found else None

    def _compact(self, batch: CompactionBatch, now: float) -> None:
        run = self._database.execute
        run("BEGIN IMMEDIATE")
        try:
            self._database.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?)", batch.blocks)
            if batch.last_group:
                self._compact_rest(batch.rest, now)
                run("INSERT OR REPLACE INTO counters VALUES (?, ?)", (COMPACTED, batch.last_group))
            run("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                run("ROLLBACK")
            raise
        self._compacted_group = batch.last_group or self._compacted_group

    def _compact_rest(self, changes: Changes, now: float) -> None:
        run, run_each = self._database.execute, self._database.executemany
        for record in changes.scopes:
            one = record.geometry
            run(
                "INSERT OR REPLACE INTO scopes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    record.number,
                    one.scope,
                    one.slots,
                    one.slot_bytes,
                    one.geometry,
                    one.identity,
                    record.epoch,
                    record.cleared_until,
                    record.tenant,
                    record.model,
                ),
            )
        # After the scopes: a group may have created and dropped a scope. Numbers are never reused.
        for number in changes.dropped:
            run("DELETE FROM scopes WHERE number = ?", (number,))
            run(
                "DELETE FROM blocks WHERE place >= ? AND place < ?",
                (number << SCOPE_BITS, (number + 1) << SCOPE_BITS),
            )
        run_each("INSERT OR REPLACE INTO counters VALUES (?, ?)", changes.counters.items())
        run("DELETE FROM answers WHERE until <= ?", (now,))
        run("DELETE FROM pins WHERE until <= ?", (now,))
        run_each(
            "INSERT OR REPLACE INTO pins VALUES (?, ?, ?)",
            [
                (pin.pin, pin.until, msgspec.msgpack.encode(pin.slots))
                for pin in changes.pins
                if pin.until > now
            ],
        )
        run_each("DELETE FROM pins WHERE pin = ?", [(pin,) for pin in changes.unpinned])
        run_each(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
            [
                (
                    answer.idempotency_key,
                    answer.until,
                    answer.digest,
                    answer.content_type,
                    answer.status,
                    answer.body,
                )
                for answer in changes.answers
                if answer.until > now
            ],
        )


def _hint(error: Exception, file: str) -> str:
    """Advice for the message about a full disk; "" for other errors."""
    # SQLite has one text for a full disk and an exceeded quota, and no errno.
    no_room = isinstance(error, sqlite3.Error) and "disk is full" in str(error)
    if no_room or (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        return f"; free space in {Path(file).absolute().parent}"
    return ""


def _size(file: str) -> int:
    try:
        return os.stat(file).st_size
    except FileNotFoundError:
        return 0


def _check_directory(file: str) -> None:
    if not Path(file).parent.is_dir():
        raise StoreError(
            f"there is no directory {Path(file).parent}: make it, writable for the server's user"
        )


def _open(file: str) -> sqlite3.Connection:
    # Used by one thread at a time, but not always by the same: the loop, or the group commit's.
    database = sqlite3.connect(
        file, isolation_level=None, check_same_thread=False, cached_statements=64
    )
    try:
        _prepare(database)
    except BaseException:
        database.close()
        raise
    return database


def check_database(file: str) -> None:
    """Check that a server could open this file. Writes nothing, and takes no lock.

    Raises:
        StoreError: the file could not be opened.
    """
    _check_directory(file)
    directory = Path(file).absolute().parent
    if not os.access(directory, os.W_OK | os.X_OK):
        raise StoreError(f"{directory} is not writable for this user")
    if not Path(file).exists():
        return
    try:
        with contextlib.closing(
            sqlite3.connect(f"{Path(file).absolute().as_uri()}?mode=ro", uri=True)
        ) as database:
            _check_schema(database)
    except (sqlite3.Error, StoreError) as error:
        raise StoreError(f"cannot open {file}: {error}") from error


def _check_schema(database: sqlite3.Connection) -> tuple[int, int]:
    """Check that the database is ours; returns its version and the number of tables."""
    version = _scalar(database, "PRAGMA user_version")
    application = _scalar(database, "PRAGMA application_id")
    tables = _scalar(database, "SELECT count(*) FROM sqlite_master")
    if tables and application != APPLICATION:
        raise StoreError("this is a database of something else")
    if tables and version < OLDEST:
        raise StoreError(
            f"it was written by an earlier version of this server (schema {version}; this one "
            f"needs {OLDEST})"
        )
    if version > VERSION:
        raise StoreError(
            f"it was written by a later version of this server (schema {version}; this one knows "
            f"{VERSION})"
        )
    if sys.byteorder != "little":
        raise StoreError("a store's columns are those of little-endian machines")
    return version, tables


def _prepare(database: sqlite3.Connection) -> None:
    version, tables = _check_schema(database)
    database.execute("PRAGMA journal_mode = WAL")
    # No sync at a commit: acknowledged changes are in the write-ahead log, which is deleted only
    # after a checkpoint has synced their blocks.
    database.execute("PRAGMA synchronous = NORMAL")
    database.execute(f"PRAGMA wal_autocheckpoint = {MAX_WAL_PAGES}")
    database.execute("PRAGMA cache_size = -16384")
    # Some builds turn it on, and then overwrite every replaced block with zeros first.
    database.execute("PRAGMA secure_delete = OFF")
    if tables and version < VERSION:
        steps = "; ".join(CHANGES[number] for number in range(version, VERSION))
        database.executescript(
            f"BEGIN IMMEDIATE; {steps}; PRAGMA user_version = {VERSION}; COMMIT;"
        )
    if not tables:
        database.executescript(
            f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = "
            f"{VERSION};"
            f" INSERT INTO counters VALUES ('{LINEAGE}', random() & 0x7fffffffffffffff); COMMIT;"
        )


def _scalar(database: sqlite3.Connection, query: str) -> int:
    found: Sequence[int] = database.execute(query).fetchone()
    return found[0]


class StoreLock:
    """An exclusive lock on a store. The kernel releases it when the process ends.

    Raises:
        StoreError: another server holds the lock; the message has its process id.
    """

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
            raise StoreError(
                f"another server has this store: {file} is locked by process {holder or 'unknown'}"
            ) from error
        # The content is for messages only, so a full disk is no reason to fail.
        with contextlib.suppress(OSError):
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, str(os.getpid()).encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        # The file stays: one server could lock a deleted file, and another a new one of its name.
        os.close(self._descriptor)
