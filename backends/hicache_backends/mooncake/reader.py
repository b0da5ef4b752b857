"""Reads pages: one request of the library for many objects, each scattered to its components and its envelope."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.posix.buffers import Buffers
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.memory import Blocks
    from hicache_storage.objects import Call

MOST_BUFFERS: Final = 8


@dataclass(slots=True, eq=False)
class ReadOutcome:
    """What has become of some reads."""

    arrived: set[ObjectRead] = field(default_factory=set[ObjectRead])
    faults: list[Exception] = field(default_factory=list[Exception])


class Reader(Protocol):
    """A way to read pages. Safe for many threads."""

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        """Fill the parts of each read whose object has the right length.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        ...


class DirectReader:
    """Straight into the parts of the reads. Waits for what it has begun (`stuck_reads="waits"`)."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        outcome = ReadOutcome()
        for some in rounds(reads, BLOCK_ENVELOPES):
            if call.expired():
                break
            self._read(connection, some, outcome)
        return outcome

    def _read(self, connection: Connection, reads: Sequence[ObjectRead], outcome: ReadOutcome) -> None:
        names = [read.namespace.object_name(read.key) for read in reads]
        with self._blocks.lend() as block:
            # An envelope that stood here before must not pass for one that has arrived.
            block.view[: len(reads) * ENVELOPE_BYTES] = bytes(len(reads) * ENVELOPE_BYTES)
            addresses = [[*map(address_of, read.buffers), block.address + at * ENVELOPE_BYTES] for at, read in enumerate(reads)]
            sizes = [[*map(len, read.buffers), ENVELOPE_BYTES] for read in reads]
            codes = connection.read(names, addresses, sizes)
            block.spoilt = settle(connection, reads, names, codes, outcome)
            for at, read in enumerate(reads):
                if read in outcome.arrived:
                    read.envelope = bytes(block.view[at * ENVELOPE_BYTES : (at + 1) * ENVELOPE_BYTES])


class BufferedReader:
    """Into buffers of its own, and from there to the parts of the reads as long as their caller waits (rule GET-9).

    Args:
        size: bytes of each buffer. A page that does not fit is a miss.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._buffers = Buffers(size, MOST_BUFFERS)

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        outcome = ReadOutcome()
        fitting = [read for read in reads if read.namespace.object_bytes <= self._size]
        if len(fitting) < len(reads):
            outcome.faults.append(StorageUnavailableError("a page is larger than the option 'buffer_size'"))
        for some in rounds(fitting, BLOCK_ENVELOPES, self._size):
            if call.expired():
                break
            with self._buffers.lend(call) as buffer:
                self._read(connection, some, buffer, outcome, call)
        return outcome

    def _read(
        self, connection: Connection, reads: Sequence[ObjectRead], buffer: memoryview, outcome: ReadOutcome, call: Call
    ) -> None:
        names = [read.namespace.object_name(read.key) for read in reads]
        places, end = list[int](), 0
        for read in reads:
            places.append(end)
            end += read.namespace.object_bytes
            # As above: whatever was read here before is no envelope of this read.
            buffer[end - ENVELOPE_BYTES : end] = bytes(ENVELOPE_BYTES)
        base = address_of(buffer)
        codes = connection.read(names, [[base + place] for place in places], [[read.namespace.object_bytes] for read in reads])
        own = ReadOutcome(faults=outcome.faults)
        settle(connection, reads, names, codes, own)
        for read, place in zip(reads, places, strict=True):
            if read in own.arrived and read.fill(buffer[place : place + read.namespace.object_bytes]):
                outcome.arrived.add(read)


def settle(
    connection: Connection, reads: Sequence[ObjectRead], names: Sequence[str], codes: Sequence[int], outcome: ReadOutcome
) -> bool:
    """Tell what arrived from what is missing, damaged, or a fault; whether a transfer has failed."""
    failed = False
    for read, name, code in zip(reads, names, codes, strict=True):
        if code == read.namespace.object_bytes:
            outcome.arrived.add(read)
        elif code >= 0:
            read.damaged = True
        elif code not in library.GONE:
            failed |= code == library.TRANSFER_FAILED
            # An object of another length is refused with the same codes as a transfer that fails.
            length = connection.size(name) if code in (library.TRANSFER_FAILED, library.INVALID_PARAMS) else code
            if length >= 0 and length != read.namespace.object_bytes:
                read.damaged = True
            elif length not in library.GONE:
                outcome.faults.append(StorageUnavailableError(f"an object cannot be read (code {code})"))
    return failed


def rounds(reads: Sequence[ObjectRead], most: int, most_bytes: int | None = None) -> Iterator[list[ObjectRead]]:
    """Lists of reads, each of distinct objects: the library fills one destination for each name."""
    left = list(reads)
    while left:
        some, names, size, later = list[ObjectRead](), set[tuple[str, str]](), 0, list[ObjectRead]()
        for read in left:
            name, length = (read.namespace.name, read.key), read.namespace.object_bytes
            if len(some) == most or name in names or (most_bytes is not None and some and size + length > most_bytes):
                later.append(read)
                continue
            some.append(read)
            names.add(name)
            size += length
        yield some
        left = later
