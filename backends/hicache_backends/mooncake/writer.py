"""Writes pages: objects are begun, the bytes of those that were not there gathered from the components and the envelope, and
then made visible."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.crew import MOST_THREADS, threads_for
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, Block, address_of
from hicache_backends.mooncake.names import names_of
from hicache_storage.objects import ENVELOPE_BYTES, ObjectWrite
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.crew import Crew
    from hicache_backends.mooncake.memory import Blocks
    from hicache_storage.objects import Call

MOST_OBJECTS: Final = BLOCK_ENVELOPES
"""In one request."""
GATHERED_BYTES: Final = 256 << 10
"""Objects up to here are copied together before they are sent: over TCP each part of an object costs a request of its own."""
PORTION_BYTES: Final = (512 << 10) + 8 * ENVELOPE_BYTES
"""Of objects that are transferred together over TCP, while another thread puts the next ones together."""
GATHER_BLOCK_BYTES: Final = MOST_THREADS * PORTION_BYTES
"""A portion for each thread."""
LARGEST_SHARE_BYTES: Final = 32 << 20
"""Of larger objects that one thread sends in a request. Smaller shares are slower; where a store hangs, each of their objects takes the library's patience."""
SHORTEST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.1


@dataclass(slots=True, eq=False)
class WriteOutcome:
    """What has become of some writes."""

    stored: set[ObjectWrite] = field(default_factory=set[ObjectWrite])
    faults: list[Exception] = field(default_factory=list[Exception])


@dataclass(slots=True, eq=False)
class _Object:
    """A write under its name."""

    write: ObjectWrite
    name: str


class PageWriter:
    """Writes pages. Safe for many threads.

    Args:
        copies: of each page.
        wait_seconds: how long for room, and for pages that somebody else is storing.
        gathers: send small objects in one part, and all of them in portions; blocks then have `GATHER_BLOCK_BYTES`.
        crew: for the second thread; whoever made it closes it.
    """

    def __init__(self, blocks: Blocks, copies: int, wait_seconds: float, crew: Crew, *, gathers: bool) -> None:
        self._blocks, self._wait_seconds, self._crew, self._gathers = blocks, wait_seconds, crew, gathers
        self._config = library.replicate_config(copies)

    def write(self, connection: Connection, writes: Sequence[ObjectWrite], call: Call) -> WriteOutcome:
        """Store pages, each by itself.

        Raises:
            StorageUnavailableError: the master does not answer, and nothing was stored.
        """
        outcome = WriteOutcome()
        until = time.monotonic() + self._wait_seconds
        for start in range(0, len(writes), MOST_OBJECTS):
            some = writes[start : start + MOST_OBJECTS]
            try:
                with self._blocks.lend() as block:
                    self._store(connection, some, block, until, outcome, call)
            except StorageUnavailableError as error:
                if not outcome.stored:
                    raise
                outcome.faults.append(error)
                break
        return outcome

    def _store(
        self,
        connection: Connection,
        writes: Sequence[ObjectWrite],
        block: Block,
        until: float,
        outcome: WriteOutcome,
        call: Call,
    ) -> None:
        whole = [write for write in writes if _is_whole(write)]
        if len(whole) < len(writes):
            outcome.faults.append(StorageUnavailableError("a page has another length than its namespace says"))
        left = [_Object(*item) for item in zip(whole, names_of(whole), strict=True)]
        replaced = [item.name for item in left if item.write.replaces]
        if replaced:
            connection.remove(replaced)
        pause = SHORTEST_PAUSE
        while left and not call.expired():
            left = self._pass(connection, left, block, outcome, call)
            seconds = call.remaining()
            if not left or time.monotonic() + pause > until or (seconds is not None and seconds < 2 * pause):
                return
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    def _is_gathered(self, write: ObjectWrite) -> bool:
        return self._gathers and write.namespace.object_bytes <= GATHERED_BYTES

    def _pass(
        self, connection: Connection, items: Sequence[_Object], block: Block, outcome: WriteOutcome, call: Call
    ) -> list[_Object]:
        """Store what can be stored now; what there may be room for, or an answer about, later."""
        connection.settle()
        sizes = [item.write.namespace.object_bytes for item in items]
        codes = connection.begin([item.name for item in items], sizes, self._config)
        begun, others, later = list[_Object](), list[_Object](), list[_Object]()
        for item, code in zip(items, codes, strict=True):
            if not code:
                begun.append(item)
            elif code in (library.EXISTS, library.INVALID_PARAMS):
                # There, or being written: by another process, or by a thread of this one.
                others.append(item)
            elif code in library.FULL:
                later.append(item)
            else:
                outcome.faults.append(StorageUnavailableError(f"an object cannot be stored (code {code})"))
        if begun:
            self._transfer(connection, begun, block, outcome, call)
        return later + _not_stored_by_others(connection, others, outcome)

    def _transfer(
        self, connection: Connection, begun: Sequence[_Object], block: Block, outcome: WriteOutcome, call: Call
    ) -> None:
        arrived = list[_Object]()
        published = False
        try:
            self._send(connection, begun, block, call, arrived, outcome)
            # All bytes have been read. A caller who has left may have been answered already (rule SET-8).
            if not call.expired():
                published = True
                self._publish(connection, arrived, outcome)
        finally:
            kept = set(arrived) if published else set[_Object]()
            given_up = [item.name for item in begun if item not in kept]
            if given_up:
                connection.withdraw(given_up)

    def _send(
        self,
        connection: Connection,
        items: Sequence[_Object],
        block: Block,
        call: Call,
        arrived: list[_Object],
        outcome: WriteOutcome,
    ) -> None:
        """Let the bytes of objects be transferred; those that have arrived are added."""
        left = deque(self._portions(items))

        def work(start: int) -> None:
            while not call.expired():
                try:
                    some = left.popleft()
                except IndexError:
                    return
                began = time.monotonic()
                done = self._send_portion(connection, some, block, start)
                arrived.extend(done)
                if len(done) < len(some):
                    if library.has_hung(began):
                        # The others would take as long.
                        left.clear()
                    outcome.faults.append(StorageUnavailableError("the bytes of an object did not reach the node that keeps it"))

        threads = threads_for(max(item.write.namespace.object_bytes for item in items))
        self._crew.share(work, [number * PORTION_BYTES for number in range(min(threads, len(left)))])

    def _portions(self, items: Sequence[_Object]) -> Iterator[list[_Object]]:
        """Lists of objects that are transferred together: over TCP a few that are gathered, and a share of the others for each thread."""
        if not self._gathers:
            yield list(items)
            return
        others = [item for item in items if not self._is_gathered(item.write)]
        if others:
            sizes = [item.write.namespace.object_bytes for item in others]
            count = threads_for(max(sizes))
            # Rounded up to whole objects.
            yield from _cut(others, min((sum(sizes) + (count - 1) * max(sizes)) // count, LARGEST_SHARE_BYTES))
        yield from _cut([item for item in items if self._is_gathered(item.write)], PORTION_BYTES)

    def _send_portion(self, connection: Connection, items: Sequence[_Object], block: Block, start: int) -> list[_Object]:
        parts = list[tuple[list[int], list[int]]]()
        for item in items:
            parts.append(self._parts(item.write, block, start))
            start += parts[-1][1][-1]
        done = connection.transfer(
            [item.name for item in items],
            [addresses for addresses, _ in parts],
            [sizes for _, sizes in parts],
            [list(accumulate(sizes[:-1], initial=0)) for _, sizes in parts],
        )
        return [item for item, ok in zip(items, done, strict=True) if ok]

    def _parts(self, write: ObjectWrite, block: Block, start: int) -> tuple[list[int], list[int]]:
        """Addresses and sizes of what an object is sent from, after what is not sent from the pool was put into the block."""
        if not self._is_gathered(write):
            block.view[start : start + ENVELOPE_BYTES] = write.envelope
            sizes = [*map(len, write.buffers), ENVELOPE_BYTES]
            return [*map(address_of, write.buffers), block.address + start], sizes
        end = start
        # The checksum of the envelope is computed first, and leaves the components in the cache.
        for part in write.parts:
            block.view[end : end + len(part)] = part
            end += len(part)
        return [block.address + start], [end - start]

    def _publish(self, connection: Connection, items: Sequence[_Object], outcome: WriteOutcome) -> None:
        if not items:
            return
        done = connection.publish([item.name for item in items])
        outcome.stored.update(item.write for item, ok in zip(items, done, strict=True) if ok)
        if not all(done):
            outcome.faults.append(StorageUnavailableError("an object could not be made visible"))


def _cut(items: Sequence[_Object], most: int) -> Iterator[list[_Object]]:
    """Lists of at most so many bytes, or of one object."""
    some, size = list[_Object](), 0
    for item in items:
        length = item.write.namespace.object_bytes
        if some and size + length > most:
            yield some
            some, size = [], 0
        some.append(item)
        size += length
    if some:
        yield some


def _not_stored_by_others(connection: Connection, items: Sequence[_Object], outcome: WriteOutcome) -> list[_Object]:
    """Objects that are there whole are stored; the others are being written, and may be there soon."""
    there = connection.exist([item.name for item in items]) if items else []
    left = list[_Object]()
    for item, exists in zip(items, there, strict=True):
        if exists:
            item.write.existed = True
            outcome.stored.add(item.write)
        else:
            left.append(item)
    return left


def _is_whole(write: ObjectWrite) -> bool:
    """Always, unless somebody makes up objects of another length, which this store shall not hold."""
    return tuple(map(len, write.buffers)) == write.namespace.geometry.component_bytes
