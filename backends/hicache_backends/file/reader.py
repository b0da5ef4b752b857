"""Reads pages from bundles into the host pool.

Where a read may hang, pages go through buffers of the driver's own instead, so that a call can end
at its deadline while the read still writes to its buffer.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import FOOTER_BYTES
from hicache_backends.file.page_index import Extent
from hicache_backends.posix.faults import GONE, NO_DESCRIPTOR, detached, raise_if_cancelled
from hicache_backends.posix.files import is_cached, read_cached_into, read_into, scatter
from hicache_storage.objects import ObjectRead, checksum, running_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.file.bundle import Bundle
    from hicache_backends.posix.buffers import Buffers
    from hicache_backends.posix.files import Descriptors, Handle
    from hicache_storage.objects import Call
    from hicache_storage.objects.thread_pool import ThreadPool

    ReadAll = Callable[[int, Sequence[memoryview], int], bool | None]
    """Fills buffers from an offset of a file, as `read_into` and `read_cached_into`."""

logger = logging.getLogger(__name__)

CHUNK_BYTES = 512 << 10
"""Read and verified at a time: what was read is still in the core's cache when its checksum is
computed.

At 64 KiB a page 9.7 GB/s, against 7.9 where a batch is read as a whole and then verified. A longer
page is read as a whole, or in such pieces through a buffer, which is so long.
"""

MAX_OPEN_EXTENTS = 64
"""Limit on bundles open for one call: many processes are limited to 1024 descriptors."""


@dataclass(slots=True, eq=False)
class ReadChunk(Extent):
    """Pages that are read at a time."""

    handle: Handle
    cached: bool
    """All of it is in the page cache, and can be read without waiting."""

    @property
    def page_bytes(self) -> int:
        return self.reads[0].namespace.page_bytes

    @property
    def size(self) -> int:
        return len(self.reads) * self.page_bytes


@dataclass(slots=True, eq=False)
class ReadOutcome:
    """The results of some reads. Threads append to it."""

    loaded: list[ObjectRead] = field(default_factory=list[ObjectRead])
    gone: list[Extent] = field(default_factory=list[Extent])
    """Their bundle is gone; another may have replaced it."""
    faults: list[OSError] = field(default_factory=list[OSError])
    """Errors that kept other pages from being read."""


@dataclass(eq=False, kw_only=True)
class Reader:
    """Reads batches of pages. Safe for many threads.

    Attributes:
        buffers: where reads go first; None to read straight into the host pool, where no read
            hangs.
        threads: limit on threads for one call.
        bytes_per_thread: a thread is used for at least so many bytes.
        direct: read past the page cache where the file system and the buffers allow it.
        on_disk: on a local disk. What is in its page cache is read straight into the host pool all
            the same; an I/O error that stays with one page, while others of its bundle can be
            read, is damage.
    """

    descriptors: Descriptors
    thread_pool: ThreadPool
    buffers: Buffers | None
    threads: int
    bytes_per_thread: int
    direct: bool
    on_disk: bool

    def read(self, extents: Sequence[Extent], call: Call) -> ReadOutcome:
        """Read pages into their buffers, and verify them."""
        outcome, left = ReadOutcome(), deque(extents)
        while left:
            self._run(self._read_chunks, self._open_extents(left, outcome), call, outcome)
        return outcome

    def read_cached(self, extents: Sequence[Extent], call: Call) -> bool:
        """Read and verify pages that are in the page cache, of files that are open or that the
        kernel can open from memory.

        It never waits for the disk.

        Returns:
            `True` if all of them were read and are sound. If not, the buffers may hold anything.
        """
        if len(extents) > MAX_OPEN_EXTENTS:
            return False
        chunks = list[ReadChunk]()
        for extent in extents:
            handle = self.descriptors.borrow_cached(extent.bundle.path, os.O_NOATIME)
            if handle is None or not self._is_cached(extent, handle):
                return False
            chunks += self._split(extent, handle, cached=True)
        outcome = ReadOutcome()
        # A worker that hangs in another call takes no part of this one: the caller reads what no
        # worker has begun.
        self._run(self._read_cached_chunks, chunks, call, outcome)
        return len(outcome.loaded) == sum([len(extent.reads) for extent in extents])

    def _read_cached_chunks(
        self, chunks: Sequence[ReadChunk], call: Call, outcome: ReadOutcome
    ) -> None:
        for chunk in chunks:
            # The expected way to fail is an eviction from the page cache meanwhile; the ordinary
            # read handles everything else.
            try:
                if call.expired() or not self._read_in_place(chunk, call, read_cached_into):
                    return
            except OSError:
                return
            outcome.loaded += chunk.reads

    def _open_extents(self, left: deque[Extent], outcome: ReadOutcome) -> list[ReadChunk]:
        """Open as many extents as may be open at a time, and divide them into chunks.

        Their bundles are closed, or left to the cache of descriptors, with the last chunk.
        """
        chunks = list[ReadChunk]()
        for _ in range(min(len(left), MAX_OPEN_EXTENTS)):
            extent = left.popleft()
            try:
                chunks += self._open(extent)
            except OSError as error:
                if error.errno in NO_DESCRIPTOR and chunks:
                    # The bundles that are open now are closed when they have been read.
                    left.appendleft(extent)
                    return chunks
                if error.errno in GONE:
                    outcome.gone.append(extent)
                else:
                    outcome.faults.append(detached(error))
        return chunks

    def _open(self, extent: Extent) -> list[ReadChunk]:
        """Open an extent's bundle, begin to read ahead, and divide the extent into chunks."""
        handle = self._handle(extent.bundle)
        cached = self._is_cached(extent, handle)
        if not cached and not self.direct:
            # Costs nothing where the pages are cached, and doubles the speed where they are not.
            os.posix_fadvise(handle.descriptor, *_byte_range(extent), os.POSIX_FADV_WILLNEED)
        return self._split(extent, handle, cached=cached)

    def _is_cached(self, extent: Extent, handle: Handle) -> bool:
        return bool(handle.flags & os.O_NOATIME) and is_cached(
            handle.descriptor, *_byte_range(extent)
        )

    def _split(self, extent: Extent, handle: Handle, *, cached: bool) -> list[ReadChunk]:
        step = max(1, CHUNK_BYTES // extent.reads[0].namespace.page_bytes)
        return [
            ReadChunk(extent.bundle, extent.page + at, extent.reads[at : at + step], handle, cached)
            for at in range(0, len(extent.reads), step)
        ]

    def _handle(self, bundle: Bundle) -> Handle:
        wanted = os.O_DIRECT if self.direct else os.O_NOATIME if self.on_disk else 0
        try:
            return self.descriptors.borrow(bundle.path, wanted)
        except OSError as error:
            if wanted == os.O_DIRECT and error.errno == errno.EINVAL:
                self._disable_direct(bundle)
            elif wanted != os.O_NOATIME or error.errno != errno.EPERM:
                raise
            # EPERM: O_NOATIME is only for the owner of the file.
            return self.descriptors.borrow(bundle.path)

    def _run(
        self,
        read: Callable[[Sequence[ReadChunk], Call, ReadOutcome], None],
        chunks: list[ReadChunk],
        call: Call,
        outcome: ReadOutcome,
    ) -> None:
        """Read chunks in tasks of about equal length, one for each thread."""
        total, done = sum([chunk.size for chunk in chunks]), 0
        count = max(1, min(self.threads, total // self.bytes_per_thread))
        tasks = [list[ReadChunk]() for _ in range(count)]
        for chunk in chunks:
            tasks[min(count - 1, done * count // total)].append(chunk)
            done += chunk.size
        self.thread_pool.run([partial(read, some, call, outcome) for some in tasks if some])

    def _read_chunks(self, chunks: Sequence[ReadChunk], call: Call, outcome: ReadOutcome) -> None:
        for chunk in chunks:
            if call.expired():
                return
            try:
                self._read_chunk(chunk, call, outcome)
            except OSError as error:
                outcome.faults.append(detached(error))

    def _read_chunk(self, chunk: ReadChunk, call: Call, outcome: ReadOutcome) -> None:
        try:
            whole = self._read_pages(chunk, call)
        except OSError as error:
            # By the handle, not by `self.direct`: another piece of this call may have turned that
            # off already.
            if error.errno == errno.EINVAL and chunk.handle.flags & os.O_DIRECT:
                self._disable_direct(chunk.bundle)
                chunk.handle = self.descriptors.borrow(chunk.bundle.path)
                self._read_chunk(chunk, call, outcome)
                return
            # The open file may belong to a mount that has died, and be in order when it is opened
            # again.
            self.descriptors.forget(chunk.bundle.path)
            if error.errno == errno.ESTALE:
                # What NFS says of an open file that another node has removed.
                outcome.gone.append(chunk)
                return
            if len(chunk.reads) == 1:
                if self._is_bad_sector(chunk, error):
                    _mark_damaged(chunk)
                raise
            whole = False
        if whole:
            outcome.loaded += chunk.reads
        elif len(chunk.reads) > 1:
            self._read_singly(chunk, call, outcome)
        else:
            # The file ends too early: it was cut after its index had been read.
            _mark_damaged(chunk)

    def _read_singly(self, chunk: ReadChunk, call: Call, outcome: ReadOutcome) -> None:
        """Read the pages one by one, so that only the unreadable ones are missing."""
        for number, read in enumerate(chunk.reads, start=chunk.page):
            try:
                self._read_chunk(replace(chunk, page=number, reads=[read]), call, outcome)
            except OSError as error:
                outcome.faults.append(detached(error))

    def _read_pages(self, chunk: ReadChunk, call: Call) -> bool:
        """Fill the buffers of a chunk and verify its pages in this thread.

        The pages are in the cache of its core then.
        """
        if self.buffers is None:
            return bool(self._read_in_place(chunk, call, read_into))
        if chunk.cached:
            whole = self._read_in_place(chunk, call, read_cached_into)
            if whole is not None:
                return whole
        if chunk.page_bytes > CHUNK_BYTES:
            return self._read_long_page(chunk, self.buffers, call)
        return self._read_buffered(chunk, self.buffers, call)

    def _read_in_place(self, chunk: ReadChunk, call: Call, read_all: ReadAll) -> bool | None:
        """Read into the host pool; the caller does not leave meanwhile."""
        targets = [buffer for read in chunk.reads for buffer in read.buffers]
        with call.shield() as active:
            raise_if_cancelled(active)
            whole = read_all(chunk.handle.descriptor, targets, chunk.page * chunk.page_bytes)
            if whole:
                for page, read in enumerate(chunk.reads, start=chunk.page):
                    read.envelope = chunk.bundle.envelope(page)
                    read.verify()
        return whole

    def _read_buffered(self, chunk: ReadChunk, buffers: Buffers, call: Call) -> bool:
        """Read through a buffer: nothing reaches the host pool before it is verified.

        Pages are copied only while the caller still waits for them.
        """
        length, sound = chunk.page_bytes, list[tuple[ObjectRead, memoryview]]()
        with buffers.lend(call) as buffer:
            if not read_into(chunk.handle.descriptor, [buffer[: chunk.size]], chunk.page * length):
                return False
            for number, read in enumerate(chunk.reads):
                page = buffer[number * length : (number + 1) * length]
                read.envelope = chunk.bundle.envelope(chunk.page + number)
                if read.verify(checksum([page]) if read.verifies_checksum else None):
                    sound.append((read, page))
            with call.shield() as active:
                raise_if_cancelled(active)
                for read, page in sound:
                    scatter(page, read.buffers)
        return True

    def _read_long_page(self, chunk: ReadChunk, buffers: Buffers, call: Call) -> bool:
        """Read a page that is longer than a buffer, piece by piece."""
        read, offset = chunk.reads[0], chunk.page * chunk.page_bytes
        digest = running_checksum() if read.verifies_checksum else None
        for target in read.buffers:
            for at in range(0, len(target), CHUNK_BYTES):
                part = target[at : at + CHUNK_BYTES]
                with buffers.lend(call) as buffer:
                    piece = buffer[: len(part)]
                    if not read_into(chunk.handle.descriptor, [piece], offset):
                        return False
                    if digest is not None:
                        digest.update(piece)
                    with call.shield() as active:
                        raise_if_cancelled(active)
                        part[:] = piece
                offset += len(part)
        read.envelope = chunk.bundle.envelope(chunk.page)
        read.verify(None if digest is None else digest.intdigest())
        return True

    def _is_bad_sector(self, chunk: ReadChunk, error: OSError) -> bool:
        """Decide whether a failed read is damage of the page.

        It is if the file system can still read the footer of the same file.
        """
        if error.errno != errno.EIO or not self.on_disk:
            return False
        end = chunk.bundle.name.size - FOOTER_BYTES
        try:
            handle = self.descriptors.borrow(chunk.bundle.path)
            os.posix_fadvise(handle.descriptor, end, FOOTER_BYTES, os.POSIX_FADV_DONTNEED)
            return read_into(handle.descriptor, [memoryview(bytearray(FOOTER_BYTES))], end)
        except OSError:
            return False

    def _disable_direct(self, bundle: Bundle) -> None:
        if self.direct:
            logger.warning(
                "direct_io is not possible for %s with these buffers; reading through the page "
                "cache",
                bundle.path,
            )
        self.direct = False


def _mark_damaged(chunk: ReadChunk) -> None:
    """Note that the only page of a chunk cannot be read, and which copy of it that is."""
    read = chunk.reads[0]
    read.envelope = chunk.bundle.envelope(chunk.page)
    read.damaged = True


def _byte_range(extent: Extent) -> tuple[int, int]:
    """Offset and length of an extent in its bundle, in bytes."""
    page_bytes = extent.reads[0].namespace.page_bytes
    return extent.page * page_bytes, len(extent.reads) * page_bytes
