"""Reads into host memory: objects are scattered to their components and envelopes."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.threads import MAX_THREADS
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.memory import Block, Blocks
    from hicache_storage.objects import Call
    from hicache_storage.objects.thread_pool import ThreadPool

    ReadRequest = Callable[
        [Sequence[str], Sequence[Sequence[int]], Sequence[Sequence[int]]], list[int]
    ]
    """A method of `Connection` that reads objects, by name, to addresses."""
    ReadResult = tuple[ObjectRead, str, int]
    """A read, its object's name, and the length or code that the library returned."""


@dataclass(slots=True, eq=False)
class ReadOutcome:
    """Result of a batch of reads."""

    arrived: set[ObjectRead] = field(default_factory=set[ObjectRead])
    faults: list[Exception] = field(default_factory=list[Exception])


class Reader(Protocol):
    """Protocol of the two readers. Safe for many threads."""

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        """Fill the buffers of each read whose object has the right length.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        ...


class DirectReader:
    """Reader into host memory. Waits for hung reads (`hung_reads="waits"`).

    Args:
        thread_pool: for transfers over TCP; None for other protocols. Over TCP objects are looked
            up first: bytes of a read without lookup may arrive after the library has given it up,
            after `ABANDON_SECONDS` (rule GET-9).
    """

    def __init__(self, blocks: Blocks, thread_pool: ThreadPool | None) -> None:
        self._blocks = blocks
        self._thread_pool = thread_pool

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        outcome = ReadOutcome()
        for some in split_reads(reads, BLOCK_ENVELOPES):
            if call.expired():
                break
            with self._blocks.lend() as block:
                if self._thread_pool is None:
                    self._read_by_name(connection, some, block, outcome)
                else:
                    self._read_looked_up(connection, some, block, self._thread_pool, outcome, call)
        return outcome

    def _read_looked_up(
        self,
        connection: Connection,
        reads: Sequence[ObjectRead],
        block: Block,
        thread_pool: ThreadPool,
        outcome: ReadOutcome,
        call: Call,
    ) -> None:
        names = names_of(reads)
        with connection.looked_up(names, call) as codes:
            asked = list(zip(reads, names, codes, strict=True))
            left = deque(enumerate([item for item in asked if not item[2]]))
            results = [
                item for item in asked if item[2] and item[2] != library.NO_REPLICA_IN_MEMORY
            ]

            def work() -> None:
                # One by one: after a hung transfer no other one is begun.
                while not call.expired():
                    try:
                        at, (read, name, _code) = left.popleft()
                    except IndexError:
                        return
                    began = time.monotonic()
                    codes = _read_into(connection.read_ranges, [read], [name], block, at)
                    results.append((read, name, codes[0]))
                    if has_hung(codes, began):
                        left.clear()

            thread_pool.run([work] * min(MAX_THREADS, max(1, len(left))))
        _record(connection, results, outcome)
        # These may be on a disk, and the library reads disks only in requests by name.
        others = [read for read, _, code in asked if code == library.NO_REPLICA_IN_MEMORY]
        if others:
            self._read_by_name(connection, others, block, outcome)

    def _read_by_name(
        self,
        connection: Connection,
        reads: Sequence[ObjectRead],
        block: Block,
        outcome: ReadOutcome,
    ) -> None:
        names, began = names_of(reads), time.monotonic()
        codes = _read_into(connection.read, reads, names, block, 0)
        block.unsafe = is_late(codes, began)
        _record(connection, list(zip(reads, names, codes, strict=True)), outcome)


def _read_into(
    request: ReadRequest, reads: Sequence[ObjectRead], names: Sequence[str], block: Block, at: int
) -> list[int]:
    """Read objects into their buffers, and their envelopes through a block from index `at` on."""
    start, size = at * ENVELOPE_BYTES, len(reads) * ENVELOPE_BYTES
    # An envelope of an earlier read must not count as one that has arrived.
    block.view[start : start + size] = bytes(size)
    places = range(start, start + size, ENVELOPE_BYTES)
    codes = request(
        names,
        [
            [*map(address_of, read.buffers), block.address + place]
            for read, place in zip(reads, places, strict=True)
        ],
        [[*map(len, read.buffers), ENVELOPE_BYTES] for read in reads],
    )
    for read, place, code in zip(reads, places, codes, strict=True):
        if code == read.namespace.object_bytes:
            read.envelope = bytes(block.view[place : place + ENVELOPE_BYTES])
    return codes


def has_hung(codes: Sequence[int], began: float) -> bool:
    """True if a request that began at `began` ran into the transfer timeout."""
    return library.TRANSFER_FAILED in codes and library.has_hung(began)


def is_late(codes: Sequence[int], began: float) -> bool:
    """True if a request that began at `began` has abandoned transfers, which may still arrive."""
    return library.TRANSFER_FAILED in codes and time.monotonic() - began >= library.ABANDON_SECONDS


def _record(connection: Connection, results: Sequence[ReadResult], outcome: ReadOutcome) -> None:
    """Record the arrived reads, and the faults of others."""
    outcome.arrived.update(read for read, _, code in results if code == read.namespace.object_bytes)
    note_faults(connection, results, outcome)


def note_faults(
    connection: Connection, results: Sequence[ReadResult], outcome: ReadOutcome
) -> None:
    """Record faults, and mark reads of objects of another length as damaged."""
    doubtful: list[ReadResult] = []
    for read, name, code in results:
        if code == read.namespace.object_bytes:
            continue
        if code >= 0:
            read.damaged = True
        elif code in (library.TRANSFER_FAILED, library.INVALID_PARAMS):
            doubtful.append((read, name, code))
        elif code not in library.GONE:
            outcome.faults.append(_fault(code))
    outcome.faults += _transfer_faults(connection, doubtful)


def _transfer_faults(connection: Connection, doubtful: Sequence[ReadResult]) -> list[Exception]:
    """Distinguish damaged objects from failed transfers, for which the library has equal codes."""
    faults = list[Exception]()
    for number, (read, name, code) in enumerate(doubtful):
        try:
            length = connection.size(name)
        except StorageUnavailableError:
            length = library.RPC_FAILED
        if length in library.UNREACHABLE:
            # The other lengths are not requested: each request would take as long again.
            return faults + [_fault(code) for _, _, code in doubtful[number:]]
        read.damaged = length >= 0 and length != read.namespace.object_bytes
        if not read.damaged and length not in library.GONE:
            faults.append(_fault(code))
    return faults


def _fault(code: int) -> StorageUnavailableError:
    return StorageUnavailableError(f"an object cannot be read (code {code})")


def split_reads(
    reads: Sequence[ObjectRead], max_reads: int, max_bytes: int | None = None
) -> Iterator[list[ObjectRead]]:
    """Split reads into lists of distinct objects: the library has one destination for a name."""
    left: Sequence[ObjectRead] = reads
    while left:
        some, later, size = list[ObjectRead](), list[ObjectRead](), 0
        names = set[tuple[str, str]]()
        for read in left:
            name, length = (read.namespace.name, read.key), read.namespace.object_bytes
            if name in names:
                later.append(read)
                continue
            if len(some) == max_reads or (
                max_bytes is not None and some and size + length > max_bytes
            ):
                yield some
                some, names, size = [], set[tuple[str, str]](), 0
            some.append(read)
            names.add(name)
            size += length
        yield some
        left = later
