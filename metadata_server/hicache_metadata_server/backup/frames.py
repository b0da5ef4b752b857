"""Parts as records of a file, each with its number and checksum."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, BinaryIO, Final

import msgspec
import xxhash

from hicache_metadata_server.backup.parts import (
    Counters,
    EmptySlots,
    Pages,
    ScopeHeader,
    SnapshotError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_metadata_server.backup.parts import SnapshotPart

_HEAD: Final = struct.Struct("<QQ")
"""Of a record: the bytes of the payload, and the checksum of its number in the file and the
payload."""
MAX_BYTES: Final = 256 << 20
"""Of a payload. None is as long; a length that is damaged may say so."""


class BackupHeader(msgspec.Struct, frozen=True, tag="origin"):
    """The first record of a file."""

    source: str
    """The store or the server, as it was named to who took the snapshot."""
    created: float
    """Seconds since 1970."""
    online: bool
    """Taken while a server served."""


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
        self._file, self._number = file, 0

    def write(self, record: Record) -> int:
        """One record; returns where in the file it begins."""
        payload, place = _ENCODER.encode(record), self._file.tell()
        self._file.write(_HEAD.pack(len(payload), _checksum(self._number, payload)) + payload)
        self._number += 1
        return place


class FrameReader:
    """Reads records from where a file stands, which is that of the record `number`."""

    def __init__(self, file: BinaryIO, number: int = 0) -> None:
        self._file, self._number = file, number

    def __iter__(self) -> Iterator[Record]:
        """Up to the end of the file.

        Raises:
            SnapshotError: a record is cut short, damaged, missing, or none.
        """
        while (record := self.read()) is not None:
            yield record

    def read(self) -> Record | None:
        """The next record; None at the end of the file.

        Raises:
            SnapshotError: it is cut short, damaged or none.
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
    """A record as a part of the stream.

    Raises:
        SnapshotError: it stands where a part must stand, and is none.
    """
    if isinstance(record, (BackupHeader, BackupFooter)):
        raise SnapshotError("the beginning or the end of a backup stands in its midst")
    return record


def _checksum(number: int, payload: bytes) -> int:
    digest = xxhash.xxh3_64(number.to_bytes(8, "little"))
    digest.update(payload)
    return digest.intdigest()
