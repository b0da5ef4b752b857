"""Rewrites of bundles without some of their pages: deletion and repair.

A bundle never changes in place: readers without a lock would see it half changed. The remaining
pages are copied to a new bundle, which replaces the old one.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Bundle, BundleIndex, tail_checksum
from hicache_backends.posix.faults import detached
from hicache_backends.posix.files import read_into, write_from
from hicache_storage.objects import ENVELOPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from hicache_backends.file.page_index import Location, PageIndex
    from hicache_backends.file.publisher import Publisher
    from hicache_backends.posix.files import Descriptors
    from hicache_storage.spec import RemovalReason

MAX_ATTEMPTS = 24
WAIT_SECONDS = 0.001
"""Grows with each attempt: the process that has claimed a bundle needs time to replace it."""


class Rewriter:
    """Replaces bundles by ones with fewer pages. Safe for many threads."""

    def __init__(self, publisher: Publisher, descriptors: Descriptors) -> None:
        self.publisher = publisher
        self._feed = publisher.feed
        self._temp_files = publisher.temp_files
        self._descriptors = descriptors

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
                    self.drop(page_index, bundle, bundles[bundle], reason)
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
    ) -> None:
        """Replace a bundle by one without these pages, and announce it.

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
                index = self._copy(bundle, kept, page_index.namespace.page_bytes, descriptor)
                tail = page_index.format.tail(index)
                write_from(descriptor, [memoryview(tail)], name.size - len(tail))
                # The copy inherits the recency: a rewrite is not a use, and must not save the pages
                # from eviction.
                os.utime(descriptor, ns=(bundle.recency, bundle.recency))
                if self._feed.syncs:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self.publisher.replace(page_index, bundle, name, index, tail_checksum(tail), reason)
        except OSError:
            self._temp_files.discard(name)
            raise

    def _copy(
        self, bundle: Bundle, pages: Sequence[int], page_bytes: int, target: int
    ) -> BundleIndex:
        """Copy pages one after the other, and return the index of the copy.

        Their envelopes go with them, so that a damaged page is found when its copy is read.
        """
        source, buffer = self._descriptors.borrow(bundle.path), memoryview(bytearray(page_bytes))
        envelopes = list[bytes]()
        for place, page in enumerate(pages):
            whole = read_into(source.descriptor, [buffer], page * page_bytes)
            # A file that was cut has no such page: an envelope that fits none, whether or not
            # checksums are verified.
            envelopes.append(bundle.envelope(page) if whole else bytes(ENVELOPE_BYTES))
            write_from(target, [buffer], place * page_bytes)
        return BundleIndex(tuple([bundle.keys[page] for page in pages]), b"".join(envelopes))
