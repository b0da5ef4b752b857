"""Reads pages from bundles: straight into the host pool, or, where a read may hang, through buffers of the driver's own."""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import FOOTER_BYTES
from hicache_backends.file.catalog import Run
from hicache_backends.posix.faults import GONE, NO_DESCRIPTOR, kept, stop_unless
from hicache_backends.posix.page_cache import is_cached, read_cached_into
from hicache_backends.posix.vectored import read_into, scatter
from hicache_storage.objects import ObjectRead, running_checksum

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from xxhash import xxh3_64

    from hicache_backends.file.shelf import Bundle
    from hicache_backends.posix.buffers import Buffers
    from hicache_backends.posix.descriptors import Descriptors, Handle
    from hicache_backends.posix.workers import Workers
    from hicache_storage.objects import Call

    ReadAll = Callable[[int, Sequence[memoryview], int], bool | None]
    """Fills buffers from an offset of a file, as `read_into` and `read_cached_into`."""

logger = logging.getLogger(__name__)

PIECE_BYTES = 512 << 10
"""Read and verified at a time: what was read is still in the core's cache when its checksum is computed.

At 64 KiB a page 9.7 GB/s, against 7.9 where a batch is read as a whole and then verified; longer pages are read in
such pieces, at 1 MiB 8.4 GB/s instead of 7.9.
"""

OPEN_RUNS = 64
"""Bundles open at a time for one call: a process has often no more than 1024 descriptors."""


@dataclass(slots=True, eq=False)
class Piece:
    """Consecutive pages of one bundle, read at a time."""

    handle: Handle
    bundle: Bundle
    page: int
    """Number of the first one."""
    reads: list[ObjectRead]
    cached: bool
    """All of it is in the page cache, and can be read without waiting."""
    may_wait: bool = True
    """What turns out not to be in the page cache is read all the same."""

    @property
    def page_bytes(self) -> int:
        return self.reads[0].namespace.page_bytes

    @property
    def size(self) -> int:
        return len(self.reads) * self.page_bytes


@dataclass(slots=True, eq=False)
class Outcome:
    """What has become of some reads. Threads append to it."""

    arrived: list[ObjectRead] = field(default_factory=list[ObjectRead])
    gone: list[Run] = field(default_factory=list[Run])
    """Their bundle is not there any more; another may have taken its place."""
    faults: list[OSError] = field(default_factory=list[OSError])
    """What kept others from being read."""


class Reader:
    """Reads batches of pages. Safe for many threads.

    Args:
        buffers: where reads go first; None to read straight into the host pool, and keep the caller until that is done.
        trusts_cache: read straight into the host pool all the same what is in the page cache of a local file system.
        threads: most threads for one call.
        bytes_per_thread: no thread is used for less.
        direct: read past the page cache where the file system and the buffers allow it.
        verifies: whether checksums are wanted.
        retires_bad_sectors: an I/O error that stays with one page, while others of its bundle are read, is damage.
    """

    def __init__(
        self,
        descriptors: Descriptors,
        workers: Workers,
        buffers: Buffers | None,
        *,
        threads: int,
        bytes_per_thread: int,
        direct: bool,
        trusts_cache: bool,
        verifies: bool,
        retires_bad_sectors: bool,
    ) -> None:
        self._descriptors, self._workers, self._buffers = descriptors, workers, buffers
        self._threads, self._bytes_per_thread = threads, bytes_per_thread
        self._direct, self._verifies = direct, verifies
        self._trusts_cache = trusts_cache and buffers is not None
        self._retires_bad_sectors = retires_bad_sectors

    def read(self, runs: Sequence[Run], call: Call) -> Outcome:
        """Read pages into their buffers, and verify them."""
        outcome, left = Outcome(), deque(runs)
        while left:
            self._read_some(left, call, outcome)
        return outcome

    def read_cached(self, runs: Sequence[Run], call: Call) -> bool:
        """Read and verify pages that are in the page cache, of files that are open, without waiting for the disk.

        Returns:
            Whether all of them were read and are sound. If not, the buffers may hold anything.
        """
        if not self._trusts_cache or len(runs) > OPEN_RUNS:
            return False
        pieces = list[Piece]()
        for run in runs:
            handle = self._descriptors.borrow_open(run.bundle.path, os.O_NOATIME)
            if handle is None or not self._is_cached(run, handle):
                return False
            pieces += self._cut(run, handle, cached=True, may_wait=False)
        outcome = Outcome()
        # A worker that hangs in another call takes no part of this one: the caller reads what no worker has begun.
        self._workers.run([partial(self._read_cached_part, part, call, outcome) for part in self._share(pieces)])
        return len(outcome.arrived) == sum([len(run.reads) for run in runs])

    def _read_cached_part(self, part: Sequence[Piece], call: Call, outcome: Outcome) -> None:
        for piece in part:
            # The expected way to fail is an eviction from the page cache meanwhile; the ordinary read handles everything else.
            try:
                if call.expired() or not self._read_pages(piece, call):
                    return
            except OSError:
                return
            outcome.arrived += piece.reads

    def _read_some(self, left: deque[Run], call: Call, outcome: Outcome) -> None:
        """Read as many runs as may be open at a time; they are closed, or left to the cache, on return."""
        parts = self._share(self._open_some(left, outcome))
        self._workers.run([partial(self._read_part, part, call, outcome) for part in parts])

    def _open_some(self, left: deque[Run], outcome: Outcome) -> list[Piece]:
        """Take as many runs as may be open at a time."""
        pieces = list[Piece]()
        for _ in range(min(len(left), OPEN_RUNS)):
            run = left.popleft()
            try:
                pieces += self._open(run)
            except OSError as error:
                if error.errno in NO_DESCRIPTOR and pieces:
                    # Those that are open now will not be when they have been read.
                    left.appendleft(run)
                    return pieces
                if error.errno in GONE:
                    outcome.gone.append(run)
                else:
                    outcome.faults.append(kept(error))
        return pieces

    def _open(self, run: Run) -> list[Piece]:
        """Open a run's bundle, begin to read ahead, and cut the run into pieces."""
        handle = self._handle(run.bundle)
        cached = self._is_cached(run, handle)
        if not cached and not self._direct:
            # Costs nothing where the pages are cached, and doubles the speed where they are not.
            os.posix_fadvise(handle.descriptor, *_byte_range(run), os.POSIX_FADV_WILLNEED)
        return self._cut(run, handle, cached=cached, may_wait=True)

    def _is_cached(self, run: Run, handle: Handle) -> bool:
        return bool(handle.flags & os.O_NOATIME) and is_cached(handle.descriptor, *_byte_range(run))

    def _cut(self, run: Run, handle: Handle, *, cached: bool, may_wait: bool) -> list[Piece]:
        step = max(1, PIECE_BYTES // run.reads[0].namespace.page_bytes)
        return [
            Piece(handle, run.bundle, run.page + at, run.reads[at : at + step], cached, may_wait)
            for at in range(0, len(run.reads), step)
        ]

    def _handle(self, bundle: Bundle) -> Handle:
        wanted = os.O_DIRECT if self._direct else os.O_NOATIME if self._trusts_cache else 0
        try:
            return self._descriptors.borrow(bundle.path, wanted)
        except OSError as error:
            if wanted == os.O_DIRECT and error.errno == errno.EINVAL:
                self._stop_direct(bundle)
            elif wanted != os.O_NOATIME or error.errno != errno.EPERM:
                raise
            # Else it is somebody else's file, and only its owner may leave the time of access alone.
            return self._descriptors.borrow(bundle.path)

    def _share(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Parts of about equal length, one for each thread."""
        total = sum([piece.size for piece in pieces])
        count = min(self._threads, total // self._bytes_per_thread)
        if count < 2:
            return [pieces] if pieces else []
        parts, done = [list[Piece]() for _ in range(count)], 0
        for piece in pieces:
            parts[min(count - 1, done * count // total)].append(piece)
            done += piece.size
        return [part for part in parts if part]

    def _read_part(self, part: Sequence[Piece], call: Call, outcome: Outcome) -> None:
        for piece in part:
            if call.expired():
                return
            try:
                self._read_piece(piece, call, outcome)
            except OSError as error:
                outcome.faults.append(kept(error))

    def _read_piece(self, piece: Piece, call: Call, outcome: Outcome) -> None:
        try:
            whole = self._read_pages(piece, call)
        except OSError as error:
            # By the handle, not by `self._direct`: another piece of this call may have turned that off already.
            if error.errno == errno.EINVAL and piece.handle.flags & os.O_DIRECT:
                self._stop_direct(piece.bundle)
                piece.handle = self._descriptors.borrow(piece.bundle.path)
                self._read_piece(piece, call, outcome)
                return
            # The open file may belong to a mount that has died, and be in order when it is opened again.
            self._descriptors.forget(piece.bundle.path)
            if error.errno == errno.ESTALE:
                # What NFS says of an open file that another node has removed.
                outcome.gone.append(Run(piece.bundle, piece.page, piece.reads))
                return
            if len(piece.reads) == 1:
                piece.reads[0].damaged = self._is_bad_sector(piece, error)
                raise
            whole = False
        if whole:
            outcome.arrived += piece.reads
        elif len(piece.reads) > 1:
            self._read_singly(piece, call, outcome)
        else:
            # The file ends too early: it was cut after its index had been read.
            piece.reads[0].damaged = True

    def _read_singly(self, piece: Piece, call: Call, outcome: Outcome) -> None:
        """Read the pages one by one, so that only those are missing that cannot be read."""
        for number, read in enumerate(piece.reads, start=piece.page):
            try:
                self._read_piece(replace(piece, page=number, reads=[read]), call, outcome)
            except OSError as error:
                outcome.faults.append(kept(error))

    def _read_pages(self, piece: Piece, call: Call) -> bool:
        """Fill the buffers of a piece and verify its pages in this thread, while they are in its core's cache."""
        if piece.page_bytes > PIECE_BYTES and (self._verifies or self._buffers is not None):
            return self._read_long_page(piece, call)
        if self._buffers is None:
            return bool(self._read_straight(piece, call, read_into))
        if piece.cached:
            whole = self._read_straight(piece, call, read_cached_into)
            if whole is not None or not piece.may_wait:
                return bool(whole)
        return self._read_buffered(piece, self._buffers, call)

    def _read_straight(self, piece: Piece, call: Call, read_all: ReadAll) -> bool | None:
        """Read into the host pool; the caller does not leave meanwhile."""
        targets = [buffer for read in piece.reads for buffer in read.buffers]
        with call.shield() as active:
            stop_unless(active)
            whole = read_all(piece.handle.descriptor, targets, piece.page * piece.page_bytes)
            if whole:
                for page, read in enumerate(piece.reads, start=piece.page):
                    read.envelope = piece.bundle.envelope(page)
                    read.verify()
        return whole

    def _read_buffered(self, piece: Piece, buffers: Buffers, call: Call) -> bool:
        """As `_read_pages`, and nothing reaches the host pool before it is known to be sound and waited for."""
        length, sound = piece.page_bytes, list[tuple[ObjectRead, memoryview]]()
        with buffers.lend(call) as buffer:
            if not read_into(piece.handle.descriptor, [buffer[: piece.size]], piece.page * length):
                return False
            for number, read in enumerate(piece.reads):
                page = buffer[number * length : (number + 1) * length]
                read.envelope = piece.bundle.envelope(piece.page + number)
                if read.verify(self._checksum(page)):
                    sound.append((read, page))
            with call.shield() as active:
                stop_unless(active)
                for read, page in sound:
                    scatter(page, read.buffers)
        return True

    def _read_long_page(self, piece: Piece, call: Call) -> bool:
        read, checksum, offset = piece.reads[0], running_checksum(), piece.page * piece.page_bytes
        for buffer in read.buffers:
            for at in range(0, len(buffer), PIECE_BYTES):
                target = buffer[at : at + PIECE_BYTES]
                if not self._read_long_part(piece, target, offset, checksum, call):
                    return False
                offset += len(target)
        read.envelope = piece.bundle.envelope(piece.page)
        read.verify(checksum.intdigest())
        return True

    def _read_long_part(self, piece: Piece, target: memoryview, offset: int, checksum: xxh3_64, call: Call) -> bool:
        descriptor = piece.handle.descriptor
        if self._buffers is None or piece.cached:
            read_all: ReadAll = read_into if self._buffers is None else read_cached_into
            with call.shield() as active:
                stop_unless(active)
                whole = read_all(descriptor, [target], offset)
                if whole:
                    checksum.update(target)
            if whole is not None or self._buffers is None or not piece.may_wait:
                return bool(whole)
        with self._buffers.lend(call) as buffer:
            part = buffer[: len(target)]
            if not read_into(descriptor, [part], offset):
                return False
            checksum.update(part)
            with call.shield() as active:
                stop_unless(active)
                target[:] = part
        return True

    def _checksum(self, page: memoryview) -> int | None:
        if not self._verifies:
            return None
        checksum = running_checksum()
        checksum.update(page)
        return checksum.intdigest()

    def _is_bad_sector(self, piece: Piece, error: OSError) -> bool:
        """Whether a failed read is the page's fault: the file system is in order where it serves the file's footer."""
        if error.errno != errno.EIO or not self._retires_bad_sectors:
            return False
        end = piece.bundle.name.size - FOOTER_BYTES
        try:
            handle = self._descriptors.borrow(piece.bundle.path)
            os.posix_fadvise(handle.descriptor, end, FOOTER_BYTES, os.POSIX_FADV_DONTNEED)
            return read_into(handle.descriptor, [memoryview(bytearray(FOOTER_BYTES))], end)
        except OSError:
            return False

    def _stop_direct(self, bundle: Bundle) -> None:
        if self._direct:
            logger.warning("direct_io is not possible for %s with these buffers; reading through the page cache", bundle.path)
        self._direct = False


def _byte_range(run: Run) -> tuple[int, int]:
    """Offset and length of a run in its bundle."""
    page_bytes = run.reads[0].namespace.page_bytes
    return run.page * page_bytes, len(run.reads) * page_bytes
