"""Backup file: a snapshot with a header, a footer and a checksum for each record.

It is written to a temporary file and then renamed, and verified as a whole before a part of it is
used.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.backup.frames import (
    BackupFooter,
    BackupHeader,
    FrameReader,
    FrameWriter,
    part_of,
)
from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.snapshot_parts import Counters, Tally
from hicache_metadata_server.storage.fsync import sync_directory

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from pathlib import Path

    from hicache_metadata_server.core.snapshot_parts import SnapshotPart

MAGIC: Final = b"HiCache metadata snapshot 1\n"
MODE: Final = 0o600
"""Readable by its owner only: keys reveal which prompts share a prefix."""


def write_backup(path: Path, origin: BackupHeader, parts: Iterable[SnapshotPart]) -> Tally:
    """Write a file; replace an existing one once the new one is on the disk.

    Raises:
        OSError: the file cannot be written; no part of it remains.
    """
    # In the same directory: a rename to another file system would not be atomic. Drawn, for another
    # backup may be writing to the same file.
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        tally = _write(temporary, origin, parts)
        temporary.rename(path)
    except BaseException:
        # Also on Ctrl-C: a part that stays looks like a backup, and may fill the disk.
        temporary.unlink(missing_ok=True)
        raise
    # The rename itself is durable only when its directory is.
    sync_directory(path.parent)
    return tally


class BackupFile:
    """A complete backup file, verified by reading all of it.

    Raises:
        SnapshotError: the file is cut short, damaged, or no backup.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tally = Tally()
        self.counters = Counters()
        with self._opened() as reader:
            origin = reader.read()
            if not isinstance(origin, BackupHeader):
                raise SnapshotError(f"{path} does not begin with a header")
            self.origin = origin
            # Read to the end before anybody uses a part: damage near the end must not be found
            # after half of a store is replaced.
            for part in self.tally.over(self._parts(reader)):
                if isinstance(part, Counters):
                    self.counters = part

    def parts(self) -> Iterator[SnapshotPart]:
        """Yield the parts; verify each record once more, since the file may have changed."""
        with self._opened() as reader:
            reader.read()
            yield from self._parts(reader)

    def _parts(self, reader: FrameReader) -> Iterator[SnapshotPart]:
        while not isinstance(record := reader.read(), BackupFooter):
            if record is None:
                raise SnapshotError(f"{self._path} is cut short after {self.tally.pages:,} pages")
            yield part_of(record)
        # Checksums are those of records. Two files in one, or records that the writer has left
        # out, only show here.
        if reader.read() is not None or (record.scopes, record.pages) != (
            len(self.tally.scopes),
            self.tally.pages,
        ):
            raise SnapshotError(f"{self._path} does not end as it was written")

    @contextmanager
    def _opened(self) -> Generator[FrameReader]:
        with self._path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise SnapshotError(
                    f"{self._path} is no backup of a metadata server, or one of another version"
                )
            try:
                yield FrameReader(file)
            except SnapshotError as error:
                raise SnapshotError(f"{self._path}: {error}") from error


def _write(path: Path, origin: BackupHeader, parts: Iterable[SnapshotPart]) -> Tally:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, MODE)
    with open(descriptor, "wb") as file:
        file.write(MAGIC)
        writer, tally = FrameWriter(file), Tally()
        writer.write(origin)
        for part in tally.over(parts):
            writer.write(part)
        writer.write(BackupFooter(len(tally.scopes), tally.pages))
        file.flush()
        os.fsync(descriptor)
    return tally
