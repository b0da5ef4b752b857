"""Groups of changes in files of their own, one behind the other: what was appended is kept, and
nothing else is changed_blocks for it."""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from hicache_metadata_server.storage.fsync import sync_directory

if TYPE_CHECKING:
    from collections.abc import Iterator

MAGIC: Final = b"HiCache metadata log 1\n\0"
"""A file begins with this and the lineage of its database in 8 bytes."""
SEGMENT_BYTES: Final = 4 << 20
"""A file is followed by a new one when it has grown beyond; it is deleted as a whole."""
_HEAD: Final = struct.Struct("<QQQQ")
"""Of a record: the checksum of all that follows, the number of the group, that of the group before,
and the bytes of the payload."""
_NUMBERS: Final = struct.Struct("<QQQ")


class _Segment(NamedTuple):
    file: Path
    first_group: int


class WriteAheadLog:
    """Files `FILE.log-NUMBER`, NUMBER being that of the first group that may be in it.

    A record that is cut short or does not fit its checksum ends its file: it was never
    acknowledged, or the machine has lost it, and then what came after does not count either. Not
    for several threads at once, but for `forget`.
    """

    def __init__(self, file: str, lineage: int, *, synchronous: bool) -> None:
        self._base = Path(file)
        self._head = MAGIC + lineage.to_bytes(8, "little")
        self._synchronous = synchronous
        self._segments = deque(
            _Segment(path, int(path.name.rpartition("-")[2], 16))
            for path in sorted(self._base.parent.glob(self._name("[0-9a-f]" * 16)))
        )
        self._descriptor = -1
        self._size = self._last_group = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is no file."""
        return not self._segments

    def groups(self, after: int) -> Iterator[tuple[int, bytes]]:
        """The groups that were appended with numbers greater than `after`, in ascending order.

        Raises:
            ValueError: one of the files is no log, or that of another database.
        """
        for segment in list(self._segments):
            content = memoryview(segment.file.read_bytes())
            place = len(self._head)
            if len(content) < place and self._head.startswith(content):
                # It was made and no more.
                continue
            if bytes(content[: len(MAGIC)]) != MAGIC:
                raise ValueError(f"{segment.file.name} is no log")
            if bytes(content[:place]) != self._head:
                raise ValueError(
                    f"{segment.file.name} is the log of another database: bring that back, or "
                    f"remove the log"
                )
            while (found := _record(content, place)) is not None:
                if found.follows > after:
                    # What is between them is lost.
                    return
                place = found.end
                if found.group > after:
                    after = found.group
                    yield found.group, found.payload

    def append(self, group: int, payload: bytes) -> None:
        """Keep a group, whose number is greater than all before.

        Raises:
            OSError: it is not kept.
        """
        if self._descriptor < 0 or self._size >= SEGMENT_BYTES:
            self._begin(group)
        rest = _NUMBERS.pack(group, self._last_group, len(payload)) + payload
        try:
            written = self._put(xxhash.xxh3_64_intdigest(rest).to_bytes(8, "little") + rest)
            if self._synchronous:
                os.fdatasync(self._descriptor)
        except OSError:
            self._discard_partial_record()
            raise
        self._size += written
        self._last_group = group

    def delete_through(self, group: int) -> None:
        """Delete the files all of whose groups are up to this one. May be called while another
        thread appends."""
        while len(self._segments) > 1 and self._segments[1].first_group <= group + 1:
            self._segments[0].file.unlink(missing_ok=True)
            self._segments.popleft()

    def delete_all(self) -> None:
        """Delete everything; what is appended next follows nothing."""
        self.close()
        while self._segments:
            self._segments.popleft().file.unlink(missing_ok=True)
        self._last_group = 0

    def size(self) -> int:
        """Size of all files."""
        size = 0
        # One that is deleted meanwhile is no longer of interest.
        for segment in list(self._segments):
            with contextlib.suppress(FileNotFoundError):
                size += segment.file.stat().st_size
        return size

    def close(self) -> None:
        """Let go of the file."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _begin(self, group: int) -> None:
        self.close()
        file = self._base.with_name(self._name(f"{group:016x}"))
        # One of that name has nothing in it that was acknowledged.
        self._descriptor = os.open(
            file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        if not self._segments or self._segments[-1].file != file:
            self._segments.append(_Segment(file, group))
        try:
            self._size = self._put(self._head)
            if self._synchronous:
                sync_directory(file.parent)
        except OSError:
            self.close()
            raise

    def _put(self, content: bytes) -> int:
        """All of it."""
        written = os.write(self._descriptor, content)
        if written < len(content):
            raise OSError(errno.ENOSPC, "No space left for the log")
        return written

    def _discard_partial_record(self) -> None:
        """What of a record was written is no record; if it cannot be taken away, the next goes into
        a new file."""
        try:
            os.ftruncate(self._descriptor, self._size)
        except OSError:
            self.close()

    def _name(self, number: str) -> str:
        return f"{self._base.name}.log-{number}"


class _Record(NamedTuple):
    group: int
    follows: int
    payload: bytes
    end: int


def _record(content: memoryview, place: int) -> _Record | None:
    if place + _HEAD.size > len(content):
        return None
    checksum, group, follows, length = _HEAD.unpack_from(content, place)
    end = place + _HEAD.size + length
    if end > len(content) or xxhash.xxh3_64_intdigest(content[place + 8 : end]) != checksum:
        return None
    return _Record(group, follows, bytes(content[place + _HEAD.size : end]), end)
