"""Slot engine: moves pages between host memory and slots with preadv and pwritev."""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_backends.hf3fs.slots.names import page_key
from hicache_backends.posix.faults import FULL, detached, raise_if_cancelled
from hicache_backends.posix.files import Handle, read_into, scatter, write_from
from hicache_storage.objects import ENVELOPE_BYTES, ObjectRead, running_checksum
from hicache_storage.objects.namespace import stored_checksum
from hicache_storage.objects.thread_pool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_backends.hf3fs.slots.files import SlotFile
    from hicache_backends.posix.buffers import Buffers
    from hicache_metadata_server.protocol import SlotStatus
    from hicache_storage.objects import Call, ObjectWrite

IO_BYTES: Final = 512 << 10
"""Length of one I/O request: its bytes are still in the core's cache when they are checksummed."""
MAX_BUFFERED_BYTES: Final = IO_BYTES + ENVELOPE_BYTES
"""Longer pages are read in several requests."""
BYTES_PER_THREAD: Final = 4 << 20
"""As for the file driver: below this a second thread gains nothing from the page cache."""
CLOSE_SECONDS: Final = 5.0

JobT = TypeVar("JobT", "SlotRead", "SlotWrite")


@dataclass(slots=True, eq=False)
class SlotRead:
    """One page to be read from a slot.

    The engine sets `whole` or `fault`, or neither if the file ends before the slot does.
    """

    read: ObjectRead
    file: SlotFile
    slot: int
    whole: bool = False
    """The buffers are filled and `read.verify()` was called."""
    fault: OSError | None = None
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.size = self.read.namespace.object_bytes


@dataclass(slots=True, eq=False)
class SlotWrite:
    """One page to be written to a slot."""

    write: ObjectWrite
    file: SlotFile
    slot: int
    generation: int
    """Of the leased slot."""
    lease: int
    until: float
    """Time by `time.monotonic()` after which no write begins: 9/10 of the lease."""
    ends: float
    """End of the lease. Bytes written after it may damage another client's page."""
    whole: bool = False
    fault: OSError | None = None
    size: int = field(init=False)
    """Bytes to write. They differ from `namespace.object_bytes` for objects of another length."""

    def __post_init__(self) -> None:
        self.size = sum(map(len, self.write.buffers)) + ENVELOPE_BYTES

    @property
    def late(self) -> bool:
        """True if no write may begin any more."""
        return time.monotonic() >= self.until


class SlotEngine:
    """Engine for a FUSE mount of 3FS, any shared file system, or a local disk.

    Moves neighbouring slots with one request. Safe for many threads. Sets the fault of each job
    and raises none.

    Args:
        threads: maximum for one call.
        buffers: bounce buffers of `MAX_BUFFERED_BYTES`, so that a hung read does not delay its
            caller beyond the deadline. Without them pages are read straight into host memory.
    """

    name = "posix"

    def __init__(self, *, threads: int, buffers: Buffers | None) -> None:
        self._threads = threads
        self._thread_pool = ThreadPool("hicache-hf3fs", threads - 1)
        self._buffers = buffers

    @property
    def buffered(self) -> bool:
        """True if a hung read does not delay its caller beyond the deadline."""
        return self._buffers is not None

    def adopt(self, descriptor: int) -> Handle:
        """Wrap an open file for this engine. The last reference to the handle closes it.

        Raises:
            OSError: the engine cannot use the file; the descriptor is closed.
        """
        return Handle(descriptor)

    def read(self, jobs: Sequence[SlotRead], call: Call) -> None:
        """Read pages and verify them. Writes no host memory after the caller has returned."""
        self._share(jobs, partial(self._read_some, call=call))

    def write(self, jobs: Sequence[SlotWrite], call: Call) -> None:
        """Write pages. No write goes on after the return."""
        self._share(jobs, partial(self._write_some, call=call))

    def stuck(self) -> int:
        """Count the hung requests whose callers have returned."""
        return 0 if self._buffers is None else self._buffers.stuck()

    def close(self) -> None:
        """End the threads. One whose request hangs ends when that returns."""
        self._thread_pool.close(CLOSE_SECONDS)

    def _share(self, jobs: Sequence[JobT], do: Callable[[Sequence[JobT]], None]) -> None:
        """Divide jobs among threads, with about equal bytes for each."""
        total = sum([job.size for job in jobs])
        count = min(self._threads, total // BYTES_PER_THREAD)
        if count < 2:
            do(jobs)
            return
        parts, done = [list[JobT]() for _ in range(count)], 0
        for job in jobs:
            parts[min(count - 1, done * count // total)].append(job)
            done += job.size
        self._thread_pool.run([partial(do, part) for part in parts if part])

    # Reads.

    def _read_some(self, jobs: Sequence[SlotRead], *, call: Call) -> None:
        for extent in extents(jobs):
            self._read_extent(extent, call)

    def _read_extent(self, extent: Sequence[SlotRead], call: Call) -> None:
        file, handle, fault = extent[0].file, None, None
        try:
            handle = file.borrow()
            if self._fill(extent, handle.descriptor, call):
                return
        except OSError as error:
            fault = detached(error)
            # A deadline of this process says nothing about the descriptor; any other error may come
            # from a dead mount.
            if handle is not None and error.errno != errno.ETIMEDOUT:
                file.forget(handle)
        if len(extent) == 1 or handle is None or call.expired():
            for job in extent:
                job.fault = fault
            return
        # One by one: a fault of one page must not fail its neighbours.
        for job in extent:
            self._read_extent([job], call)

    def _fill(self, extent: Sequence[SlotRead], descriptor: int, call: Call) -> bool:
        """Read and verify neighbouring slots. False if the file ends too early."""
        file, offset = extent[0].file, extent[0].file.offset(extent[0].slot)
        gap, targets = (
            memoryview(bytearray(file.slot_bytes - extent[0].size)),
            list[memoryview](),
        )
        for job in extent:
            job.read.envelope = bytearray(ENVELOPE_BYTES)
            targets += [*job.read.parts, gap]
        if extent[0].size > MAX_BUFFERED_BYTES:
            return self._fill_in_chunks(extent[0], descriptor, offset, call)

        def verify() -> None:
            for job in extent:
                job.read.verify()
                job.whole = True

        return self._move(descriptor, targets[:-1], offset, call, verify)

    def _fill_in_chunks(self, job: SlotRead, descriptor: int, offset: int, call: Call) -> bool:
        read, digest = job.read, running_checksum()

        def update() -> None:
            for page in pages if read.verifies_checksum else ():
                digest.update(page)

        cut = list(split_buffers(read.buffers))
        for number, pages in enumerate(cut, start=1):
            targets = [*pages, memoryview(read.envelope)] if number == len(cut) else pages
            if not self._move(descriptor, targets, offset, call, update):
                return False
            offset += sum(map(len, targets))
        read.verify(digest.intdigest())
        job.whole = True
        return True

    def _move(
        self,
        descriptor: int,
        targets: list[memoryview],
        offset: int,
        call: Call,
        on_arrived: Callable[[], None],
    ) -> bool:
        """Read to the targets, and call `on_arrived` while the caller must not change them."""
        if self._buffers is None:
            # The read writes into the caller's memory: a cancellation waits for its end.
            with call.shield() as active:
                raise_if_cancelled(active)
                if not read_into(descriptor, targets, offset):
                    return False
                on_arrived()
            return True
        with self._buffers.lend(call) as buffer:
            length = sum(map(len, targets))
            if not self._read_buffer(buffer, length, descriptor, offset):
                return False
            with call.shield() as active:
                raise_if_cancelled(active)
                scatter(buffer[:length], targets)
                on_arrived()
        return True

    def _read_buffer(self, buffer: memoryview, length: int, descriptor: int, offset: int) -> bool:
        """Read to the beginning of a bounce buffer. False if the file ends too early."""
        return read_into(descriptor, [buffer[:length]], offset)

    # Writes.

    def _write_some(self, jobs: Sequence[SlotWrite], *, call: Call) -> None:
        for extent in extents(jobs):
            self._write_extent(extent, call)

    def _write_extent(self, extent: Sequence[SlotWrite], call: Call) -> None:
        file, handle = extent[0].file, None
        try:
            sources = list[memoryview]()
            for job in extent:
                sources += job.write.parts
                sources.append(memoryview(bytes(file.slot_bytes - job.size)))
            # After the checksums, which take their time.
            if call.expired() or any(job.late for job in extent):
                raise OSError(errno.ETIMEDOUT, "the deadline or the lease has passed")
            handle = file.borrow(writes=True)
            self._put(sources[:-1], handle.descriptor, file.offset(extent[0].slot), call)
        except OSError as error:
            # A full file system says nothing about the descriptor, either.
            if handle is not None and error.errno not in FULL:
                file.forget(handle)
            if len(extent) == 1:
                extent[0].fault = detached(error)
                return
            # One by one: a fault of one page must not fail its neighbours.
            for job in extent:
                self._write_extent([job], call)
            return
        for job in extent:
            job.whole = True

    def _put(self, sources: Sequence[memoryview], descriptor: int, offset: int, call: Call) -> None:
        """Write consecutive bytes."""
        write_from(descriptor, sources, offset)


def extents(jobs: Sequence[JobT]) -> Iterator[list[JobT]]:
    """Group consecutive jobs of neighbouring slots up to `IO_BYTES`; longer pages stay alone."""
    extent, file, following, limit = list[JobT](), None, -1, 0
    for job in jobs:
        if job.slot != following or job.file is not file or len(extent) == limit:
            if extent:
                yield extent
            extent, file = [], job.file
            limit = max(1, IO_BYTES // file.slot_bytes)
        extent.append(job)
        following = job.slot + 1
    if extent:
        yield extent


def split_buffers(buffers: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Group consecutive buffers up to `IO_BYTES`; longer ones are cut."""
    some, room = list[memoryview](), IO_BYTES
    for buffer in buffers:
        rest = buffer
        while rest:
            if not room:
                yield some
                some, room = [], IO_BYTES
            some.append(rest[:room])
            rest = rest[room:]
            room -= len(some[-1])
    if some:
        yield some


def is_damaged(engine: SlotEngine, file: SlotFile, listed: SlotStatus, call: Call) -> bool | None:
    """Read a live slot again, and return True if a reader would not take it for its page.

    None where it cannot be read: the page may be whole.
    """
    if listed.length != file.namespace.object_bytes:
        return True
    read = ObjectRead.aside(file.namespace, page_key(listed.key))
    job = SlotRead(read, file, listed.slot)
    engine.read([job], call)
    if job.fault is not None:
        return None
    whole = job.whole and read.verify()
    return not (whole and stored_checksum(read.envelope) == listed.checksum)
