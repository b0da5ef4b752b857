"""Slot engine on preadv and pwritev, with bounce buffers where a read may hang."""

from __future__ import annotations

import errno
import time
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_backends.hf3fs.slots.engine import SlotEngine, SlotRead, SlotWrite
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.faults import detached, raise_if_cancelled
from hicache_backends.posix.files import read_into, scatter, write_from
from hicache_storage.objects import ENVELOPE_BYTES, running_checksum
from hicache_storage.objects.thread_pool import ThreadPool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hicache_storage.objects import Call

IO_BYTES: Final = 512 << 10
"""Length of one I/O request: its bytes are still in the core's cache when they are checksummed."""
MAX_BUFFERED_BYTES: Final = IO_BYTES + ENVELOPE_BYTES
"""Longer pages are moved in several requests."""
BYTES_PER_THREAD: Final = 4 << 20
"""As for the file driver: below this a second thread gains nothing from the page cache."""
CLOSE_SECONDS: Final = 5.0

JobT = TypeVar("JobT", SlotRead, SlotWrite)


class PosixEngine(SlotEngine):
    """Engine for a FUSE mount of 3FS, any shared file system, or a local disk.

    Moves neighbouring slots with one request.

    Args:
        threads: maximum for one call.
        buffered: read through bounce buffers, so that a hung read does not delay its caller.
    """

    name = "posix"

    def __init__(self, *, threads: int, buffered: bool) -> None:
        self.buffered = buffered
        self._threads = threads
        self._thread_pool = ThreadPool("hicache-hf3fs", threads - 1)
        self._buffers = Buffers(MAX_BUFFERED_BYTES) if buffered else None

    def read(self, jobs: Sequence[SlotRead], call: Call) -> None:
        self._share(jobs, partial(self._read_some, call=call))

    def write(self, jobs: Sequence[SlotWrite], call: Call) -> None:
        self._share(jobs, partial(_write_some, call=call))

    def stuck(self) -> int:
        return 0 if self._buffers is None else self._buffers.stuck()

    def close(self) -> None:
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
            memoryview(bytearray(file.geometry.slot_bytes - extent[0].size)),
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
            some = buffer[: sum(map(len, targets))]
            if not read_into(descriptor, [some], offset):
                return False
            with call.shield() as active:
                raise_if_cancelled(active)
                scatter(some, targets)
                on_arrived()
        return True


def _write_some(jobs: Sequence[SlotWrite], *, call: Call) -> None:
    for extent in extents(jobs):
        _write_extent(extent, call)


def _write_extent(extent: Sequence[SlotWrite], call: Call) -> None:
    file, handle = extent[0].file, None
    try:
        _stop_if_late(extent, call)
        handle = file.borrow(writes=True)
        _put(extent, handle.descriptor, call)
    except OSError as error:
        # A full file system says nothing about the descriptor, either.
        if handle is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            file.forget(handle)
        if len(extent) == 1:
            extent[0].fault = detached(error)
            return
        # One by one: a fault of one page must not fail its neighbours.
        for job in extent:
            _write_extent([job], call)
        return
    for job in extent:
        job.whole = True


def _put(extent: Sequence[SlotWrite], descriptor: int, call: Call) -> None:
    file = extent[0].file
    offset = file.offset(extent[0].slot)
    if len(extent) == 1 and extent[0].size > IO_BYTES:
        _put_in_chunks(extent[0], descriptor, offset, call)
        return
    sources = list[memoryview]()
    for job in extent:
        sources += job.write.parts
        sources.append(memoryview(bytes(file.geometry.slot_bytes - job.size)))
    write_from(descriptor, sources[:-1], offset)


def _put_in_chunks(job: SlotWrite, descriptor: int, offset: int, call: Call) -> None:
    write, digest = job.write, running_checksum()
    for sources in split_buffers(write.buffers):
        for source in sources:
            digest.update(source)
        # The lease may have ended during the previous request.
        _stop_if_late([job], call)
        write_from(descriptor, sources, offset)
        offset += sum(map(len, sources))
    write.seal(digest.intdigest())
    _stop_if_late([job], call)
    write_from(descriptor, [memoryview(write.envelope)], offset)


def _stop_if_late(extent: Sequence[SlotWrite], call: Call) -> None:
    if call.expired() or time.monotonic() >= min([job.until for job in extent]):
        raise OSError(errno.ETIMEDOUT, "the deadline or the lease has passed")


def extents(jobs: Sequence[JobT]) -> Iterator[list[JobT]]:
    """Group consecutive jobs of neighbouring slots up to `IO_BYTES`; longer pages stay alone."""
    extent, file, following, limit = list[JobT](), None, -1, 0
    for job in jobs:
        if job.slot != following or job.file is not file or len(extent) == limit:
            if extent:
                yield extent
            extent, file = [], job.file
            limit = max(1, IO_BYTES // file.geometry.slot_bytes)
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
