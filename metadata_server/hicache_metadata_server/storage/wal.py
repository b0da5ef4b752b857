"""The write-ahead log: files to which groups of changes are appended.

An appended group survives kill -9, and with fdatasync the loss of power. A crash during an append
leaves a torn record, which fails its checksum and ends the replay of its file.
docs/design/metadata-storage.md has the format.
"""

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
"""Begin of a file; the lineage of its database follows in 8 bytes."""
SEGMENT_BYTES: Final = 4 << 20
"""Length after which a new file is begun. Files are deleted as a whole."""
_HEAD: Final = struct.Struct("<QQQQ")
"""Head of a record: checksum of all that follows, number of the group, number of the group before,
length of the payload."""
_NUMBERS: Final = struct.Struct("<QQQ")


class _Segment(NamedTuple):
    file: Path
    first_group: int


class WriteAheadLog:
    """Files `FILE.log-NUMBER`; NUMBER is the first group that may be in the file.

    A record that is short or fails its checksum ends its file: it was never acknowledged, or the
    machine has lost it, and then later records do not count either. Not thread-safe, except for
    `delete_through`.
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
        self._size = 0
        self._last_group = 0

    @property
    def is_empty(self) -> bool:
        """True if there is no file."""
        return not self._segments

    def groups(self, after: int) -> Iterator[tuple[int, bytes]]:
        """Yield the groups with numbers greater than `after`, in ascending order.

        Raises:
            ValueError: a file is no log, or the log of another database.
        """
        for segment in list(self._segments):
            content = memoryview(segment.file.read_bytes())
            place = len(self._head)
            if len(content) < place and self._head.startswith(content):
                # A crash came between the creation of the file and its head.
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
                    # The group before this one is lost, and this one may depend on it.
                    return
                place = found.end
                if found.group > after:
                    after = found.group
                    yield found.group, found.payload

    def append(self, group: int, payload: bytes) -> None:
        """Append a group, whose number is greater than all before.

        Raises:
            OSError: the group is not in the log.
        """
        if self._descriptor < 0 or self._size >= SEGMENT_BYTES:
            self._begin(group)
        # The number of the group before lets a replay notice a lost file between two others.
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
        """Delete the files that have no group after this one. May run while a thread appends."""
        # The newest file stays: a thread may be appending to it.
        while len(self._segments) > 1 and self._segments[1].first_group <= group + 1:
            self._segments[0].file.unlink(missing_ok=True)
            self._segments.popleft()

    def delete_all(self) -> None:
        """Delete all files; the next group follows none."""
        self.close()
        while self._segments:
            self._segments.popleft().file.unlink(missing_ok=True)
        self._last_group = 0

    def size(self) -> int:
        """Bytes of all files."""
        size = 0
        # A checkpoint in another thread may delete files meanwhile.
        for segment in list(self._segments):
            with contextlib.suppress(FileNotFoundError):
                size += segment.file.stat().st_size
        return size

    def close(self) -> None:
        """Close the current file."""
        descriptor = self._descriptor
        self._descriptor = -1
        if descriptor >= 0:
            os.close(descriptor)

    def _begin(self, group: int) -> None:
        self.close()
        file = self._base.with_name(self._name(f"{group:016x}"))
        # Truncated: a file of this name has at most a group that failed, or a torn one.
        self._descriptor = os.open(
            file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o644
        )
        if not self._segments or self._segments[-1].file != file:
            self._segments.append(_Segment(file, group))
        try:
            self._size = self._put(self._head)
            # Without its name in the directory, a synced file is lost with power.
            if self._synchronous:
                sync_directory(file.parent)
        except OSError:
            self.close()
            raise

    def _put(self, content: bytes) -> int:
        """Write all of `content`, or raise."""
        written = os.write(self._descriptor, content)
        if written < len(content):
            raise OSError(errno.ENOSPC, "No space left for the log")
        return written

    def _discard_partial_record(self) -> None:
        """Remove a torn record, behind which a replay would find nothing; else begin a new file."""
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
