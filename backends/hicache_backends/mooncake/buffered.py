"""Reads pages by way of buffers of the driver's own, so that a get ends at its deadline."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.crew import threads_for
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.reader import ReadOutcome, has_hung, is_late, note_faults, rounds
from hicache_backends.posix.buffers import Buffers
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead, checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.crew import Crew
    from hicache_backends.mooncake.reader import Answer, Ask
    from hicache_storage.objects import Call

    Item = tuple[ObjectRead, str]
    """A read, and its object's name."""

MOST_BUFFERS: Final = 8
LOOKED_UP_BYTES: Final = 512 << 20
"""Of objects that are looked up together: their leases, of 5 s if the master says nothing else, are to last until all have been read."""
PORTION_OBJECTS: Final = 16
"""Most objects that are asked for together: where a store hangs, each keeps its thread for the library's patience."""
PORTION_BYTES: Final = (1 << 20) + PORTION_OBJECTS * ENVELOPE_BYTES
"""Of objects that are asked for together. A cache has them still when they are copied."""
HELD_BYTES: Final = 1 << 20
"""Copied before it is asked again whether the caller still waits."""
LONG_COPY: Final = 128 << 10
"""Bytes of a copy during which other threads shall run; to let them in takes as long as shorter ones."""
NO_ENVELOPE: Final = bytes(ENVELOPE_BYTES)


class BufferedReader:
    """Into buffers of its own, and from there to the parts of the reads as long as their caller waits (rule GET-9).

    Objects are looked up first, and then come a few at a time over connections that stay. Regions of a buffer are used again and
    again, so that bytes are verified and copied while a cache still has them; beside what one thread copies, the others' transfers
    go on.

    Args:
        size: bytes of each buffer; an object fits into one.
        crew: for the other threads; whoever made it closes it.
    """

    def __init__(self, size: int, crew: Crew) -> None:
        self._crew = crew
        self._buffers = Buffers(size, MOST_BUFFERS)

    def read(self, connection: Connection, reads: Sequence[ObjectRead], call: Call) -> ReadOutcome:
        outcome = ReadOutcome()
        for some in rounds(reads, BLOCK_ENVELOPES, LOOKED_UP_BYTES):
            if call.expired():
                break
            with self._buffers.lend(call) as buffer:
                self._read(connection, some, buffer, outcome, call)
        return outcome

    def _read(
        self, connection: Connection, reads: Sequence[ObjectRead], buffer: memoryview, outcome: ReadOutcome, call: Call
    ) -> None:
        regions = _regions(buffer, max(read.namespace.object_bytes for read in reads))
        portions = _Portions(connection, len(regions[0]), call)
        names = names_of(reads)
        with connection.looked_up(names, call) as codes:
            portions.add_looked_up(list(zip(reads, names, codes, strict=True)))
            self._crew.share(portions.work, regions[: max(1, len(portions))])
        if portions.late:
            self._buffers.retire(buffer)
        outcome.arrived.update(portions.delivered)
        note_faults(connection, portions.answers, outcome)


class _Portions:
    """Objects that are read a few at a time, by as many threads as call `work`.

    Args:
        most: bytes of a portion.
    """

    def __init__(self, connection: Connection, most: int, call: Call) -> None:
        self._connection, self._most, self._call = connection, most, call
        self._left: deque[tuple[Ask, list[Item]]] = deque()
        self.delivered = list[ObjectRead]()
        self.answers: list[Answer] = []
        self.late = False
        """The library has given up a read, which may still arrive."""

    def __len__(self) -> int:
        return len(self._left)

    def add_looked_up(self, asked: Sequence[Answer]) -> None:
        """Objects that `Connection.looked_up` has answered 0 for are read so."""
        found = [(read, name) for read, name, code in asked if not code]
        self._add(self._connection.read_ranges, found, PORTION_OBJECTS, PORTION_BYTES)
        # These may be on a disk, from where only this way leads: by their names, all that have room.
        others = [(read, name) for read, name, code in asked if code == library.NO_REPLICA_IN_MEMORY]
        self._add(self._connection.read, others, len(others), self._most)
        self.answers += [item for item in asked if item[2] not in (0, library.NO_REPLICA_IN_MEMORY)]

    def work(self, region: memoryview) -> None:
        """Read and deliver portions through a region of memory until none is left."""
        while not (self.late or self._call.expired()):
            try:
                ask, items = self._left.popleft()
            except IndexError:
                return
            self._read(ask, items, region)

    def _add(self, ask: Ask, items: Sequence[Item], most: int, most_bytes: int) -> None:
        some: list[Item] = []
        size = 0
        for item in items:
            length = item[0].namespace.object_bytes
            if some and (len(some) == most or size + length > min(most_bytes, self._most)):
                self._left.append((ask, some))
                some, size = [], 0
            some.append(item)
            size += length
        if some:
            self._left.append((ask, some))

    def _read(self, ask: Ask, items: Sequence[Item], region: memoryview) -> None:
        sizes = [read.namespace.object_bytes for read, _ in items]
        starts = list(accumulate(sizes[:-1], initial=0))
        wholes = [region[start : start + size] for start, size in zip(starts, sizes, strict=True)]
        for whole in wholes:
            # Whatever was read here before is no envelope of this read.
            whole[-ENVELOPE_BYTES:] = NO_ENVELOPE
        base, began = address_of(region), time.monotonic()
        codes = ask([name for _, name in items], [[base + start] for start in starts], [[size] for size in sizes])
        if has_hung(codes, began):
            self._left.clear()
        if ask == self._connection.read and is_late(codes, began):
            self.late = True
        self.answers += [(*item, code) for item, code in zip(items, codes, strict=True)]
        self.delivered += _delivered(
            self._call,
            [(read, whole) for (read, _), whole, size, code in zip(items, wholes, sizes, codes, strict=True) if code == size],
        )


def _regions(buffer: memoryview, size: int) -> list[memoryview]:
    """Parts of a buffer for one thread each; an object of so many bytes fits into any of them."""
    count = min(threads_for(size), len(buffer) // size)
    step = len(buffer) // count
    return [buffer[start : start + step] for start in range(0, count * step, step)]


def _delivered(call: Call, came: Sequence[tuple[ObjectRead, memoryview]]) -> list[ObjectRead]:
    """Verify objects and copy them into place; those that were copied, as they are."""
    done, size = list[ObjectRead](), max((len(whole) for _, whole in came), default=1)
    some = max(1, HELD_BYTES // size)
    for start in range(0, len(came), some):
        with call.shield() as active:
            if not active:
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
