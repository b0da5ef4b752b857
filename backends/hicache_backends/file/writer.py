"""Writes bundles: many pages with few calls, into a temporary file that is published by renaming it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Index, tail_checksum
from hicache_backends.posix.faults import NO_ROOM, kept
from hicache_backends.posix.vectored import write_from
from hicache_storage.objects import running_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.catalog import Catalog
    from hicache_backends.file.clock import Clock
    from hicache_backends.file.drafts import Drafts
    from hicache_backends.file.names import TemporaryName
    from hicache_storage.objects import Call, ObjectWrite

logger = logging.getLogger(__name__)

MAX_BUNDLE_BYTES = 64 << 20
"""Eviction removes whole bundles, so they must not be large; larger ones are not written faster."""

MIN_BUNDLE_BYTES = 24 << 20
"""A call is not split into smaller bundles than this to keep more threads busy."""

PIECE_BYTES = 512 << 10
"""Written at a time on a local disk: the checksum brings a page into the core's cache, from where the kernel copies it.

Across a network it is the number of requests that counts, and a piece is a bundle.
"""

PART_BYTES = 512 << 10
"""Longer pages than a piece are written in such parts."""


@dataclass(slots=True, eq=False)
class Draft:
    """A bundle to be written, and how far it has come."""

    catalog: Catalog
    writes: list[ObjectWrite]
    name: TemporaryName
    created_us: int
    rank: int
    """Place among the bundles of a batch, from its tail, starting at 1; 0 for one that is alone."""
    descriptor: int = -1
    index: Index | None = None
    """Once all bytes are in the file."""
    checksum: int = 0
    """Its `tail_checksum`, then."""
    fault: OSError | None = None

    @property
    def keys(self) -> list[str]:
        return [write.key for write in self.writes]

    @property
    def size(self) -> int:
        return self.catalog.shape.bundle_bytes(self.keys)


class Writer:
    """Turns pages into finished temporary files. Safe for many threads.

    Args:
        preallocates: whether the file system reserves room quickly; 15 to 30% faster there, and it knows at once what fits.
        syncs: make the bytes survive a loss of power.
        threads: a call is split into so many bundles, as long as they do not become small.
        piece_bytes: written with one call.
    """

    def __init__(self, drafts: Drafts, clock: Clock, *, preallocates: bool, syncs: bool, threads: int, piece_bytes: int) -> None:
        self._drafts, self._clock = drafts, clock
        self._preallocates, self._syncs, self._threads = preallocates, syncs, threads
        self._piece_bytes = piece_bytes
        self._lock, self._moment = threading.Lock(), 0

    def plan(self, catalog: Catalog, writes: Sequence[ObjectWrite], limit: int | None = None) -> list[Draft]:
        """Divide the pages of a batch into bundles, in the order of their chain, as far as `limit` bytes go."""
        page_bytes = catalog.namespace.page_bytes
        total = len(writes) * page_bytes
        count = max(1, min(self._threads, total // MIN_BUNDLE_BYTES), -(-total // MAX_BUNDLE_BYTES))
        step = max(1, min(-(-len(writes) // count), MAX_BUNDLE_BYTES // page_bytes))
        created_us, drafts = self._next_moment(), list[Draft]()
        for start in range(0, len(writes), step):
            some = list(writes[start : start + step])
            if limit is not None:
                some = _fitting(catalog, some, limit)
            if not some:
                break
            size = catalog.shape.bundle_bytes([write.key for write in some])
            if limit is not None:
                limit -= size
            drafts.append(Draft(catalog, some, self._drafts.name(size), created_us, 0))
        if len(drafts) > 1:
            for rank, draft in enumerate(reversed(drafts), start=1):
                draft.rank = rank
        return drafts

    def _next_moment(self) -> int:
        """Microseconds since 1970, later than any before: of two copies of a page it must be certain which is the newer one."""
        with self._lock:
            self._moment = max(self._clock.now_ns() // 1_000, self._moment + 1)
            return self._moment

    def open(self, draft: Draft) -> None:
        """Make the file, so that its length counts as used; a fault is noted in the draft."""
        try:
            draft.descriptor = self._drafts.create(draft.name)
        except OSError as error:
            draft.fault = kept(error)

    def write(self, draft: Draft, call: Call) -> None:
        """Write a bundle and close its file. Where there is no room for all pages, it holds the first ones."""
        if draft.descriptor < 0:
            self.open(draft)
        if draft.fault is not None:
            return
        try:
            while not self._try(draft, call):
                draft.writes = draft.writes[: len(draft.writes) // 2]
            if draft.index is not None and self._syncs:
                os.fsync(draft.descriptor)
            if draft.rank:
                # The head of the chain must count as the most recently used, though it was written first.
                moment = draft.created_us * 1_000 + draft.rank
                os.utime(draft.descriptor, ns=(moment, moment))
        except OSError as error:
            draft.fault, draft.index = kept(error), None
        finally:
            self._close(draft)
        if draft.index is None:
            self._drafts.discard(draft.name)

    def discard(self, draft: Draft) -> None:
        """Give up a draft that was not written."""
        if draft.descriptor >= 0:
            self._close(draft)
        self._drafts.discard(draft.name)

    def _try(self, draft: Draft, call: Call) -> bool:
        """Write all pages and the tail; `False` if there is no room and fewer pages should be tried."""
        try:
            if self._preallocates:
                os.posix_fallocate(draft.descriptor, 0, draft.size)
            end = self._write_pages(draft, call)
            index = Index(draft.keys, b"".join([write.envelope for write in draft.writes]))
            tail = draft.catalog.shape.tail(index)
            write_from(draft.descriptor, [memoryview(tail)], end)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            draft.fault = kept(error)
            os.ftruncate(draft.descriptor, 0)
            return len(draft.writes) < 2
        draft.index, draft.checksum = index, tail_checksum(tail)
        return True

    def _write_pages(self, draft: Draft, call: Call) -> int:
        page_bytes = draft.catalog.namespace.page_bytes
        if page_bytes > self._piece_bytes:
            return self._write_long_pages(draft, call)
        step, offset = max(1, self._piece_bytes // page_bytes), 0
        for start in range(0, len(draft.writes), step):
            _stop_if_expired(call)
            some = draft.writes[start : start + step]
            for write in some:
                write.envelope  # noqa: B018 - computes the checksum now, see PIECE_BYTES
            write_from(draft.descriptor, [buffer for write in some for buffer in write.buffers], offset)
            offset += len(some) * page_bytes
        return offset

    def _write_long_pages(self, draft: Draft, call: Call) -> int:
        offset = 0
        for write in draft.writes:
            _stop_if_expired(call)
            checksum = running_checksum()
            for buffer in write.buffers:
                for at in range(0, len(buffer), PART_BYTES):
                    part = buffer[at : at + PART_BYTES]
                    checksum.update(part)
                    write_from(draft.descriptor, [part], offset)
                    offset += len(part)
            write.seal(checksum.intdigest())
        return offset

    def _close(self, draft: Draft) -> None:
        descriptor, draft.descriptor = draft.descriptor, -1
        try:
            # On NFS and FUSE this sends what is still in memory; it must be there before anyone reads it.
            os.close(descriptor)
        except OSError as error:
            draft.fault, draft.index = kept(error), None


def _stop_if_expired(call: Call) -> None:
    if call.expired():
        raise OSError(errno.ETIMEDOUT, "the deadline has passed")


def _fitting(catalog: Catalog, writes: list[ObjectWrite], limit: int) -> list[ObjectWrite]:
    """As many of the first pages as make a bundle of at most `limit` bytes."""
    low, high = 0, len(writes)
    while low < high:
        middle = (low + high + 1) // 2
        if catalog.shape.bundle_bytes([write.key for write in writes[:middle]]) <= limit:
            low = middle
        else:
            high = middle - 1
    return writes[:low]
