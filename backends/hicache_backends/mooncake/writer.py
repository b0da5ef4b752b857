"""Writes pages: objects are begun, the bytes of those that were not there gathered from the components and the envelope, and
then made visible."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, Block, address_of
from hicache_backends.mooncake.names import names_of
from hicache_storage.objects import ENVELOPE_BYTES, ObjectWrite
from hicache_storage.spec import StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.memory import Blocks
    from hicache_storage.objects import Call

MOST_OBJECTS: Final = BLOCK_ENVELOPES
"""In one request."""
GATHERED_BYTES: Final = 256 << 10
"""Objects up to here are copied together before they are sent: over TCP each part of an object costs a request of its own."""
GATHER_BLOCK_BYTES: Final = 16 << 20
SHORTEST_PAUSE: Final = 0.005
LONGEST_PAUSE: Final = 0.1


@dataclass(slots=True, eq=False)
class WriteOutcome:
    """What has become of some writes."""

    stored: set[ObjectWrite] = field(default_factory=set[ObjectWrite])
    faults: list[Exception] = field(default_factory=list[Exception])


@dataclass(slots=True, eq=False)
class _Object:
    """A write under its name, and its place in the block."""

    write: ObjectWrite
    name: str
    place: int


class PageWriter:
    """Writes pages. Safe for many threads.

    Args:
        copies: of each page.
        wait_seconds: how long for room, and for pages that somebody else is storing.
        gathers: send small objects in one part; blocks then have `GATHER_BLOCK_BYTES`.
    """

    def __init__(self, blocks: Blocks, copies: int, wait_seconds: float, *, gathers: bool) -> None:
        self._blocks, self._wait_seconds, self._gathers = blocks, wait_seconds, gathers
        self._config = library.replicate_config(copies)

    def write(self, connection: Connection, writes: Sequence[ObjectWrite], call: Call) -> WriteOutcome:
        """Store pages, each by itself.

        Raises:
            StorageUnavailableError: the master does not answer, and nothing was stored.
        """
        outcome = WriteOutcome()
        until = time.monotonic() + self._wait_seconds
        for some in self._portions(writes):
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
        places = accumulate(map(self._needed, whole), initial=0)
        left = [_Object(*item) for item in zip(whole, names_of(whole), places, strict=False)]
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

    def _needed(self, write: ObjectWrite) -> int:
        """Bytes of a block."""
        return write.namespace.object_bytes if self._is_gathered(write) else ENVELOPE_BYTES

    def _portions(self, writes: Sequence[ObjectWrite]) -> Iterator[list[ObjectWrite]]:
        """Lists of writes that fit into a request and a block."""
        some, size = list[ObjectWrite](), 0
        for write in writes:
            needed = self._needed(write)
            if some and (len(some) == MOST_OBJECTS or size + needed > GATHER_BLOCK_BYTES):
                yield some
                some, size = [], 0
            some.append(write)
            size += needed
        if some:
            yield some

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
        arrived, published = [False] * len(begun), False
        try:
            parts = [self._parts(item, block) for item in begun]
            arrived = connection.transfer(
                [item.name for item in begun],
                [addresses for addresses, _ in parts],
                [sizes for _, sizes in parts],
                [list(accumulate(sizes[:-1], initial=0)) for _, sizes in parts],
            )
            # All bytes have been read. A caller who has left may have been answered already (rule SET-8).
            if not call.expired():
                published = True
                self._publish(connection, [item for item, ok in zip(begun, arrived, strict=True) if ok], outcome)
        finally:
            given_up = [item.name for item, ok in zip(begun, arrived, strict=True) if not (ok and published)]
            if given_up:
                connection.withdraw(given_up)
        if not all(arrived):
            outcome.faults.append(StorageUnavailableError("the bytes of an object did not reach the node that keeps it"))

    def _parts(self, item: _Object, block: Block) -> tuple[list[int], list[int]]:
        """Addresses and sizes of what an object is sent from, after its envelope, and a small page, were put into the block."""
        write, start = item.write, item.place
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
