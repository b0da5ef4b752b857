"""A snapshot in a file: written aside and then renamed, and verified as a whole before anything of
it is used."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.backup.frames import (
    BackupFooter,
    BackupHeader,
    FrameReader,
    FrameWriter,
    part_of,
)
from hicache_metadata_server.backup.parts import Counters, SnapshotError, Tally
from hicache_metadata_server.storage.fsync import sync_directory

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from pathlib import Path

    from hicache_metadata_server.backup.parts import SnapshotPart

MAGIC: Final = b"HiCache metadata snapshot 1\n"
MODE: Final = 0o600
"""Keys tell who has asked a model the same as somebody else."""


def write_backup(path: Path, origin: BackupHeader, parts: Iterable[SnapshotPart]) -> Tally:
    """Write a file; one that is there is replaced when the new one is on the disk.

    Raises:
        OSError: it cannot be written; nothing is left of it.
    """
    aside = path.with_name(f"{path.name}.part")
    try:
        tally = _write(aside, origin, parts)
        aside.rename(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)
    return tally


class BackupFile:
    """A file that was written whole: all of it is read to see that.

    Raises:
        SnapshotError: it is cut short, damaged, or something else.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tally = Tally()
        self.counters = Counters()
        with self._opened() as reader:
            origin = reader.read()
            if not isinstance(origin, BackupHeader):
                raise SnapshotError(f"{path} does not say where it comes from")
            self.origin = origin
            for part in self.tally.over(self._parts(reader)):
                if isinstance(part, Counters):
                    self.counters = part

    def parts(self) -> Iterator[SnapshotPart]:
        """The stream; each record is verified once more."""
        with self._opened() as reader:
            reader.read()
            yield from self._parts(reader)

    def _parts(self, reader: FrameReader) -> Iterator[SnapshotPart]:
        while not isinstance(record := reader.read(), BackupFooter):
            if record is None:
                raise SnapshotError(f"{self._path} is cut short after {self.tally.pages:,} pages")
            yield part_of(record)
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


def _write(aside: Path, origin: BackupHeader, parts: Iterable[SnapshotPart]) -> Tally:
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, MODE)
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
