"""Slots by preadv and pwritev: straight from and into the page's components, or, where a read may hang, through own buffers."""

from __future__ import annotations

import errno
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from hicache_backends.hf3fs.slots.engine import SlotEngine, SlotRead, SlotWrite
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.faults import kept
from hicache_backends.posix.vectored import read_into, write_from
from hicache_backends.posix.workers import Workers
from hicache_storage.objects import ENVELOPE_BYTES, running_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from xxhash import xxh3_64

    from hicache_storage.objects import Call

PIECE_BYTES: Final = 512 << 10
"""Moved at a time: what was read is still in the core's cache when its checksum is computed."""
CLOSE_SECONDS: Final = 5.0

JobT = TypeVar("JobT", SlotRead, SlotWrite)


class PosixEngine(SlotEngine):
    """For a FUSE mount of 3FS, any shared file system, or a local disk.

    Args:
        threads: most that move the bytes of one call.
        bytes_per_thread: no thread is used for less.
        buffered: reads go through buffers of the engine's own, and one that hangs keeps nobody waiting.
        verifies: whether checksums are wanted.
    """

    name = "posix"

    def __init__(self, *, threads: int, bytes_per_thread: int, buffered: bool, verifies: bool) -> None:
        self.buffered = buffered
        self._threads, self._bytes_per_thread, self._verifies = threads, bytes_per_thread, verifies
        self._workers = Workers(threads - 1, "hicache-hf3fs")
        self._buffers = Buffers(PIECE_BYTES + ENVELOPE_BYTES) if buffered else None

    def read(self, jobs: Sequence[SlotRead], call: Call) -> None:
        self._share(jobs, partial(self._read_one, call=call))

    def write(self, jobs: Sequence[SlotWrite], call: Call) -> None:
        self._share(jobs, partial(_write_one, call=call))

    def stuck(self) -> int:
        return 0 if self._buffers is None else self._buffers.stuck()

    def close(self) -> None:
        self._workers.close(CLOSE_SECONDS)

    def _share(self, jobs: Sequence[JobT], do: Callable[[JobT], None]) -> None:
        """Give each thread about as many bytes as the others."""
        total = sum([job.size for job in jobs])
        count = max(1, min(self._threads, total // self._bytes_per_thread))
        parts, done = [list[JobT]() for _ in range(count)], 0
        for job in jobs:
            parts[min(count - 1, done * count // total)].append(job)
            done += job.size
        self._workers.run([partial(_each, part, do) for part in parts if part])

    def _read_one(self, job: SlotRead, *, call: Call) -> None:
        try:
            handle = job.file.borrow()
        except OSError as error:
            job.fault = kept(error)
            return
        try:
            job.whole = self._fill(job, handle.descriptor, call)
        except OSError as error:
            job.fault = kept(error)
            if error.errno != errno.ETIMEDOUT:
                job.file.forget(handle)

    def _fill(self, job: SlotRead, descriptor: int, call: Call) -> bool:
        """Fill the parts from the slot, and verify; `False` where the file ends too early."""
        read, offset = job.read, job.file.offset(job.slot)
        checksum = running_checksum() if self._verifies else None
        read.envelope = bytearray(ENVELOPE_BYTES)
        pieces = list(_pieces(read.buffers))
        for number, pages in enumerate(pieces, start=1):
            targets = [*pages, memoryview(read.envelope)] if number == len(pieces) else pages
            if not self._move(descriptor, targets, pages, offset, checksum, call):
                return False
            offset += sum(map(len, targets))
        read.verify(None if checksum is None else checksum.intdigest())
        return True

    def _move(
        self,
        descriptor: int,
        targets: list[memoryview],
        pages: list[memoryview],
        offset: int,
        checksum: xxh3_64 | None,
        call: Call,
    ) -> bool:
        if self._buffers is None:
            with call.caller as waits:
                _stop_unless(waits)
                if not read_into(descriptor, targets, offset):
                    return False
                if checksum is not None:
                    for page in pages:
                        checksum.update(page)
            return True
        with self._buffers.lend(call) as buffer:
            some = buffer[: sum(map(len, targets))]
            if not read_into(descriptor, [some], offset):
                return False
            if checksum is not None:
                checksum.update(some[: sum(map(len, pages))])
            with call.caller as waits:
                _stop_unless(waits)
                start = 0
                for target in targets:
                    target[:] = some[start : start + len(target)]
                    start += len(target)
        return True


def _write_one(job: SlotWrite, *, call: Call) -> None:
    if call.expired() or job.late:
        job.fault = OSError(errno.ETIMEDOUT, "the deadline or the lease has passed")
        return
    try:
        handle = job.file.borrow()
    except OSError as error:
        job.fault = kept(error)
        return
    try:
        _put(job, handle.descriptor)
        job.whole = True
    except OSError as error:
        job.fault = kept(error)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            job.file.forget(handle)


def _put(job: SlotWrite, descriptor: int) -> None:
    write, offset = job.write, job.file.offset(job.slot)
    if job.size <= PIECE_BYTES:
        write_from(descriptor, write.parts, offset)
        return
    checksum = running_checksum()
    for sources in _pieces(write.buffers):
        for source in sources:
            checksum.update(source)
        write_from(descriptor, sources, offset)
        offset += sum(map(len, sources))
    write.seal(checksum.intdigest())
    write_from(descriptor, [memoryview(write.envelope)], offset)


def _pieces(parts: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Consecutive parts of at most a piece together; longer ones are cut."""
    some, room = list[memoryview](), PIECE_BYTES
    for part in parts:
        if len(part) <= room:
            some.append(part)
            room -= len(part)
            continue
        for start, end in _cuts(len(part), room):
            if end - start > room:
                yield some
                some, room = [], PIECE_BYTES
            some.append(part[start:end])
            room -= end - start
    if some:
        yield some


def _cuts(length: int, room: int) -> Iterator[tuple[int, int]]:
    """Ends of the pieces of a part: first what still fits, then whole pieces."""
    start = 0
    while start < length:
        end = min(length, start + (room or PIECE_BYTES))
        yield start, end
        start, room = end, PIECE_BYTES


def _each(part: Sequence[JobT], do: Callable[[JobT], None]) -> None:
    for job in part:
        do(job)


def _stop_unless(waits: bool) -> None:
    if not waits:
        raise OSError(errno.ETIMEDOUT, "nobody waits for the answer any more")
