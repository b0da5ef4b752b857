"""Reads of pages: over TCP by store and through buffers, elsewhere by name and direct."""

from __future__ import annotations

import ctypes
import threading
import time
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Final, NamedTuple

import xxhash

from hicache_backends.mooncake.client import library
from hicache_backends.mooncake.memory import BLOCK_ENVELOPES, address_of
from hicache_backends.mooncake.names import names_of
from hicache_backends.mooncake.stores import UNKNOWN, Requests
from hicache_backends.posix.buffers import split
from hicache_backends.posix.faults import ReadOutcome
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead, checksum
from hicache_storage.spec import StorageTimeoutError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from contextlib import AbstractContextManager

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.posix.buffers import Buffers
    from hicache_storage.objects import Call
    from hicache_storage.objects.thread_pool import ThreadPool
    from hicache_storage.spec import CancellationToken

MAX_LOOKUP_BYTES: Final = 512 << 20
"""Objects looked up together: their leases, 5 s by default, must last until all are read."""
ATTEMPTS: Final = 4
CHUNK_OBJECTS: Final = 16
"""Objects in one request. With a store that hangs, each delays its thread for a timeout."""
CHUNK_BYTES: Final = (1 << 20) + CHUNK_OBJECTS * ENVELOPE_BYTES
"""Bytes of one request. They are still in the CPU cache when they are copied."""
TRIAL_SECONDS: Final = 0.1
"""Time that one get in some seconds waits for a store that is left out and tried again."""
COPY_BYTES: Final = 1 << 20
"""Bytes copied between two checks whether the caller still waits."""
LONG_COPY_BYTES: Final = 128 << 10
"""Copies of this length and longer release the GIL. For shorter ones that takes too long."""
NO_ENVELOPE: Final = bytes(ENVELOPE_BYTES)
ON_DISK: Final = " on a disk"
"""In place of the endpoint of a store."""
_abandoned: Final = list[memoryview]()
"""Buffers of requests that the library has given up: their addresses stay theirs."""


class ReadResult(NamedTuple):
    """A read, its object's name, and the length or code that the library has returned."""

    read: ObjectRead
    name: str
    code: int


class PageReader:
    """Reader of pages. Safe for many threads.

    Over TCP objects are looked up first, and what is asked of one request lies on one store. They
    arrive in bounce buffers, from which they are copied while the caller waits (rule GET-9). A
    buffer is used again for the thread's next request, so that bytes are verified and copied while
    they are in the CPU cache. While one thread copies, the transfers of others go on.

    Bytes of a read by name may arrive after the library has given it up, after `ABANDON_SECONDS`.

    Args:
        buffers: bounce buffers that hold one object at least; where objects arrive in host memory,
            for the envelopes of `BLOCK_ENVELOPES` objects.
        thread_pool: the reader does not close it.
        hold: keeps the connection open, for threads whose call may have left.
        direct: read by name, without a lookup, and straight to host memory. Calls wait for reads
            that hang.
    """

    def __init__(
        self,
        buffers: Buffers,
        thread_pool: ThreadPool,
        hold: AbstractContextManager[object],
        *,
        direct: bool = False,
    ) -> None:
        self.buffers = buffers
        self._thread_pool = thread_pool
        self._hold = hold
        self._direct = direct

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
        if self._direct:
            asked = [
                ReadResult(read, name, library.NO_REPLICA_IN_MEMORY)
                for read, name in zip(reads, names, strict=True)
            ]
            with self.buffers.lend(call) as buffer:
                return self._read_into_pool(connection, asked, buffer)
        with connection.looked_up(names) as codes:
            asked = list(map(ReadResult, reads, names, codes))
            results = [one for one in asked if one.code not in (0, library.NO_REPLICA_IN_MEMORY)]

            def send(items: list[ReadResult], buffer: memoryview) -> bool | None:
                with connection.kept([one.name for one in items]):
                    came = self._read_through_buffer(connection, items, buffer, shield)
                results.extend(came)
                if any(one.code == library.TRANSFER_FAILED for one in came):
                    return True
                return False if any(one.code >= 0 for one in came) else None

            requests = Requests(
                self._thread_pool,
                connection.stores,
                call,
                hold=self._hold,
                buffers=self.buffers,
                send=send,
                size_of=_size,
            )
            shield = partial(_shield, requests.token, call)
            max_bytes = min(self.buffers.size, CHUNK_BYTES)
            for store, found in self._by_store(connection, asked).items():
                if self._is_in(connection, store, found[0].name):
                    some = split(found, _size, max_bytes, CHUNK_OBJECTS)
                    requests.add(UNKNOWN if store == ON_DISK else store, some)
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

    def _is_in(self, connection: Connection, store: str, name: str) -> bool:
        """Return whether a store is to be asked; where it is time, one that is left out is tried.

        Its answer is waited for: a store that is back may have new pages, and no earlier get.
        """
        stores = connection.stores
        if stores.is_out(store) and stores.try_again(store):
            tried = threading.Event()
            self._thread_pool.run_in_background(
                partial(self._try_again, connection, store, name, tried)
            )
            tried.wait(TRIAL_SECONDS)
        return not stores.is_out(store)

    def _try_again(
        self, connection: Connection, store: str, name: str, tried: threading.Event
    ) -> None:
        """Read the beginning of an object, to find out whether its store answers."""
        token, failed = connection.stores.begin(store, 0), True
        try:
            with self._hold:
                failed = not connection.can_read(name)
        finally:
            connection.stores.end(store, token, failed=failed)
            tried.set()

    def _request(
        self,
        connection: Connection,
        items: Sequence[ReadResult],
        buffer: memoryview,
        addresses: Sequence[Sequence[int]],
        sizes: Sequence[Sequence[int]],
    ) -> list[ReadResult]:
        """Read objects to their addresses, which must not be used again after a late failure."""
        names, by_name = [item.name for item in items], bool(items[0].code)
        began = time.monotonic()
        # The library reads disks only in requests by name.
        codes = (connection.read if by_name else connection.read_ranges)(names, addresses, sizes)
        abandoned = time.monotonic() - began >= library.ABANDON_SECONDS
        if by_name and abandoned and library.TRANSFER_FAILED in codes:
            self.buffers.retire(buffer)
            _abandoned.append(buffer)
        return [
            ReadResult(item.read, item.name, code) for item, code in zip(items, codes, strict=True)
        ]

    def _read_into_pool(
        self, connection: Connection, items: Sequence[ReadResult], buffer: memoryview
    ) -> list[ReadResult]:
        """Read objects into host memory, and their envelopes through a buffer."""
        envelopes = _cut(buffer, [ENVELOPE_BYTES] * len(items))
        results = self._request(
            connection,
            items,
            buffer,
            [
                [*map(address_of, item.read.buffers), address_of(envelope)]
                for item, envelope in zip(items, envelopes, strict=True)
            ],
            [[*map(len, item.read.buffers), ENVELOPE_BYTES] for item in items],
        )
        for result, envelope in zip(results, envelopes, strict=True):
            if result.code == _size(result):
                result.read.envelope = bytes(envelope)
        return results

    def _read_through_buffer(
        self,
        connection: Connection,
        items: Sequence[ReadResult],
        buffer: memoryview,
        shield: Callable[[], AbstractContextManager[bool]],
    ) -> list[ReadResult]:
        """Read objects, and deliver them while `shield` is active.

        Returns the results of those that were delivered, or have failed.
        """
        wholes = _cut(buffer, list(map(_size, items)))
        results = self._request(
            connection,
            items,
            buffer,
            [[address_of(whole)] for whole in wholes],
            [[len(whole)] for whole in wholes],
        )
        came = [result for result in results if result.code != _size(result)]
        pairs = zip(results, wholes, strict=True)
        arrived = [(result, whole) for result, whole in pairs if result.code == len(whole)]
        return came + _delivered(shield, arrived)


def _cut(buffer: memoryview, sizes: Sequence[int]) -> list[memoryview]:
    """Cut memory for objects, or their envelopes, from a buffer."""
    ends = list(accumulate(sizes))
    cut = [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    for memory in cut:
        # The envelope of an earlier read must not count as one that has arrived.
        memory[-ENVELOPE_BYTES:] = NO_ENVELOPE
    return cut


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
    reads: Sequence[ObjectRead], max_reads: int, max_bytes: int
) -> Iterator[list[ObjectRead]]:
    """Split reads into lists of distinct objects: the library has one destination for a name."""
    left = list(reads)
    while left:
        first = dict[tuple[str, str], ObjectRead]()
        for read in left:
            first.setdefault((read.namespace.name, read.key), read)
        yield from split(
            first.values(), lambda read: read.namespace.object_bytes, max_bytes, max_reads
        )
        taken = set(first.values())
        left = [read for read in left if read not in taken]


def read_verified(
    reader: PageReader, connection: Connection, reads: Sequence[ObjectRead], call: Call
) -> ReadOutcome:
    """Read and verify pages, again until damage is certain.

    The memory of an object that is removed during a read may hold other objects by then, whose bytes
    arrive in the page. That is no damage: a page is damaged in the result if the same wrong bytes
    arrive twice.

    Raises:
        StorageUnavailableError: the master does not answer.
    """
    outcome = reader.read(connection, reads, call)
    before = dict[ObjectRead, bytes]()
    doubtful = _not_verified(outcome.arrived, call)
    for _ in range(ATTEMPTS):
        # The same wrong bytes twice: such a page stays in the result, as damaged.
        settled = {read for read, content in doubtful.items() if before.get(read) == content}
        again = [read for read in doubtful if read not in settled]
        if not again or call.expired():
            break
        for read in again:
            read.retract()
            outcome.arrived.discard(read)
        before = doubtful
        more = reader.read(connection, again, call)
        outcome.arrived |= more.arrived
        outcome.faults += more.faults
        doubtful = _not_verified(more.arrived, call)
    else:
        again = list(doubtful)
    for read in again:
        # Neither a hit nor certainly damaged: a miss.
        read.retract()
        outcome.arrived.discard(read)
    return outcome


def _not_verified(reads: set[ObjectRead], call: Call) -> dict[ObjectRead, bytes]:
    """Map the arrived reads that fail verification to digests of their bytes."""
    # A cancelled call's memory is its caller's again: what is there now says nothing about the
    # store.
    with call.shield() as active:
        return {read: _digest(read) for read in reads if not read.verify()} if active else {}


def _digest(read: ObjectRead) -> bytes:
    digest = xxhash.xxh3_128()
    for part in read.parts:
        digest.update(part)
    return digest.digest()
