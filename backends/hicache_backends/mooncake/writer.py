"""The set: begins objects, transfers their bytes, and publishes them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.stores import MAX_THREADS, Requests, Stores
from hicache_backends.posix.buffers import split
from hicache_backends.posix.faults import WriteOutcome
from hicache_storage.objects import ENVELOPE_BYTES, ObjectWrite
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.posix.buffers import Buffers
    from hicache_storage.objects import Call
    from hicache_storage.objects.thread_pool import ThreadPool

MAX_OBJECTS: Final = BLOCK_ENVELOPES
"""Objects in one request."""
GATHERED_BYTES: Final = 256 << 10
"""Smaller objects are sent in one part: over TCP each part of an object is a request."""
CHUNK_BYTES: Final = (512 << 10) + 8 * ENVELOPE_BYTES
"""Small objects sent with one request over TCP, while another thread gathers the next ones."""
MAX_HUNG_SETS: Final = 16
"""Threads of transfers that hang; beyond, sets are refused until some end."""
UNKNOWN_STORE: Final = "any"
"""The master does not tell on which store an object is, before it is published."""
MAX_CHUNK_BYTES: Final = (4 << 20) + 64 * ENVELOPE_BYTES
"""Large objects sent with one request. No transfer begins before the checksums of a chunk are
computed. With a hung store, each object of a chunk takes a transfer timeout."""
MIN_PAUSE_SECONDS: Final = 0.005
MAX_PAUSE_SECONDS: Final = 0.1


@dataclass(slots=True, eq=False)
class _Object:
    """A write and its object's name."""

    write: ObjectWrite
    name: str


class PageWriter:
    """Writes pages. Safe for many threads.

    Args:
        copies: of each page.
        wait_seconds: for room, and for pages that other writers are storing.
        thread_pool: the writer does not close it.
        hold: keeps connection and host memory, for threads whose call may have left.
        gathers: send small objects in one part, and all objects in chunks. Buffers must have
            `CHUNK_BYTES`.
    """

    def __init__(
        self,
        buffers: Buffers,
        copies: int,
        wait_seconds: float,
        thread_pool: ThreadPool,
        hold: AbstractContextManager[object],
        *,
        gathers: bool,
    ) -> None:
        self._buffers = buffers
        self._wait_seconds = wait_seconds
        self._thread_pool = thread_pool
        self._hold = hold
        self._gathers = gathers
        self._config = library.replicate_config(copies)

    def write(
        self, connection: Connection, writes: Sequence[ObjectWrite], call: Call
    ) -> WriteOutcome:
        """Store pages. Each succeeds or fails by itself.

        Raises:
            StorageUnavailableError: the master does not answer, and nothing was stored.
        """
        outcome = WriteOutcome()
        # One limit for all requests of the call: `wait_seconds` is what the caller may lose by
        # waiting.
        until = time.monotonic() + self._wait_seconds
        for start in range(0, len(writes), MAX_OBJECTS):
            some = writes[start : start + MAX_OBJECTS]
            try:
                self._store(connection, some, until, outcome, call)
            except StorageUnavailableError as error:
                # Pages of earlier requests are stored, and the caller is to know.
                if not outcome.stored:
                    raise
                outcome.faults.append(error)
                break
        return outcome

    def _store(
        self,
        connection: Connection,
        writes: Sequence[ObjectWrite],
        until: float,
        outcome: WriteOutcome,
        call: Call,
    ) -> None:
        left = [_Object(*item) for item in zip(writes, names_of(writes), strict=True)]
        pause = MIN_PAUSE_SECONDS
        while left and not call.expired():
            left = self._pass(connection, left, outcome, call)
            seconds = call.remaining()
            if (
                not left
                or time.monotonic() + pause > until
                or (seconds is not None and seconds < 2 * pause)
            ):
                return
            # The others wait for room that the master makes by eviction, or for another writer.
            time.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE_SECONDS)

    def _is_gathered(self, write: ObjectWrite) -> bool:
        return self._gathers and write.namespace.object_bytes <= GATHERED_BYTES

    def _pass(
        self,
        connection: Connection,
        items: Sequence[_Object],
        outcome: WriteOutcome,
        call: Call,
    ) -> list[_Object]:
        """Store what can be stored now. Returns the objects for a later pass."""
        # First: an object that an earlier call has left begun looks like another writer's.
        connection.revoke_pending()
        sizes = list(map(_size, items))
        codes = connection.begin([item.name for item in items], sizes, self._config)
        begun, others, later = list[_Object](), list[_Object](), list[_Object]()
        for item, code in zip(items, codes, strict=True):
            if not code:
                begun.append(item)
            elif code in (library.EXISTS, library.INVALID_PARAMS):
                # Stored, or being written by another process or thread.
                others.append(item)
            elif code in library.FULL:
                later.append(item)
            else:
                outcome.faults.append(
                    StorageUnavailableError(f"an object cannot be stored (code {code})")
                )
        if begun:
            self._transfer(connection, begun, outcome, call)
        return later + _not_stored_by_others(connection, others, outcome)

    def _transfer(
        self,
        connection: Connection,
        begun: Sequence[_Object],
        outcome: WriteOutcome,
        call: Call,
    ) -> None:
        arrived, running = list[_Object](), set[_Object]()
        published = False
        try:
            self._send(connection, begun, call, arrived, running, outcome)
            # A caller that has returned may have overwritten the bytes during the transfer, so they
            # are not published (rule SET-8).
            if not call.expired():
                published = True
                self._publish(connection, arrived, outcome)
        finally:
            # Also after an error: an object that stays begun keeps other writers from storing it.
            # If `publish` has failed, it has seen to the revocation itself.
            settled = running.union(arrived) if published else running
            to_revoke = [item.name for item in begun if item not in settled]
            if to_revoke:
                connection.revoke(to_revoke)

    def _send(
        self,
        connection: Connection,
        items: Sequence[_Object],
        call: Call,
        arrived: list[_Object],
        running: set[_Object],
        outcome: WriteOutcome,
    ) -> None:
        """Transfer the bytes of objects.

        Args:
            arrived: filled with the objects that have arrived.
            running: filled with those whose transfers hang, and are revoked when these end.
        """

        def send(some: list[_Object], buffer: memoryview) -> None:
            with requests.token.shield() as active:
                if not active:
                    return
                running.update(some)
            done = list[_Object]()
            try:
                done = self._send_chunk(connection, some, buffer)
            finally:
                with requests.token.shield() as active:
                    if active:
                        running.difference_update(some)
                        arrived.extend(done)
                if not active:
                    connection.revoke([item.name for item in some])
            if len(done) < len(some):
                outcome.faults.append(
                    StorageUnavailableError(
                        "the bytes of an object did not reach the node that keeps it"
                    )
                )

        # Health of this call's stores: which ones they are is not known.
        requests = Requests(
            self._thread_pool,
            Stores(),
            call,
            hold=self._hold,
            buffers=self._buffers,
            send=send,
            size_of=_size,
        )
        # Alone, an object on a store that fails takes no others along.
        alone = connection.has_failed_lately
        requests.add(UNKNOWN_STORE, ([item] for item in items) if alone else self._chunks(items))
        requests.run()
        if requests.late:
            connection.note_failed_set()
            outcome.faults.append(StorageTimeoutError("a store has not answered in time"))

    def _chunks(self, items: Sequence[_Object]) -> Iterator[list[_Object]]:
        """Split objects into chunks, over TCP the large ones first."""
        if not self._gathers:
            yield list(items)
            return
        others = [item for item in items if not self._is_gathered(item.write)]
        if others:
            sizes = list(map(_size, others))
            # A share for each thread, rounded up to whole objects.
            share = (sum(sizes) + (MAX_THREADS - 1) * max(sizes)) // MAX_THREADS
            yield from split(others, _size, min(share, MAX_CHUNK_BYTES))
        gathered = [item for item in items if self._is_gathered(item.write)]
        yield from split(gathered, _size, CHUNK_BYTES)

    def _send_chunk(
        self, connection: Connection, items: Sequence[_Object], buffer: memoryview
    ) -> list[_Object]:
        parts, start = list[tuple[list[int], list[int]]](), 0
        for item in items:
            parts.append(self._parts(item.write, buffer, start))
            start += parts[-1][1][-1]
        done = connection.transfer(
            [item.name for item in items],
            [addresses for addresses, _ in parts],
            [sizes for _, sizes in parts],
            [list(accumulate(sizes[:-1], initial=0)) for _, sizes in parts],
        )
        return [item for item, ok in zip(items, done, strict=True) if ok]

    def _parts(
        self, write: ObjectWrite, buffer: memoryview, start: int
    ) -> tuple[list[int], list[int]]:
        """Return addresses and sizes of an object's parts. Copies small objects into the buffer."""
        if not self._is_gathered(write):
            buffer[start : start + ENVELOPE_BYTES] = write.envelope
            sizes = [*map(len, write.buffers), ENVELOPE_BYTES]
            return [*map(address_of, write.buffers), address_of(buffer) + start], sizes
        end = start
        # `write.parts` computes the checksum first, which leaves the components in the CPU cache.
        for part in write.parts:
            buffer[end : end + len(part)] = part
            end += len(part)
        return [address_of(buffer) + start], [end - start]

    def _publish(
        self, connection: Connection, items: Sequence[_Object], outcome: WriteOutcome
    ) -> None:
        if not items:
            return
        done = connection.publish([item.name for item in items])
        outcome.stored.update(item.write for item, ok in zip(items, done, strict=True) if ok)
        if not all(done):
            outcome.faults.append(StorageUnavailableError("an object could not be made visible"))


def _size(item: _Object) -> int:
    return item.write.namespace.object_bytes


def _not_stored_by_others(
    connection: Connection, items: Sequence[_Object], outcome: WriteOutcome
) -> list[_Object]:
    """Count existing objects as stored. Returns those that other writers are storing.

    Objects on stores that are left out do not count as stored (rule SET-1). Where the store is
    lost, they are removed, and returned as well.
    """
    names = [item.name for item in items]
    there = connection.exist(names) if items else []
    dead, removed = set[str](), set[str]()
    if items and connection.stores.any_out():
        dead = connection.left_out(names)
        removed = connection.remove_lost(sorted(dead)) if dead else set[str]()
    left = list[_Object]()
    for item, exists in zip(items, there, strict=True):
        if not exists or item.name in removed:
            left.append(item)
        elif item.name not in dead:
            item.write.existed = True
            outcome.stored.add(item.write)
    return left
