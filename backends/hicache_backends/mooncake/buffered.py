"""Reads through bounce buffers, so that a get ends at its deadline."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.reader import (
    ReadOutcome,
    has_hung,
    is_late,
    note_faults,
    split_reads,
)
from hicache_backends.mooncake.threads import MAX_THREADS
from hicache_backends.posix.buffers import Buffers
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead, checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.reader import ReadRequest, ReadResult
    from hicache_storage.objects import Call
    from hicache_storage.objects.thread_pool import ThreadPool

    Item = tuple[ObjectRead, str]
    """A read, and its object's name."""

MAX_BUFFERS: Final = 8
MAX_LOOKUP_BYTES: Final = 512 << 20
"""Objects looked up together: their leases, 5 s by default, must last until all are read."""
CHUNK_OBJECTS: Final = 16
"""Objects in one request. With a hung store, each delays its thread for a transfer timeout."""
CHUNK_BYTES: Final = (1 << 20) + CHUNK_OBJECTS * ENVELOPE_BYTES
"""Bytes of one request. They are still in the CPU cache when they are copied."""
COPY_BYTES: Final = 1 << 20
"""Bytes copied between two checks whether the caller still waits."""
LONG_COPY_BYTES: Final = 128 << 10
"""Copies of this length and longer release the GIL. For shorter ones that takes too long."""
NO_ENVELOPE: Final = bytes(ENVELOPE_BYTES)


class BufferedReader:
    """Reader into bounce buffers. Copies to host memory while the caller waits (rule GET-9).

    Objects are looked up first, and then read a few at a time over open connections. Regions of a
    buffer are reused, so that bytes are verified and copied while they are in the CPU cache. While
    one thread copies, the transfers of others go on.

    Args:
        size: of each buffer in bytes; must hold one object.
        thread_pool: for further threads. The reader does not close it.
    """

    def __init__(self, size: int, thread_pool: ThreadPool) -> None:
        self._thread_pool = thread_pool
        self._buffers = Buffers(size, MAX_BUFFERS)

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        outcome = ReadOutcome()
        for some in split_reads(reads, BLOCK_ENVELOPES, MAX_LOOKUP_BYTES):
            if call.expired():
                break
            with self._buffers.lend(call) as buffer:
                self._read(connection, some, buffer, outcome, call)
        return outcome

    def _read(
        self,
        connection: Connection,
        reads: Sequence[ObjectRead],
        buffer: memoryview,
        outcome: ReadOutcome,
        call: Call,
    ) -> None:
        regions = _regions(buffer, max(read.namespace.object_bytes for read in reads))
        chunks = _ChunkQueue(connection, len(regions[0]), call)
        names = names_of(reads)
        with connection.looked_up(names, call) as codes:
            chunks.add_looked_up(list(zip(reads, names, codes, strict=True)))
            # More threads than chunks would find nothing to do.
            self._thread_pool.run(
                [partial(chunks.work, region) for region in regions[: max(1, len(chunks))]]
            )
        # Bytes of a read that was given up may still arrive there (rule GET-9).
        if chunks.late:
            self._buffers.retire(buffer)
        outcome.arrived.update(chunks.delivered)
        note_faults(connection, chunks.results, outcome)


class _ChunkQueue:
    """A queue of chunks, each a few objects, for the threads that call `work`.

    Args:
        max_bytes: of a chunk.
    """

    def __init__(self, connection: Connection, max_bytes: int, call: Call) -> None:
        self._connection = connection
        self._max_bytes = max_bytes
        self._call = call
        self._left: deque[tuple[ReadRequest, list[Item]]] = deque()
        self.delivered = list[ObjectRead]()
        self.results: list[ReadResult] = []
        self.late = False
        """The library has given up a read, whose bytes may still arrive."""

    def __len__(self) -> int:
        return len(self._left)

    def add_looked_up(self, asked: Sequence[ReadResult]) -> None:
        """Queue the objects that `Connection.looked_up` has found."""
        found = [(read, name) for read, name, code in asked if not code]
        self._add(self._connection.read_ranges, found, CHUNK_OBJECTS, CHUNK_BYTES)
        # These may be on a disk, and the library reads disks only in requests by name.
        others = [
            (read, name) for read, name, code in asked if code == library.NO_REPLICA_IN_MEMORY
        ]
        self._add(self._connection.read, others, len(others), self._max_bytes)
        self.results += [item for item in asked if item[2] not in (0, library.NO_REPLICA_IN_MEMORY)]

    def work(self, region: memoryview) -> None:
        """Read and deliver chunks through a region of memory until the queue is empty."""
        while not (self.late or self._call.expired()):
            try:
                request, items = self._left.popleft()
            except IndexError:
                return
            self._read(request, items, region)

    def _add(
        self, request: ReadRequest, items: Sequence[Item], max_items: int, max_bytes: int
    ) -> None:
        some: list[Item] = []
        size = 0
        for item in items:
            length = item[0].namespace.object_bytes
            if some and (len(some) == max_items or size + length > min(max_bytes, self._max_bytes)):
                self._left.append((request, some))
                some, size = [], 0
            some.append(item)
            size += length
        if some:
            self._left.append((request, some))

    def _read(self, request: ReadRequest, items: Sequence[Item], region: memoryview) -> None:
        sizes = [read.namespace.object_bytes for read, _ in items]
        starts = list(accumulate(sizes[:-1], initial=0))
        wholes = [region[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        for whole in wholes:
            # The region may hold an envelope of an earlier read.
            whole[-ENVELOPE_BYTES:] = NO_ENVELOPE
        base, began = address_of(region), time.monotonic()
        codes = request(
            [name for _, name in items],
            [[base + start] for start in starts],
            [[size] for size in sizes],
        )
        # Each of the others would take a transfer timeout, too.
        if has_hung(codes, began):
            self._left.clear()
        if request == self._connection.read and is_late(codes, began):
            self.late = True
        self.results += [(*item, code) for item, code in zip(items, codes, strict=True)]
        self.delivered += _delivered(
            self._call,
            [
                (read, whole)
                for (read, _), whole, size, code in zip(items, wholes, sizes, codes, strict=True)
                if code == size
            ],
        )


def _regions(buffer: memoryview, size: int) -> list[memoryview]:
    """Divide a buffer into regions, one for each thread. Each holds an object of `size` bytes."""
    count = min(MAX_THREADS, len(buffer) // size)
    step = len(buffer) // count
    return [buffer[start : start + step] for start in range(0, count * step, step)]


def _delivered(call: Call, came: Sequence[tuple[ObjectRead, memoryview]]) -> list[ObjectRead]:
    """Verify objects and copy them to host memory. Returns the copied ones."""
    done, size = list[ObjectRead](), max((len(whole) for _, whole in came), default=1)
    some = max(1, COPY_BYTES // size)
    for start in range(0, len(came), some):
        with call.shield() as active:
            if not active:
                break
            for read, whole in came[start : start + some]:
                _deliver(read, whole)
                done.append(read)
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
