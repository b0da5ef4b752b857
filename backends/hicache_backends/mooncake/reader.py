"""Reads pages: one request of the library for many objects, each scattered to its components and its envelope."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.crew import threads_for
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.mooncake.names import names_of
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.crew import Crew
    from hicache_backends.mooncake.memory import Block, Blocks
    from hicache_storage.objects import Call

    Ask = Callable[[Sequence[str], Sequence[Sequence[int]], Sequence[Sequence[int]]], list[int]]
    """Reads objects, by their names, to addresses; lengths or codes are answered."""
    Answer = tuple[ObjectRead, str, int]
    """A read, its object's name, and the length or code that was answered."""


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
    """Straight into the parts of the reads. Waits for what it has begun (`hung_reads="wait"`).

    Args:
        crew: for other threads over TCP; None for other protocols. Over TCP objects are looked up first: what is read without that
            and given up by the library, after `GIVES_UP_SECONDS`, may still arrive (rule GET-9).
    """

    def __init__(self, blocks: Blocks, crew: Crew | None) -> None:
        self._blocks, self._crew = blocks, crew

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        outcome = ReadOutcome()
        for some in rounds(reads, BLOCK_ENVELOPES):
            if call.expired():
                break
            with self._blocks.lend() as block:
                if self._crew is None:
                    self._read_by_name(connection, some, block, outcome)
                else:
                    self._read_looked_up(connection, some, block, self._crew, outcome, call)
        return outcome

    def _read_looked_up(
        self, connection: Connection, reads: Sequence[ObjectRead], block: Block, crew: Crew, outcome: ReadOutcome, call: Call
    ) -> None:
        names = names_of(reads)
        with connection.looked_up(names, call) as codes:
            asked = list(zip(reads, names, codes, strict=True))
            left = deque(enumerate([item for item in asked if not item[2]]))
            answers = [item for item in asked if item[2] and item[2] != library.NO_REPLICA_IN_MEMORY]

            def work(_: int) -> None:
                # One by one: whoever waits for one that hangs waits for no others after it.
                while not call.expired():
                    try:
                        at, (read, name, _code) = left.popleft()
                    except IndexError:
                        return
                    began = time.monotonic()
                    codes = _ask(connection.read_ranges, [read], [name], block, at)
                    answers.append((read, name, codes[0]))
                    if has_hung(codes, began):
                        left.clear()

            largest = max(read.namespace.object_bytes for read in reads)
            crew.share(work, range(min(threads_for(largest), max(1, len(left)))))
        _sort(connection, answers, outcome)
        # These may be on a disk, from where only this way leads.
        others = [read for read, _, code in asked if code == library.NO_REPLICA_IN_MEMORY]
        if others:
            self._read_by_name(connection, others, block, outcome)

    def _read_by_name(self, connection: Connection, reads: Sequence[ObjectRead], block: Block, outcome: ReadOutcome) -> None:
        names, began = names_of(reads), time.monotonic()
        codes = _ask(connection.read, reads, names, block, 0)
        block.spoilt = is_late(codes, began)
        _sort(connection, list(zip(reads, names, codes, strict=True)), outcome)


def _ask(ask: Ask, reads: Sequence[ObjectRead], names: Sequence[str], block: Block, at: int) -> list[int]:
    """Read objects into their parts, the envelopes by way of a block, from the one at `at` on."""
    start, size = at * ENVELOPE_BYTES, len(reads) * ENVELOPE_BYTES
    # An envelope that stood here before must not pass for one that has arrived.
    block.view[start : start + size] = bytes(size)
    places = range(start, start + size, ENVELOPE_BYTES)
    codes = ask(
        names,
        [[*map(address_of, read.buffers), block.address + place] for read, place in zip(reads, places, strict=True)],
        [[*map(len, read.buffers), ENVELOPE_BYTES] for read in reads],
    )
    for read, place, code in zip(reads, places, codes, strict=True):
        if code == read.namespace.object_bytes:
            read.envelope = bytes(block.view[place : place + ENVELOPE_BYTES])
    return codes


def has_hung(codes: Sequence[int], began: float) -> bool:
    """Whether a request, begun at a time of `time.monotonic()`, has failed for want of an answer: others would take as long."""
    return library.TRANSFER_FAILED in codes and library.has_hung(began)


def is_late(codes: Sequence[int], began: float) -> bool:
    """Whether a request, begun at a time of `time.monotonic()`, has given up transfers that may still arrive."""
    return library.TRANSFER_FAILED in codes and time.monotonic() - began >= library.GIVES_UP_SECONDS


def _sort(connection: Connection, answers: Sequence[Answer], outcome: ReadOutcome) -> None:
    """Reads whose objects have arrived, and what has gone wrong with others."""
    outcome.arrived.update(read for read, _, code in answers if code == read.namespace.object_bytes)
    note_faults(connection, answers, outcome)


def note_faults(connection: Connection, answers: Sequence[Answer], outcome: ReadOutcome) -> None:
    """What has gone wrong; reads of objects of another length are told that they are damaged."""
    doubtful: list[Answer] = []
    for read, name, code in answers:
        if code == read.namespace.object_bytes:
            continue
        if code >= 0:
            read.damaged = True
        elif code in (library.TRANSFER_FAILED, library.INVALID_PARAMS):
            doubtful.append((read, name, code))
        elif code not in library.GONE:
            outcome.faults.append(_fault(code))
    outcome.faults += _failed(connection, doubtful)


def _failed(connection: Connection, doubtful: Sequence[Answer]) -> list[Exception]:
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
