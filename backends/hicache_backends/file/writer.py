"""Writes bundles, with few system calls, into temporary files."""

from __future__ import annotations

import errno
import logging
import os
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import BundleIndex, tail_checksum
from hicache_backends.posix.faults import detached
from hicache_backends.posix.files import write_from
from hicache_storage.spec import StorageRefusedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.page_index import PageIndex
    from hicache_backends.file.temp_files import TempFiles, TemporaryName
    from hicache_backends.posix.directories import Mount
    from hicache_storage.objects import Call, ObjectWrite

logger = logging.getLogger(__name__)

MAX_BUNDLE_BYTES = 64 << 20
"""Eviction removes whole bundles, so they must not be large; larger ones are not written faster."""

MIN_BUNDLE_BYTES = 8 << 20
"""A call is not divided into smaller bundles than this to use more threads.

Two threads that write to one file wait for each other in the kernel, so each takes a file.
"""

MOUNT_MIN_BUNDLE_BYTES = 24 << 20
"""The same on a network mount, where each file costs requests."""

CHUNK_BYTES = 512 << 10
"""Written at a time on a local disk, or one page if that is longer: the checksum brings a page into
the core's cache, from where the kernel copies it.

Across a network it is the number of requests that counts, and a chunk is a whole bundle.
"""


@dataclass(slots=True, eq=False)
class PendingBundle:
    """A bundle being written, and its progress."""

    page_index: PageIndex
    writes: list[ObjectWrite]
    name: TemporaryName
    """With the length of the whole file."""
    created_us: int
    rank: int
    """Position among the bundles of a batch, from its tail, starting at 1; 0 for a single one."""
    descriptor: int = -1
    index: BundleIndex | None = None
    """Set when all bytes are in the file."""
    checksum: int = 0
    """Its `tail_checksum`, set then."""
    fault: OSError | StorageRefusedError | None = None


@dataclass(eq=False, kw_only=True)
class Writer:
    """Writes pages to temporary files that are complete bundles. Safe for many threads.

    Attributes:
        syncs: make the bytes survive a loss of power.
        threads: a call is divided into so many bundles, as long as they do not become small.
    """

    temp_files: TempFiles
    mount: Mount
    syncs: bool
    threads: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _last_timestamp: int = 0

    def plan(
        self, page_index: PageIndex, writes: Sequence[ObjectWrite], limit: int | None = None
    ) -> list[PendingBundle]:
        """Divide the pages of a batch into bundles, in the order of their chain.

        Args:
            limit: bytes in all bundles; further pages are left out.
        """
        page_bytes = page_index.namespace.page_bytes
        total = len(writes) * page_bytes
        small = MIN_BUNDLE_BYTES if self.mount.is_local else MOUNT_MIN_BUNDLE_BYTES
        count = max(1, min(self.threads, total // small), -(-total // MAX_BUNDLE_BYTES))
        step = max(1, min(-(-len(writes) // count), MAX_BUNDLE_BYTES // page_bytes))
        created_us, pending_bundles = self._next_timestamp(), list[PendingBundle]()
        for start in range(0, len(writes), step):
            some = list(writes[start : start + step])
            size = page_index.format.bundle_bytes([write.key for write in some])
            if limit is not None:
                while some and size > limit:
                    some.pop()
                    size = page_index.format.bundle_bytes([write.key for write in some])
                limit -= size
            if not some:
                break
            pending_bundles.append(
                PendingBundle(page_index, some, self.temp_files.name(size), created_us, 0)
            )
        if len(pending_bundles) > 1:
            for rank, pending in enumerate(reversed(pending_bundles), start=1):
                pending.rank = rank
        return pending_bundles

    def _next_timestamp(self) -> int:
        """Microseconds since 1970, later than any before.

        Of two copies of a page it must be certain which one is newer.
        """
        with self._lock:
            self._last_timestamp = max(
                self.temp_files.clock.now_ns() // 1_000, self._last_timestamp + 1
            )
            return self._last_timestamp

    def open(self, pending: PendingBundle) -> None:
        """Create the file, so that its length counts as used.

        A fault is noted in the pending bundle.
        """
        try:
            pending.descriptor = self.temp_files.create(pending.name)
        except OSError as error:
            pending.fault = detached(error)

    def write(self, pending: PendingBundle, call: Call) -> None:
        """Write a bundle and close its file."""
        if pending.descriptor < 0 and not isinstance(pending.fault, StorageRefusedError):
            # Once more, where an eviction has made room for a file.
            pending.fault = None
            self.open(pending)
        if pending.fault is not None:
            return
        try:
            self._write_all(pending, call)
            if self.syncs:
                os.fsync(pending.descriptor)
            if pending.rank:
                # The head of the chain must count as the most recently used, though it was written
                # first.
                moment = pending.created_us * 1_000 + pending.rank
                os.utime(pending.descriptor, ns=(moment, moment))
        except OSError as error:
            pending.fault = detached(error)
            pending.index = None
        finally:
            self._close(pending)
        if pending.index is None:
            self.temp_files.discard(pending.name)

    def discard(self, pending: PendingBundle, reason: str = "") -> None:
        """Give up a bundle that was not written, and note why it is refused."""
        if reason:
            pending.fault = StorageRefusedError(reason)
        if pending.descriptor >= 0:
            self._close(pending)
        self.temp_files.discard(pending.name)

    def _write_all(self, pending: PendingBundle, call: Call) -> None:
        """Write all pages and the tail."""
        if self.mount.preallocates:
            # 15 to 30% faster, and a full disk is noticed before the first page is written.
            os.posix_fallocate(pending.descriptor, 0, pending.name.size)
        end = self._write_pages(pending, call)
        index = BundleIndex(
            tuple([write.key for write in pending.writes]),
            b"".join([write.envelope for write in pending.writes]),
        )
        tail = pending.page_index.format.tail(index)
        write_from(pending.descriptor, [memoryview(tail)], end)
        pending.index = index
        pending.checksum = tail_checksum(tail)

    def _write_pages(self, pending: PendingBundle, call: Call) -> int:
        page_bytes = pending.page_index.namespace.page_bytes
        chunk = CHUNK_BYTES if self.mount.is_local else MAX_BUNDLE_BYTES
        step, offset = max(1, chunk // page_bytes), 0
        for start in range(0, len(pending.writes), step):
            if call.expired():
                raise OSError(errno.ETIMEDOUT, "the deadline has passed")
            some = pending.writes[start : start + step]
            for write in some:
                write.envelope  # noqa: B018 - computes the checksum now, see CHUNK_BYTES
            write_from(
                pending.descriptor, [buffer for write in some for buffer in write.buffers], offset
            )
            offset += len(some) * page_bytes
        return offset

    def _close(self, pending: PendingBundle) -> None:
        descriptor = pending.descriptor
        pending.descriptor = -1
        try:
            # On NFS and FUSE this sends what is still in memory; it must be there before anyone
            # reads it.
            os.close(descriptor)
        except OSError as error:
            pending.fault = detached(error)
            pending.index = None
