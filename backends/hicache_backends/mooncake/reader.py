"""Reads of pages: over TCP by store, elsewhere by name."""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeVar

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.stores import (
    MAX_HUNG,
    POOL_THREADS,
    UNKNOWN,
    Requests,
    split,
)
from hicache_backends.posix.buffers import Buffers
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead, checksum
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from contextlib import AbstractContextManager

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.memory import Block, Blocks
    from hicache_storage.objects import Call
    from hicache_storage.objects.thread_pool import ThreadPool
    from hicache_storage.spec import CancellationToken

MemoryT = TypeVar("MemoryT")

MAX_LOOKUP_BYTES: Final = 512 << 20
"""Objects looked up together: their leases, 5 s by default, must last until all are read."""
CHUNK_OBJECTS: Final = 16
"""Objects in one request. With a store that hangs, each delays its thread for a timeout."""
CHUNK_BYTES: Final = (1 << 20) + CHUNK_OBJECTS * ENVELOPE_BYTES
"""Bytes of one request. They are still in the CPU cache when they are copied."""
COPY_BYTES: Final = 1 << 20
"""Bytes copied between two checks whether the caller still waits."""
LONG_COPY_BYTES: Final = 128 << 10
"""Copies of this length and longer release the GIL. For shorter ones that takes too long."""
NO_ENVELOPE: Final = bytes(ENVELOPE_BYTES)
ON_DISK: Final = " on a disk"
"""In place of the endpoint of a store."""


class ReadResult(NamedTuple):
    """A read, its object's name, and the length or code that the library has returned."""

    read: ObjectRead
    name: str
    code: int


@dataclass(slots=True, eq=False)
class ReadOutcome:
    """Result of a batch of reads."""

    arrived: set[ObjectRead] = field(default_factory=set[ObjectRead])
    faults: list[Exception] = field(default_factory=list[Exception])


class PageReader:
    """Reader of pages. Safe for many threads.

    Over TCP objects are looked up first, and what is asked of one request lies on one store. Bytes
    of a read by name may arrive after the library has given it up, after `ABANDON_SECONDS` (rule
    GET-9).

    Args:
        target: where objects arrive.
        thread_pool: the reader does not close it.
        hold: keeps the connection open, for threads whose call may have left.
        by_name: read without a lookup.
    """

    def __init__(
        self,
        target: Target[Any],
        thread_pool: ThreadPool,
        hold: AbstractContextManager[object],
        *,
        by_name: bool = False,
    ) -> None:
        self._target = target
        self._thread_pool = thread_pool
        self._hold = hold
        self._by_name = by_name

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        """Fill the buffers of each read whose object has the right length.

        Raises:
            StorageUnavailableError: the master does not answer.
        """
        outcome = ReadOutcome()
        for some in split_reads(reads, BLOCK_ENVELOPES, MAX_LOOKUP_BYTES):
            if call.expired():
                break
            results = self._read(connection, some, outcome, call)
            # The lease has been outlived, or a later lookup has failed.
            again = [result.read for result in results if result.code in library.LOOK_UP_AGAIN]
            if again and not call.expired():
                results = [one for one in results if one.code not in library.LOOK_UP_AGAIN]
                results += self._read(connection, again, outcome, call)
            _record(connection, results, outcome)
        return outcome

    def _read(
        self, connection: Connection, reads: Sequence[ObjectRead], outcome: ReadOutcome, call: Call
    ) -> list[ReadResult]:
        """Look objects up, and read those whose stores answer."""
        names = names_of(reads)
        unknown = nullcontext([library.NO_REPLICA_IN_MEMORY] * len(names))
        with unknown if self._by_name else connection.looked_up(names) as codes:
            asked = list(map(ReadResult, reads, names, codes))
            results = [one for one in asked if one.code not in (0, library.NO_REPLICA_IN_MEMORY)]

            def send(items: list[ReadResult], memory: object) -> bool | None:
                with connection.kept([one.name for one in items]):
                    came = self._target.read(connection, items, memory, shield)
                results.extend(came)
                if any(one.code == library.TRANSFER_FAILED for one in came):
                    return True
                return False if any(one.code >= 0 for one in came) else None

            requests = Requests(
                self._thread_pool,
                connection.stores,
                call,
                hold=self._hold,
                lend=partial(self._target.lend, call),
                send=send,
                size_of=_size,
                leaves=self._target.leaves,
            )
            shield = partial(_shield, requests.token, call)
            for store, found in self._by_store(connection, asked).items():
                if not connection.stores.is_out(store):
                    some = split(found, _size, self._target.max_bytes, self._target.max_objects)
                    requests.add(UNKNOWN if store == ON_DISK else store, some)
                elif connection.stores.try_again(store):
                    self._thread_pool.run_in_background(
                        partial(self._try_again, connection, store, found[0].name)
                    )
            requests.run()
        if requests.late:
            outcome.faults.append(StorageTimeoutError("a store has not answered in time"))
        # A copy: threads that the call has left go on.
        return list(results)

    def _by_store(
        self, connection: Connection, asked: Sequence[ReadResult]
    ) -> dict[str, list[ReadResult]]:
        places = connection.places([one.name for one in asked if not one.code])
        by_store: dict[str, list[ReadResult]] = {}
        for one in asked:
            if not one.code and (not places or one.name in places):
                store = places.get(one.name, UNKNOWN)
            elif one.code == library.NO_REPLICA_IN_MEMORY:
                store = ON_DISK
            else:
                # Not found, or gone since the lookup: as when the master drops a store.
                continue
            by_store.setdefault(store, []).append(one)
        return by_store

    def _try_again(self, connection: Connection, store: str, name: str) -> None:
        """Read the beginning of an object, to find out whether its store answers."""
        token, failed = connection.stores.begin(store, 0), True
        try:
            with self._hold:
                failed = not connection.can_read(name)
        finally:
            connection.stores.end(store, token, failed=failed)


class Target(Protocol[MemoryT]):
    """Where objects arrive that a `PageReader` reads."""

    max_objects: int
    """In one request."""
    max_bytes: int
    """Of one request for several objects."""
    leaves: bool
    """The call leaves reads that hang."""

    def lend(self, call: Call) -> AbstractContextManager[MemoryT]:
        """Lend memory for the reads of one thread."""
        ...

    def read(
        self,
        connection: Connection,
        items: Sequence[ReadResult],
        memory: MemoryT,
        shield: Callable[[], AbstractContextManager[bool]],
    ) -> list[ReadResult]:
        """Read looked up objects of one store, and deliver them while `shield` is active.

        Returns the results of those that were delivered, or have failed.
        """
        ...


class PoolTarget:
    """Host memory, straight. A call waits for hung reads (`hung_reads="wait"`).

    Args:
        max_objects: 1 over TCP, where transfers run one after the other: after one that hangs no
            other is begun.
    """

    leaves = False

    def __init__(self, blocks: Blocks, max_objects: int) -> None:
        self._blocks = blocks
        self.max_objects = max_objects
        self.max_bytes = sys.maxsize

    def lend(self, call: Call) -> AbstractContextManager[Block]:
        return self._blocks.lend()

    def read(
        self,
        connection: Connection,
        items: Sequence[ReadResult],
        memory: Block,
        shield: Callable[[], AbstractContextManager[bool]],
    ) -> list[ReadResult]:
        return _read_into_pool(connection, items, memory)


class BufferTarget:
    """Bounce buffers, from which objects are copied while the caller waits (rule GET-9).

    A buffer is used again for the thread's next request, so that bytes are verified and copied
    while they are in the CPU cache. While one thread copies, the transfers of others go on.

    Args:
        size: of each buffer in bytes; must hold one object.
    """

    max_objects = CHUNK_OBJECTS
    leaves = True

    def __init__(self, size: int) -> None:
        self.max_bytes = min(size, CHUNK_BYTES)
        self._buffers = Buffers(size, POOL_THREADS + MAX_HUNG)

    def lend(self, call: Call) -> AbstractContextManager[memoryview]:
        return self._buffers.lend(call)

    def read(
        self,
        connection: Connection,
        items: Sequence[ReadResult],
        memory: memoryview,
        shield: Callable[[], AbstractContextManager[bool]],
    ) -> list[ReadResult]:
        sizes = [item.read.namespace.object_bytes for item in items]
        starts = list(accumulate(sizes[:-1], initial=0))
        wholes = [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        for whole in wholes:
            # The buffer may hold an envelope of an earlier read.
            whole[-ENVELOPE_BYTES:] = NO_ENVELOPE
        base = address_of(memory)
        codes, late = _request(
            connection, items, [[base + start] for start in starts], [[size] for size in sizes]
        )
        if late:
            self._buffers.retire(memory)
        came = list[ReadResult]()
        arrived = list[tuple[ReadResult, memoryview]]()
        for item, whole, size, code in zip(items, wholes, sizes, codes, strict=True):
            result = ReadResult(item.read, item.name, code)
            if code == size:
                arrived.append((result, whole))
            else:
                came.append(result)
        return came + _delivered(shield, arrived)


def _request(
    connection: Connection,
    items: Sequence[ReadResult],
    addresses: Sequence[Sequence[int]],
    sizes: Sequence[Sequence[int]],
) -> tuple[list[int], bool]:
    """Read objects of one store to their addresses.

    Returns:
        Lengths or codes, and whether bytes of failed reads may arrive later.
    """
    names, by_name = [item.name for item in items], bool(items[0].code)
    began = time.monotonic()
    # The library reads disks only in requests by name.
    codes = (connection.read if by_name else connection.read_ranges)(names, addresses, sizes)
    abandoned = time.monotonic() - began >= library.ABANDON_SECONDS
    return codes, by_name and abandoned and library.TRANSFER_FAILED in codes


def _read_into_pool(
    connection: Connection, items: Sequence[ReadResult], block: Block
) -> list[ReadResult]:
    """Read objects into host memory, and their envelopes through a block."""
    size = len(items) * ENVELOPE_BYTES
    # An envelope of an earlier read must not count as one that has arrived.
    block.view[:size] = bytes(size)
    places = range(0, size, ENVELOPE_BYTES)
    codes, late = _request(
        connection,
        items,
        [
            [*map(address_of, item.read.buffers), block.address + place]
            for item, place in zip(items, places, strict=True)
        ],
        [[*map(len, item.read.buffers), ENVELOPE_BYTES] for item in items],
    )
    block.unsafe |= late
    for item, place, code in zip(items, places, codes, strict=True):
        if code == item.read.namespace.object_bytes:
            item.read.envelope = bytes(block.view[place : place + ENVELOPE_BYTES])
    return [ReadResult(item.read, item.name, code) for item, code in zip(items, codes, strict=True)]


def _size(item: ReadResult) -> int:
    return item.read.namespace.object_bytes


@contextmanager
def _shield(token: CancellationToken, call: Call) -> Generator[bool]:
    """Make a cancellation of the call, and its leaving, wait for a block that copies."""
    with token.shield() as waits, call.shield() as active:
        yield waits and active


def _delivered(
    shield: Callable[[], AbstractContextManager[bool]],
    arrived: Sequence[tuple[ReadResult, memoryview]],
) -> list[ReadResult]:
    """Verify objects and copy them to host memory. Returns the copied ones."""
    done, size = list[ReadResult](), max((len(whole) for _, whole in arrived), default=1)
    some = max(1, COPY_BYTES // size)
    for start in range(0, len(arrived), some):
        with shield() as active:
            if not active:
                break
            for result, whole in arrived[start : start + some]:
                _deliver(result.read, whole)
                done.append(result)
    return done


def _deliver(read: ObjectRead, whole: memoryview) -> None:
    # Before the copy, which then finds the bytes in the CPU cache.
    computed = checksum([whole[:-ENVELOPE_BYTES]]) if read.verifies_checksum else None
    start = 0
    for part in read.buffers:
        length = len(part)
        end = start + length
        if length >= LONG_COPY_BYTES:
            # ctypes releases the GIL during the call.
            ctypes.memmove(address_of(part), address_of(whole[start:end]), length)
        else:
            part[:] = whole[start:end]
        start = end
    read.envelope = bytes(whole[start:])
    read.verify(computed)


def _record(connection: Connection, results: Sequence[ReadResult], outcome: ReadOutcome) -> None:
    """Record arrived reads and faults, and mark reads of objects of another length as damaged."""
    doubtful: list[ReadResult] = []
    for result in results:
        read, _, code = result
        if code == read.namespace.object_bytes:
            outcome.arrived.add(read)
        elif code >= 0:
            read.damaged = True
        elif code in (library.TRANSFER_FAILED, library.INVALID_PARAMS):
            doubtful.append(result)
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
