"""Record format of backup files: length, checksum, MessagePack payload."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec
import xxhash

from hicache_metadata_server.core.errors import SnapshotError
from hicache_metadata_server.core.snapshot_parts import Counters, EmptySlots, Pages, ScopeHeader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_metadata_server.core.snapshot_parts import SnapshotPart

_HEAD: Final = struct.Struct("<QQ")
"""Head of a record: bytes of the payload, and the checksum of its number and payload.

The number is part of the checksum, so that records that are lost, repeated or swapped are found.
"""
MAX_BYTES: Final = 256 << 20
"""Limit of a payload, far above every real one: a damaged length must not allocate memory."""


class BackupHeader(msgspec.Struct, frozen=True, tag="origin"):
    """The first record of a file."""

    source: str
    """Address of the store or server, without credentials."""
    created: float
    """Seconds since 1970."""
    online: bool
    """True if a server was running at the time."""


class BackupFooter(msgspec.Struct, frozen=True, tag="end"):
    """The last record of a file."""

    scopes: int
    pages: int


Record = BackupHeader | ScopeHeader | Pages | EmptySlots | Counters | BackupFooter
_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final[msgspec.msgpack.Decoder[Record]] = msgspec.msgpack.Decoder(Record)


class FrameWriter:
    """Appends records to a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._number = 0

    def write(self, record: Record) -> int:
        """Write one record; return its position in the file."""
        payload, place = _ENCODER.encode(record), self._file.tell()
        self._file.write(_HEAD.pack(len(payload), _checksum(self._number, payload)) + payload)
        self._number += 1
        return place


class FrameReader:
    """Reader of records, from the current position of a file, where record `number` begins."""

    def __init__(self, file: BinaryIO, number: int = 0) -> None:
        self._file = file
        self._number = number

    def __iter__(self) -> Iterator[Record]:
        """Yield all records.

        Raises:
            SnapshotError: a record is cut short, damaged, missing, or of an unknown kind.
        """
        while (record := self.read()) is not None:
            yield record

    def read(self) -> Record | None:
        """Return the next record; None at the end of the file.

        Raises:
            SnapshotError: the record is cut short, damaged, or of an unknown kind.
        """
        head = self._file.read(_HEAD.size)
        if not head:
            return None
        length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (MAX_BYTES + 1, 0)
        if length > MAX_BYTES:
            raise SnapshotError(f"record {self._number} is cut short or damaged")
        payload = self._file.read(length)
        if len(payload) < length or _checksum(self._number, payload) != checksum:
            raise SnapshotError(f"record {self._number} is cut short or damaged")
        try:
            record: Record = _DECODER.decode(payload)
        except msgspec.DecodeError as error:
            raise SnapshotError(
                f"record {self._number} is of a kind that this version does not know: {error}"
            ) from error
        self._number += 1
        return record


def part_of(record: Record) -> SnapshotPart:
    """Return a record as a part of the snapshot.

    Raises:
        SnapshotError: the record is a header or a footer.
    """
    if isinstance(record, (BackupHeader, BackupFooter)):
        raise SnapshotError("a header or a footer is in the middle of the backup")
    return record


def _checksum(number: int, payload: bytes) -> int:
    digest = xxhash.xxh3_64(number.to_bytes(8, "little"))
    digest.update(payload)
    return digest.intdigest()
