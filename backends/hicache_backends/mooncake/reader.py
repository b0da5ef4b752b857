"""Reads pages: one request of the library for many objects, each scattered to its components and its envelope."""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Protocol

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.mooncake.names import names_of
from hicache_backends.posix.buffers import Buffers
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead, checksum
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.crew import Crew
    from hicache_backends.mooncake.memory import Blocks
    from hicache_storage.objects import Call

MOST_BUFFERS: Final = 8
PART_BYTES: Final = 128 << 10
"""Of an object that are asked for in one request: over TCP, 64 MiB were seen to come in 0.8 of the time that requests of 1 MiB take."""
HELD_BYTES: Final = 1 << 20
"""Copied before it is asked again whether the caller still waits."""
LONG_COPY: Final = 128 << 10
"""Bytes of a copy during which other threads shall run; to let them in takes as long as shorter ones."""
NO_ENVELOPE: Final = bytes(ENVELOPE_BYTES)


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
    """Straight into the parts of the reads. Waits for what it has begun (`stuck_reads="waits"`).

    Over TCP that is not enough for rule GET-9: a transfer that the library gives up, after `GIVES_UP_SECONDS`, may still arrive.
    """

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
        with self._blocks.lend() as block:
            # An envelope that stood here before must not pass for one that has arrived.
            block.view[: len(reads) * ENVELOPE_BYTES] = NO_ENVELOPE * len(reads)
            addresses = [[*map(address_of, read.buffers), block.address + at * ENVELOPE_BYTES] for at, read in enumerate(reads)]
            sizes = [[*map(len, read.buffers), ENVELOPE_BYTES] for read in reads]
            arrived, block.spoilt = _transfer(connection, reads, addresses, sizes, outcome)
            for at, read in enumerate(reads):
                if read in arrived:
                    read.envelope = bytes(block.view[at * ENVELOPE_BYTES : (at + 1) * ENVELOPE_BYTES])
        outcome.arrived |= arrived


class BufferedReader:
    """Into buffers of its own, and from there to the parts of the reads as long as their caller waits (rule GET-9).

    Args:
        size: bytes of each buffer; an object fits into one.
        crew: for the copies; whoever made it closes it.
    """

    def __init__(self, size: int, crew: Crew) -> None:
        self._size, self._crew = size, crew
        self._buffers = Buffers(size, MOST_BUFFERS)

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        outcome = ReadOutcome()
        for some in rounds(reads, BLOCK_ENVELOPES, self._size):
            if call.expired():
                break
            with self._buffers.lend(call) as buffer:
                self._read(connection, some, buffer, outcome, call)
        return outcome

    def _read(
        self, connection: Connection, reads: Sequence[ObjectRead], buffer: memoryview, outcome: ReadOutcome, call: Call
    ) -> None:
        sizes = [read.namespace.object_bytes for read in reads]
        starts = list(accumulate(sizes[:-1], initial=0))
        wholes = [buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        for whole in wholes:
            # As above: whatever was read here before is no envelope of this read.
            whole[-ENVELOPE_BYTES:] = NO_ENVELOPE
        base, parts = address_of(buffer), [_parts(size) for size in sizes]
        places = [[base + start + at for at in offsets] for start, (offsets, _) in zip(starts, parts, strict=True)]
        arrived, spoilt = _transfer(connection, reads, places, [lengths for _, lengths in parts], outcome)
        if spoilt:
            self._buffers.forsake(buffer)
        came = [pair for pair in zip(reads, wholes, strict=True) if pair[0] in arrived]
        outcome.arrived.update(*self._crew.share(partial(_delivered, call), came, max(sizes)))


@cache
def _parts(size: int) -> tuple[list[int], list[int]]:
    """Offsets and sizes of the requests for an object."""
    whole = max(0, size // PART_BYTES - 1)
    sizes = [*([PART_BYTES] * whole), size - PART_BYTES * whole]
    return list(accumulate(sizes[:-1], initial=0)), sizes


def _delivered(call: Call, came: Sequence[tuple[ObjectRead, memoryview]]) -> list[ObjectRead]:
    """Verify objects and copy them into place; those that were copied, as they are."""
    done, size = list[ObjectRead](), max((len(whole) for _, whole in came), default=1)
    some = max(1, HELD_BYTES // size)
    for start in range(0, len(came), some):
        with call.caller as waits:
            if not waits:
                break
            for read, whole in came[start : start + some]:
                _deliver(read, whole)
                done.append(read)
    return done


def _deliver(read: ObjectRead, whole: memoryview) -> None:
    # Before the copy, which finds the bytes in the cache then.
    computed = checksum([whole[:-ENVELOPE_BYTES]]) if read.verifies_checksum else None
    start = 0
    for part in read.buffers:
        length = len(part)
        end = start + length
        if length >= LONG_COPY:
            # Others may run meanwhile.
            ctypes.memmove(address_of(part), address_of(whole[start:end]), length)
        else:
            part[:] = whole[start:end]
        start = end
    read.envelope = bytes(whole[start:])
    read.verify(computed)


def _transfer(
    connection: Connection,
    reads: Sequence[ObjectRead],
    addresses: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
    outcome: ReadOutcome,
) -> tuple[set[ObjectRead], bool]:
    """Let objects be transferred; those that arrived, and whether others may still do so later."""
    names = names_of(reads)
    began = time.monotonic()
    codes = connection.read(names, addresses, sizes)
    late = library.TRANSFER_FAILED in codes and time.monotonic() - began >= library.GIVES_UP_SECONDS
    doubtful, arrived = list[tuple[ObjectRead, str, int]](), set[ObjectRead]()
    for read, name, code in zip(reads, names, codes, strict=True):
        if code == read.namespace.object_bytes:
            arrived.add(read)
        elif code >= 0:
            read.damaged = True
        elif code in (library.TRANSFER_FAILED, library.INVALID_PARAMS):
            doubtful.append((read, name, code))
        elif code not in library.GONE:
            outcome.faults.append(_fault(code))
    outcome.faults += _failed(connection, doubtful)
    return arrived, late


def _failed(connection: Connection, doubtful: Sequence[tuple[ObjectRead, str, int]]) -> list[Exception]:
    """Tell objects of another length, which are damaged, from transfers that failed: the library answers both with the same codes."""
    faults = list[Exception]()
    for number, (read, name, code) in enumerate(doubtful):
        try:
            length = connection.size(name)
        except StorageUnavailableError:
            length = library.RPC_FAILED
        if length in library.UNREACHABLE:
            # Nobody is asked for the others: each would take as long again.
            return faults + [_fault(code) for _, _, code in doubtful[number:]]
        read.damaged = length >= 0 and length != read.namespace.object_bytes
        if not read.damaged and length not in library.GONE:
            faults.append(_fault(code))
    return faults


def _fault(code: int) -> StorageUnavailableError:
    return StorageUnavailableError(f"an object cannot be read (code {code})")


def rounds(reads: Sequence[ObjectRead], most: int, most_bytes: int | None = None) -> Iterator[list[ObjectRead]]:
    """Lists of reads, each of distinct objects: the library fills one destination for each name."""
    left: Sequence[ObjectRead] = reads
    while left:
        some, later, size = list[ObjectRead](), list[ObjectRead](), 0
        names = set[tuple[str, str]]()
        for read in left:
            name, length = (read.namespace.name, read.key), read.namespace.object_bytes
            if name in names:
                later.append(read)
                continue
            if len(some) == most or (most_bytes is not None and some and size + length > most_bytes):
                yield some
                some, names, size = [], set[tuple[str, str]](), 0
            some.append(read)
            names.add(name)
            size += length
        yield some
        left = later
