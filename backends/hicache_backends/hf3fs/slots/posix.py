"""Slots by preadv and pwritev: straight from and into the page's components, or, where a read may hang, through own buffers."""

from __future__ import annotations

import errno
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from hicache_backends.hf3fs.slots.engine import SlotEngine, SlotRead, SlotWrite
from hicache_backends.hf3fs.slots.pieces import PIECE_BYTES, JobT, pieces, runs
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.faults import detached, raise_if_cancelled
from hicache_backends.posix.thread_pool import IoThreadPool
from hicache_backends.posix.vectored import read_into, scatter, write_from
from hicache_storage.objects import ENVELOPE_BYTES, running_checksum
from hicache_storage.objects.envelope import checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xxhash import xxh3_64

    from hicache_storage.objects import Call

LONGEST: Final = PIECE_BYTES + ENVELOPE_BYTES
"""What is longer is moved piece by piece."""
CLOSE_SECONDS: Final = 5.0


class PosixEngine(SlotEngine):
    """For a FUSE mount of 3FS, any shared file system, or a local disk. Neighbouring slots are moved with one request.

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
        self._workers = IoThreadPool(threads - 1, "hicache-hf3fs")
        self._buffers = Buffers(LONGEST) if buffered else None

    def read(self, jobs: Sequence[SlotRead], call: Call) -> None:
        self._share(jobs, partial(self._read_some, call=call))

    def write(self, jobs: Sequence[SlotWrite], call: Call) -> None:
        self._share(jobs, partial(_write_some, call=call))

    def stuck(self) -> int:
        return 0 if self._buffers is None else self._buffers.stuck()

    def close(self) -> None:
        self._workers.close(CLOSE_SECONDS)

    def _share(self, jobs: Sequence[JobT], do: Callable[[Sequence[JobT]], None]) -> None:
        """Give each thread about as many bytes as the others."""
        total = sum([job.size for job in jobs])
        count = min(self._threads, total // self._bytes_per_thread)
        if count < 2:
            do(jobs)
            return
        parts, done = [list[JobT]() for _ in range(count)], 0
        for job in jobs:
            parts[min(count - 1, done * count // total)].append(job)
            done += job.size
        self._workers.run([partial(do, part) for part in parts if part])

    def _read_some(self, jobs: Sequence[SlotRead], *, call: Call) -> None:
        for run in runs(jobs):
            self._read_run(run, call)

    def _read_run(self, run: Sequence[SlotRead], call: Call) -> None:
        file, handle, fault = run[0].file, None, None
        try:
            handle = file.borrow()
            if self._fill(run, handle.descriptor, call):
                return
        except OSError as error:
            fault = detached(error)
            if handle is not None and error.errno != errno.ETIMEDOUT:
                file.forget(handle)
        if len(run) == 1 or handle is None or call.expired():
            for job in run:
                job.fault = fault
            return
        # The others have nothing to do with what is wrong with one of them.
        for job in run:
            self._read_run([job], call)

    def _fill(self, run: Sequence[SlotRead], descriptor: int, call: Call) -> bool:
        """Fill the parts from neighbouring slots, and verify; `False` where the file ends too early."""
        if run[0].size > LONGEST:
            [job] = run
            return self._fill_by_pieces(job, descriptor, call)
        if self._buffers is None:
            return _fill_in_place(run, descriptor, call)
        with self._buffers.lend(call) as buffer:
            return self._fill_through(buffer, run, descriptor, call)

    def _fill_through(self, buffer: memoryview, run: Sequence[SlotRead], descriptor: int, call: Call) -> bool:
        file, size = run[0].file, run[0].size
        step = file.geometry.slot_bytes
        some = buffer[: step * (len(run) - 1) + size]
        if not read_into(descriptor, [some], file.offset(run[0].slot)):
            return False
        pages = [some[start : start + size] for start in range(0, len(some), step)]
        for job, page in zip(run, pages, strict=True):
            job.read.envelope = bytes(page[-ENVELOPE_BYTES:])
            job.read.verify(checksum([page[:-ENVELOPE_BYTES]]) if self._verifies else None)
        with call.shield() as active:
            raise_if_cancelled(active)
            for job, page in zip(run, pages, strict=True):
                if job.read.verify():
                    scatter(page, job.read.buffers)
                job.whole = True
        return True

    def _fill_by_pieces(self, job: SlotRead, descriptor: int, call: Call) -> bool:
        read, offset = job.read, job.file.offset(job.slot)
        digest = running_checksum() if self._verifies else None
        read.envelope = bytearray(ENVELOPE_BYTES)
        cut = list(pieces(read.buffers))
        for number, pages in enumerate(cut, start=1):
            targets = [*pages, memoryview(read.envelope)] if number == len(cut) else pages
            if not self._move(descriptor, targets, pages, offset, digest, call):
                return False
            offset += sum(map(len, targets))
        read.verify(None if digest is None else digest.intdigest())
        job.whole = True
        return True

    def _move(
        self,
        descriptor: int,
        targets: list[memoryview],
        pages: list[memoryview],
        offset: int,
        digest: xxh3_64 | None,
        call: Call,
    ) -> bool:
        if self._buffers is None:
            with call.shield() as active:
                raise_if_cancelled(active)
                if not read_into(descriptor, targets, offset):
                    return False
                if digest is not None:
                    for page in pages:
                        digest.update(page)
            return True
        with self._buffers.lend(call) as buffer:
            some = buffer[: sum(map(len, targets))]
            if not read_into(descriptor, [some], offset):
                return False
            if digest is not None:
                digest.update(some[: sum(map(len, pages))])
            with call.shield() as active:
                raise_if_cancelled(active)
                scatter(some, targets)
        return True


def _fill_in_place(run: Sequence[SlotRead], descriptor: int, call: Call) -> bool:
    file = run[0].file
    gap, targets = memoryview(bytearray(file.geometry.slot_bytes - run[0].size)), list[memoryview]()
    for job in run:
        job.read.envelope = bytearray(ENVELOPE_BYTES)
        targets += job.read.parts
        targets.append(gap)
    with call.shield() as active:
        raise_if_cancelled(active)
        if not read_into(descriptor, targets[:-1], file.offset(run[0].slot)):
            return False
        for job in run:
            job.read.verify()
            job.whole = True
    return True


def _write_some(jobs: Sequence[SlotWrite], *, call: Call) -> None:
    for run in runs(jobs):
        _write_run(run, call)


def _write_run(run: Sequence[SlotWrite], call: Call) -> None:
    file, handle = run[0].file, None
    try:
        _stop_if_late(run, call)
        handle = file.borrow()
        _put(run, handle.descriptor, call)
    except OSError as error:
        if handle is not None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
            file.forget(handle)
        if len(run) == 1:
            run[0].fault = detached(error)
            return
        # The others have nothing to do with what is wrong with one of them.
        for job in run:
            _write_run([job], call)
        return
    for job in run:
        job.whole = True


def _put(run: Sequence[SlotWrite], descriptor: int, call: Call) -> None:
    file = run[0].file
    offset = file.offset(run[0].slot)
    if len(run) == 1 and run[0].size > PIECE_BYTES:
        _put_by_pieces(run[0], descriptor, offset, call)
        return
    sources = list[memoryview]()
    for job in run:
        sources += job.write.parts
        sources.append(memoryview(bytes(file.geometry.slot_bytes - job.size)))
    write_from(descriptor, sources[:-1], offset)


def _put_by_pieces(job: SlotWrite, descriptor: int, offset: int, call: Call) -> None:
    write, digest = job.write, running_checksum()
    for sources in pieces(write.buffers):
        for source in sources:
            digest.update(source)
        # The lease may have ended while the last piece was written.
        _stop_if_late([job], call)
        write_from(descriptor, sources, offset)
        offset += sum(map(len, sources))
    write.seal(digest.intdigest())
    _stop_if_late([job], call)
    write_from(descriptor, [memoryview(write.envelope)], offset)


def _stop_if_late(run: Sequence[SlotWrite], call: Call) -> None:
    if call.expired() or time.monotonic() >= min([job.until for job in run]):
        raise OSError(errno.ETIMEDOUT, "the deadline or the lease has passed")
