"""The SQLite store: a table of groups, compacted into a table of blocks.

Each write and each compaction is one transaction, so a crash leaves all or none of it.
docs/design/metadata-storage.md has every step.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import sqlite3
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
import structlog
from msgspec import structs

from hicache_metadata_server.core.changes import AnswerRecord, Changes, ScopeRecord
from hicache_metadata_server.core.codec import (
    SlotChanges,
    SlotColumns,
    changed_blocks,
    columns_of,
)
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.service import CLOSED_UNTIL, LONGEST
from hicache_metadata_server.protocol import ScopeGeometry, StoreDurability
from hicache_metadata_server.storage.store import (
    BATCH_BLOCKS,
    MEMORY,
    CompactionBatch,
    DirtyBlocks,
    MemoryStore,
    MetadataStore,
    sqlite_file,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from hicache_metadata_server.core.scope import Scope

VERSION: Final = 7
"""Version of the tables."""
APPLICATION: Final = 0x68694D64
"""Application id in the file, by which databases of other programs are refused."""

# The groups in `log` are not in the other tables yet. place: number of the scope << 40 | number of
# the block in it. A clear does not change the slots here: slots of an earlier epoch are read as
# quarantined.
TABLES: Final = """
CREATE TABLE log (id INTEGER PRIMARY KEY, payload BLOB NOT NULL);
CREATE TABLE scopes (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, slots INTEGER NOT NULL, slot_bytes INTEGER NOT NULL,
    geometry TEXT NOT NULL, identity TEXT NOT NULL, epoch INTEGER NOT NULL, cleared_until REAL NOT NULL,
    tenant TEXT NOT NULL DEFAULT '', model TEXT NOT NULL DEFAULT ''
);
CREATE TABLE blocks (place INTEGER PRIMARY KEY, slots BLOB NOT NULL);
CREATE TABLE answers (
    once TEXT PRIMARY KEY, until REAL NOT NULL, digest BLOB NOT NULL, content_type TEXT NOT NULL, status INTEGER NOT NULL,
    body BLOB NOT NULL
);
CREATE INDEX answers_by_end ON answers (until);
CREATE TABLE counters (name TEXT PRIMARY KEY, ceiling INTEGER NOT NULL);
"""
SCOPE_BITS: Final = 40
BLOCK_MASK: Final = (1 << SCOPE_BITS) - 1
"""Bits of a place that are the number of the block."""
INODE: Final = "inode"
"""Counter that holds the inode of the file, by which a copy is told from its original."""
MAX_LOG_BYTES: Final = 64 << 20
"""Length of the log from which each write also compacts: about 5,000 batches of 128 pages, reserved
and committed."""
CHECKPOINT_BYTES: Final = 16 << 20
"""Bytes of groups and blocks between checkpoints of SQLite's own log."""
CHECKPOINT_PASSES: Final = 3
"""Passes of one checkpoint, each of which moves what was written during the one before."""
PAGE_BYTES: Final = 8192
"""Page size of a new file. A group of 128 reserved pages takes 12 KB: smaller pages are more writes
for each group, and larger ones more bytes for a group of commits."""
MAX_WAL_PAGES: Final = 32_768
"""Length of SQLite's own log at which a write does a checkpoint, if the thread cannot keep up."""
_GET_VERSION: Final = 0x80087601
"""Linux' `FS_IOC_GETVERSION`, of ext4, XFS and Btrfs."""
_GEOMETRY: Final = ScopeGeometry.__struct_fields__
"""Columns of `scopes` behind the number."""
_ENCODER: Final = msgspec.msgpack.Encoder()
_GROUP: Final = msgspec.msgpack.Decoder(Changes)
_LOG: Final = structlog.get_logger()


def open_store(url: str, durability: StoreDurability = StoreDurability.PROCESS) -> MetadataStore:
    """Open the store at `memory:` or `sqlite:///FILE`.

    Raises:
        ValueError: the address is not that of a store of one server.
        StoreError: the store cannot be opened, or another server has it open.
    """
    if url == MEMORY:
        return MemoryStore()
    file = sqlite_file(url)
    if durability is StoreDurability.NONE:
        raise ValueError("a store of durability 'none' is memory:")
    return SqliteStore(file, durability)


class SqliteStore(MetadataStore):
    """A SQLite file, which is locked.

    With `StoreDurability.PROCESS` a written group survives kill -9; after a loss of power the last
    groups may be missing. With `MACHINE` the group is on the disk when `write` returns.

    Raises:
        StoreError: the file cannot be opened, or another server has it open.
    """

    def __init__(self, file: str, durability: StoreDurability = StoreDurability.PROCESS) -> None:
        self.durability = durability
        self.is_quick = durability is not StoreDurability.MACHINE
        self._file = file
        self._dirty = DirtyBlocks()
        self._groups = defaultdict[int, list[SlotChanges]](list)
        """Groups of the log by scope, from `recover` to `rows`."""
        self._last_group = 0
        self._log_bytes = 0
        """Bytes of groups that are not compacted."""
        self._since_checkpoint = 0
        """Bytes written since the last checkpoint."""
        _check_directory(file)
        with contextlib.ExitStack() as undo:
            self.lock = _locked(file)
            """Descriptor of the file, whose lock ends with it."""
            undo.callback(os.close, self.lock)
            try:
                self._database = _open(file, durability)
            except (sqlite3.Error, StoreError) as error:
                raise StoreError(f"cannot open {file}: {error}{_hint(error, file)}") from error
            undo.callback(self._database.close)
            # Makes the checkpoints, and all writes of a store that is not quick.
            self._thread = self._executor = ThreadPoolExecutor(1, thread_name_prefix="store")
            # Starts the thread, because later the process may be able to start no more of them.
            self._executor.submit(time.monotonic)
            undo.pop_all()

    def recover(self, now: float) -> Changes:
        """Read everything but slots, from the tables and then from the log."""
        with self._store_errors("read"):
            everything, log = self._snapshot(), list[tuple[int, int, Changes]]()
            for group, payload in self._database.execute("SELECT * FROM log ORDER BY id"):
                log.append((group, len(payload), _GROUP.decode(payload)))
                everything.add_all_but_slots(log[-1][2])
            self._note_file(now, everything.counters)
            recovered = everything.folded(now)
            there = {record.number for record in recovered.scopes}
            for group, size, changes in log:
                # Not those of scopes that a later group has dropped.
                changes.slots = {
                    scope: slots for scope, slots in changes.slots.items() if scope in there
                }
                for scope, slots in changes.slots.items():
                    self._groups[scope].append(slots)
                self._note(group, size, changes)
            return recovered

    def rows(self, record: ScopeRecord) -> SlotColumns:
        """Read the blocks of a scope, and on them its groups."""
        with self._store_errors("read"):
            first = record.number << SCOPE_BITS
            found = self._database.execute(
                "SELECT place - ?, slots FROM blocks WHERE place >= ? AND place < ? ORDER BY place",
                (first, first, (record.number + 1) << SCOPE_BITS),
            )
            blocks = ((number, SlotColumns.decode(blob)) for number, blob in found)
            groups = self._groups.pop(record.number, [])
            return columns_of(record.geometry.slots, blocks, groups)

    def write(self, changes: Changes) -> None:
        """Add a row to the log."""
        group, payload = self._last_group + 1, _ENCODER.encode(changes)
        with self._store_errors("written"):
            self._database.execute("INSERT INTO log VALUES (?, ?)", (group, payload))
        self._note(group, len(payload), changes)
        self._count(len(payload))

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
            lambda place: SlotColumns.of(
                scope_of(place >> SCOPE_BITS), place & BLOCK_MASK
            ).encode(),
        )

    def compact(self, batch: CompactionBatch, now: float) -> None:
        """Write blocks in one transaction, and with the last of a window everything else of it."""
        try:
            with self._store_errors("written"), self._transaction():
                insert = "INSERT OR REPLACE INTO blocks VALUES (?, ?)"
                self._database.executemany(insert, batch.blocks)
                if batch.last_group:
                    self._compact_rest(batch.rest, now)
                    self._database.execute("DELETE FROM log WHERE id <= ?", (batch.last_group,))
        except BaseException:
            self._dirty.put_back(batch)
            raise
        self._log_bytes -= batch.log_bytes
        self._count(sum(len(blob) for _, blob in batch.blocks))

    def put_back(self, batch: CompactionBatch) -> None:
        """Queue the blocks of a batch again."""
        self._dirty.put_back(batch)

    def sizes(self) -> dict[str, int]:
        """Bytes of the database, and of SQLite's own log (`wal`)."""
        return {"database": _size(self._file), "wal": _size(f"{self._file}-wal")}

    def close(self) -> None:
        """Close the file: SQLite moves its own log into it, unless another program reads it."""
        try:
            self._executor.shutdown()
            self._database.close()
        finally:
            os.close(self.lock)

    # Implementation.

    def _snapshot(self) -> Changes:
        """Read all tables but log and blocks."""
        run = self._database.execute
        return Changes(
            scopes=[
                ScopeRecord(
                    row[0], ScopeGeometry(**dict(zip(_GEOMETRY, row[1:6], strict=True))), *row[6:]
                )
                for row in run("SELECT * FROM scopes")
            ],
            answers=[AnswerRecord(*row) for row in run("SELECT * FROM answers")],
            counters=dict(run("SELECT * FROM counters")),
        )

    def _note(self, group: int, size: int, changes: Changes) -> None:
        """Record a group that is in the log."""
        self._last_group = group
        self._log_bytes += size
        places = [
            (scope << SCOPE_BITS) + block
            for scope, slots in changes.slots.items()
            for block in changed_blocks(slots)
        ]
        self._dirty.mark(places, group, size, changes)

    def _note_file(self, now: float, counters: dict[str, int]) -> None:
        """Give no slot of a copy for some seconds: counters have the file that they were written in.

        Writers may hold leases that the original has given since the copy was made.
        """
        inode = _inode(self.lock)
        if counters.get(INODE) == inode:
            return
        until = counters.get(CLOSED_UNTIL, 0)
        if INODE in counters:
            until = math.ceil(now) + counters.get(LONGEST, 0)
            _LOG.warning("copied_store", store=self._file, closed_seconds=round(until - now))
        counters |= {INODE: inode, CLOSED_UNTIL: until}
        with self._transaction():
            self._put_counters([(INODE, inode), (CLOSED_UNTIL, until)])

    def _put_counters(self, counters: Iterable[tuple[str, int]]) -> None:
        self._database.executemany("INSERT OR REPLACE INTO counters VALUES (?, ?)", counters)

    @contextlib.contextmanager
    def _transaction(self) -> Generator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise

    def _count(self, size: int) -> None:
        self._since_checkpoint += size
        if self._since_checkpoint > CHECKPOINT_BYTES:
            self._since_checkpoint = 0
            self._executor.submit(_checkpoint, self._file)

    @contextlib.contextmanager
    def _store_errors(self, done: str) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, msgspec.DecodeError, ValueError) as error:
            raise StoreError(
                f"the store {self._file} cannot be {done}: {error}{_hint(error, self._file)}"
            ) from error

    def _compact_rest(self, changes: Changes, now: float) -> None:
        run, run_each = self._database.execute, self._database.executemany
        for one in changes.scopes:
            rest = (one.epoch, one.cleared_until, one.tenant, one.model)
            run(
                "INSERT OR REPLACE INTO scopes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (one.number, *structs.astuple(one.geometry), *rest),
            )
        # After the scopes: a group may have created and dropped a scope. Numbers are never reused.
        for number in changes.dropped:
            run("DELETE FROM scopes WHERE number = ?", (number,))
            run(
                "DELETE FROM blocks WHERE place >= ? AND place < ?",
                (number << SCOPE_BITS, (number + 1) << SCOPE_BITS),
            )
        self._put_counters(changes.counters.items())
        run("DELETE FROM answers WHERE until <= ?", (now,))
        run_each(
            "INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?, ?, ?)",
            # Without the scope, which is for several servers.
            [structs.astuple(one)[:-1] for one in changes.answers if one.until > now],
        )


def check_store(url: str) -> None:
    """Check that a server could open the store at `memory:` or `sqlite:///FILE`.

    Writes nothing, and takes no lock.

    Raises:
        ValueError: the address is not that of a store of one server.
        StoreError: the file could not be opened.
    """
    if url == MEMORY:
        return
    file = sqlite_file(url)
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


def _locked(file: str) -> int:
    """Open a store's file and lock it; returns the descriptor.

    The kernel releases the lock when the process ends. SQLite's own locks would keep backups out
    together with the second server.
    """
    # It stays open for longer than SQLite's descriptor of the file. When a process closes any one,
    # it loses all POSIX locks of the file, SQLite's among them; the next program that closes the
    # file then takes itself for the last one, and deletes the log that the server still writes.
    try:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise StoreError(f"cannot open {file}: {error.strerror}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise StoreError(
            f"another server has this store: `fuser {file}` names its process"
        ) from error
    return descriptor


def _inode(descriptor: int) -> int:
    """Return a file's inode number, mixed with its generation where the file system has one.

    A file that is copied to the place of a removed one usually gets the same number.
    """
    number, generation = os.fstat(descriptor).st_ino, b""
    with contextlib.suppress(OSError):
        generation = fcntl.ioctl(descriptor, _GET_VERSION, bytes(8))
    return (number ^ int.from_bytes(generation[:4], sys.byteorder) << 31) & (2**63 - 1)


def _open(file: str, durability: StoreDurability) -> sqlite3.Connection:
    with contextlib.ExitStack() as undo:
        # Used by one thread at a time, but not always by the same: the loop, or the store's.
        database = sqlite3.connect(
            file, isolation_level=None, check_same_thread=False, cached_statements=64
        )
        undo.callback(database.close)
        is_made = _check_schema(database)
        database.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        database.execute("PRAGMA journal_mode = WAL")
        # FULL syncs SQLite's own log at each commit, NORMAL before a checkpoint. Without a sync, a
        # loss of power takes whole transactions from its end.
        level = "FULL" if durability is StoreDurability.MACHINE else "NORMAL"
        database.execute(f"PRAGMA synchronous = {level}")
        database.execute(f"PRAGMA wal_autocheckpoint = {MAX_WAL_PAGES}")
        database.execute(f"PRAGMA journal_size_limit = {4 * CHECKPOINT_BYTES}")
        database.execute("PRAGMA cache_size = -16384")
        # Some builds turn it on, and then overwrite every deleted group and block with zeros first.
        database.execute("PRAGMA secure_delete = OFF")
        if not is_made:
            database.executescript(
                f"BEGIN; {TABLES} PRAGMA application_id = {APPLICATION}; PRAGMA user_version = "
                f"{VERSION}; COMMIT;"
            )
        undo.pop_all()
        return database


def _check_schema(database: sqlite3.Connection) -> bool:
    """Check that the database is ours; returns whether it has tables."""
    version = _scalar(database, "PRAGMA user_version")
    application = _scalar(database, "PRAGMA application_id")
    tables = _scalar(database, "SELECT count(*) FROM sqlite_master")
    if tables and application != APPLICATION:
        raise StoreError("this is a database of something else")
    if tables and version < VERSION:
        raise StoreError(
            f"it was written by an earlier version of this server (schema {version}; this one "
            f"needs {VERSION}): delete it, and the files whose names begin with its name; the cache "
            f"then begins empty"
        )
    if version > VERSION:
        raise StoreError(
            f"it was written by a later version of this server (schema {version}; this one knows "
            f"{VERSION})"
        )
    if sys.byteorder != "little":
        raise StoreError("a store's columns are those of little-endian machines")
    return bool(tables)


def _scalar(database: sqlite3.Connection, query: str) -> int:
    found: Sequence[int] = database.execute(query).fetchone()
    return found[0]


def _checkpoint(file: str) -> None:
    """Move SQLite's own log into the file, so that no request waits for the disk.

    Nothing depends on it but the length of that log.
    """
    # On a connection of its own: a connection runs one statement at a time.
    try:
        with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as database:
            # Writes go on meanwhile. The first pass moves nearly everything, and a later one
            # catches up with them, so that SQLite can begin its log anew.
            for _ in range(CHECKPOINT_PASSES):
                _, pages, moved = database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
                if pages == moved:
                    break
    except sqlite3.Error as error:
        # The changes are in SQLite's own log; if it finds no room any more, writes fail.
        _LOG.warning("checkpoint_failed", error=str(error))
