"""Rewrites of bundles without some of their pages: deletion and repair.

A bundle never changes in place: readers without a lock would see it half changed. The remaining
pages are copied to a new bundle, which replaces the old one.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Bundle, BundleIndex, tail_checksum
from hicache_backends.file.page_index import Extent
from hicache_backends.posix.faults import detached
from hicache_backends.posix.files import read_into, write_from
from hicache_storage.objects import ObjectRead

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from hicache_backends.file.page_index import Location, PageIndex
    from hicache_backends.file.publisher import Publisher
    from hicache_backends.file.reader import Reader
    from hicache_backends.posix.files import Descriptors
    from hicache_storage.objects import Call, Namespace
    from hicache_storage.objects.recorder import StatsRecorder
    from hicache_storage.spec import RemovalReason

logger = logging.getLogger(__name__)

READS = 2
"""A page that does not fit its envelope is read once more, from the file opened anew."""

MAX_ATTEMPTS = 24
WAIT_SECONDS = 0.001
"""Grows with each attempt: the process that has claimed a bundle needs time to replace it."""


class Rewriter:
    """Replaces bundles by ones with fewer pages. Safe for many threads.

    Damaged pages among those to be kept are left out too, and counted: a page in a new bundle
    counts as sound.
    """

    def __init__(
        self, publisher: Publisher, descriptors: Descriptors, recorder: StatsRecorder
    ) -> None:
        self.publisher = publisher
        self._feed = publisher.feed
        self._temp_files = publisher.temp_files
        self._descriptors = descriptors
        self._recorder = recorder

    def drop_all(
        self, page_index: PageIndex, find: Callable[[], Sequence[Location]], reason: RemovalReason
    ) -> None:
        """Drop all pages that `find` returns, and announce it.

        `find` is called again if another process moves the pages meanwhile.

        Raises:
            OSError: some may still be there.
        """
        for attempt in range(MAX_ATTEMPTS):
            bundles = dict[Bundle, set[str]]()
            # A removal that another thread is making hides its pages, and may not succeed.
            with page_index.bundle_set.removing:
                page_index.catch_up(self._feed.read())
                for bundle, page in find():
                    bundles.setdefault(bundle, set()).add(bundle.keys[page])
            # First what frees room, and takes none: a full disk does not keep it.
            whole = [bundle for bundle, keys in bundles.items() if keys.issuperset(bundle.keys)]
            outcomes = self.publisher.remove(page_index.bundle_set, whole, reason)
            for bundle in bundles.keys() - set(whole):
                try:
                    if not self.drop(page_index, bundle, bundles[bundle], reason):
                        outcomes += self.publisher.remove(page_index.bundle_set, [bundle], reason)
                except OSError as error:
                    outcomes.append(not isinstance(error, FileNotFoundError) and detached(error))
            # What has failed or was faster comes with events of its own.
            self._feed.announce()
            for outcome in outcomes:
                if isinstance(outcome, OSError):
                    raise outcome
            if all(outcomes):
                return
            # The replacement may not be announced yet, or not be in place.
            time.sleep(attempt * WAIT_SECONDS)
            page_index.bundle_set.invalidate()
        raise FileNotFoundError("others keep on rewriting the same bundles")

    def drop(
        self, page_index: PageIndex, bundle: Bundle, keys: Container[str], reason: RemovalReason
    ) -> bool:
        """Replace a bundle by one without these pages, and announce it.

        Returns:
            `False` if none of the other pages is sound; the bundle is as it was.

        Raises:
            FileNotFoundError: another process has removed or replaced it meanwhile.
            OSError: the bundle is as it was.
        """
        kept = [page for page, key in enumerate(bundle.keys) if key not in keys]
        name = self._temp_files.name(
            page_index.format.bundle_bytes([bundle.keys[page] for page in kept])
        )
        try:
            descriptor = self._temp_files.create(name)
            try:
                sound = self._copy(page_index, bundle, kept, descriptor)
                index = BundleIndex(
                    tuple([bundle.keys[page] for page in sound]),
                    b"".join([bundle.envelope(page) for page in sound]),
                )
                tail, end = (
                    page_index.format.tail(index),
                    len(sound) * page_index.namespace.page_bytes,
                )
                write_from(descriptor, [memoryview(tail)], end)
                # The copy inherits the recency: a rewrite is not a use, and must not save the pages
                # from eviction.
                os.utime(descriptor, ns=(bundle.recency, bundle.recency))
                if self._feed.syncs:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            page_index.note_damaged([bundle.keys[page] for page in set(kept).difference(sound)])
            if sound:
                size, checksum = end + len(tail), tail_checksum(tail)
                self.publisher.replace(
                    page_index, bundle, name, index, size=size, checksum=checksum, reason=reason
                )
            else:
                self._temp_files.discard(name)
        except OSError:
            self._temp_files.discard(name)
            raise
        if damaged := len(kept) - len(sound):
            pool = page_index.namespace.pool
            self._recorder.count(pool, pages_damaged=damaged)
            logger.warning(
                "%d more damaged pages in pool %s; they are misses until they are set again",
                damaged,
                pool,
            )
        return bool(sound)

    def _copy(
        self, page_index: PageIndex, bundle: Bundle, pages: Sequence[int], target: int
    ) -> list[int]:
        """Copy the sound pages one after the other, and return their numbers."""
        page_bytes, sound = page_index.namespace.page_bytes, list[int]()
        source, buffer = self._descriptors.borrow(bundle.path), memoryview(bytearray(page_bytes))
        for page in pages:
            for _ in range(READS):
                if read_into(source.descriptor, [buffer], page * page_bytes) and _fits(
                    page_index.namespace, bundle, page, buffer
                ):
                    write_from(target, [buffer], len(sound) * page_bytes)
                    sound.append(page)
                    break
                self._descriptors.forget(bundle.path)
                source = self._descriptors.borrow(bundle.path)
        return sound


def _fits(namespace: Namespace, bundle: Bundle, page: int, content: memoryview) -> bool:
    read = ObjectRead(namespace, bundle.keys[page], [content])
    read.envelope = bundle.envelope(page)
    return read.verify()


def find_damaged(
    page_index: PageIndex, reader: Reader, keys: Iterable[str], call: Call
) -> tuple[list[Location], bool]:
    """Find the damaged copies of some pages, in all bundles that hold one.

    When a copy is dropped, the next newest takes its place, so all of them are inspected. A copy
    that has been written since, or that was misread once, is sound and stays.

    Returns:
        The copies, and whether every copy could be read.
    """
    damaged: list[Location] = []
    namespace, conclusive = page_index.namespace, True
    # On a page of memory, as O_DIRECT wants it.
    buffer = memoryview(mmap.mmap(-1, namespace.page_bytes))
    for key in keys:
        for bundle, page in page_index.copies(key):
            # Read through a new descriptor: the open file may belong to a mount that has died.
            reader.descriptors.forget(bundle.path)
            read = ObjectRead(
                namespace, key, [buffer], verifies_checksum=reader.verifies, call=call
            )
            outcome = reader.read([Extent(bundle, page, [read])], call)
            if outcome.gone:
                page_index.bundle_set.invalidate()
            if read.damaged:
                damaged.append((bundle, page))
            conclusive &= bool(outcome.loaded) or read.damaged
    return damaged, conclusive
