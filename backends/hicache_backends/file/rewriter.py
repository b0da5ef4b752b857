"""Takes pages out of bundles: what deletes, repairs and shrinks, since a bundle itself never changes."""

from __future__ import annotations

import logging
import mmap
import os
import time
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Bundle, BundleIndex, tail_checksum
from hicache_backends.file.page_index import Extent
from hicache_backends.posix.vectored import read_into, write_from
from hicache_storage.objects import ObjectRead

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Sequence

    from hicache_backends.file.change_feed import ChangeFeed
    from hicache_backends.file.page_index import Location, PageIndex
    from hicache_backends.file.publisher import Publisher
    from hicache_backends.file.reader import Reader
    from hicache_backends.file.temp_files import TempFiles
    from hicache_backends.posix.descriptors import Descriptors
    from hicache_storage.objects import Call, Namespace

logger = logging.getLogger(__name__)

COPY_BYTES = 4 << 20
MAX_ATTEMPTS = 24
WAIT_SECONDS = 0.001
"""Longer with each attempt: who has won a bundle needs to be given time to replace it."""


class Rewriter:
    """Replaces bundles by others with fewer pages. Safe for many threads.

    Args:
        damaged: told of pages that were to stay and were damaged: these are left out too, for a copy of a page under a new
            name says that it is in order.
    """

    def __init__(
        self,
        feed: ChangeFeed,
        temp_files: TempFiles,
        descriptors: Descriptors,
        publisher: Publisher,
        damaged: Callable[[Namespace, int], None],
        *,
        syncs: bool,
    ) -> None:
        self._feed = feed
        self._temp_files = temp_files
        self._descriptors = descriptors
        self._publisher = publisher
        self._damaged = damaged
        self._syncs = syncs

    def drop_all(self, page_index: PageIndex, find: Callable[[], Sequence[Location]]) -> None:
        """Drop all pages that `find` finds, and tell everyone. It is asked again if someone else moves them meanwhile.

        Raises:
            OSError: some may still be there.
        """
        for attempt in range(MAX_ATTEMPTS):
            bundles = dict[Bundle, set[str]]()
            for bundle, page in find():
                bundles.setdefault(bundle, set()).add(bundle.keys[page])
            moved = False
            for bundle, keys in bundles.items():
                try:
                    self.drop(page_index, bundle, keys)
                except FileNotFoundError:
                    moved = True
            self._feed.announce()
            if not moved:
                return
            # What takes their place may not be announced yet, or not be there.
            time.sleep(attempt * WAIT_SECONDS)
            page_index.bundle_set.invalidate()
            page_index.catch_up(self._feed.read())
        raise FileNotFoundError("others keep on rewriting the same bundles")

    def drop(self, page_index: PageIndex, bundle: Bundle, keys: Container[str]) -> None:
        """Replace a bundle by one without these pages; others are told with the next announcement.

        Raises:
            FileNotFoundError: someone else has removed or replaced it meanwhile.
            OSError: the bundle is as it was.
        """
        kept = [page for page, key in enumerate(bundle.keys) if key not in keys]
        if kept and self._rewrite(page_index, bundle, kept):
            return
        if not self._publisher.remove(page_index.bundle_set, bundle):
            raise FileNotFoundError(f"{bundle.path} has been removed or replaced")

    def _rewrite(self, page_index: PageIndex, bundle: Bundle, kept: Sequence[int]) -> bool:
        """Replace a bundle by one with some of its pages; `False` where none of them is in order."""
        name = self._temp_files.name(page_index.format.bundle_bytes([bundle.keys[page] for page in kept]))
        try:
            descriptor = self._temp_files.create(name)
            try:
                sound = self._copy(page_index, bundle, kept, descriptor)
                index = BundleIndex([bundle.keys[page] for page in sound], b"".join([bundle.envelope(page) for page in sound]))
                tail, end = page_index.format.tail(index), len(sound) * page_index.namespace.page_bytes
                write_from(descriptor, [memoryview(tail)], end)
                os.utime(descriptor, ns=(bundle.recency, bundle.recency))
                if self._syncs:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if sound:
                size = end + len(tail)
                self._publisher.replace(page_index, bundle, name, index, size=size, checksum=tail_checksum(tail))
            else:
                self._temp_files.discard(name)
        except OSError:
            self._temp_files.discard(name)
            raise
        if len(sound) < len(kept):
            self._damaged(page_index.namespace, len(kept) - len(sound))
        return bool(sound)

    def _copy(self, page_index: PageIndex, bundle: Bundle, pages: Sequence[int], target: int) -> list[int]:
        """Copy the pages that are in order, one after the other; which these are."""
        source, page_bytes, sound = self._descriptors.borrow(bundle.path), page_index.namespace.page_bytes, list[int]()
        step = max(1, min(len(pages), COPY_BYTES // page_bytes))
        buffer = memoryview(bytearray(step * page_bytes))
        for first, count in _extents(pages):
            for page in range(first, first + count, step):
                number = min(step, first + count - page)
                # A page that is cut off leaves what the buffer held, which does not fit its envelope.
                read_into(source.descriptor, [buffer[: number * page_bytes]], page * page_bytes)
                copied = [(page + at, buffer[at * page_bytes : (at + 1) * page_bytes]) for at in range(number)]
                whole = [
                    (page, content) for page, content in copied if self._is_sound(page_index.namespace, bundle, page, content)
                ]
                write_from(target, [content for _, content in whole], len(sound) * page_bytes)
                sound += [page for page, _ in whole]
        return sound

    def _is_sound(self, namespace: Namespace, bundle: Bundle, page: int, content: memoryview) -> bool:
        """Whether this is the page; it is read a second time if it is not, from the file opened anew."""
        if _fits(namespace, bundle, page, content):
            return True
        self._descriptors.forget(bundle.path)
        source = self._descriptors.borrow(bundle.path)
        whole = read_into(source.descriptor, [content], page * len(content))
        return whole and _fits(namespace, bundle, page, content)


def _fits(namespace: Namespace, bundle: Bundle, page: int, content: memoryview) -> bool:
    read = ObjectRead(namespace, bundle.keys[page], [content])
    read.envelope = bundle.envelope(page)
    return read.verify()


def _extents(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, count) of those that follow each other."""
    extents = list[tuple[int, int]]()
    for page in pages:
        if extents and sum(extents[-1]) == page:
            extents[-1] = (extents[-1][0], extents[-1][1] + 1)
        else:
            extents.append((page, 1))
    return extents


class DamageInspection:
    """Tells which copies of some pages are damaged: all that there are, as when one goes another takes its place.

    A copy that was written since, or that was misread once, is in order and stays.
    """

    def __init__(self, page_index: PageIndex, reader: Reader, descriptors: Descriptors, call: Call, *, verifies: bool) -> None:
        self._page_index = page_index
        self._reader = reader
        self._descriptors = descriptors
        self._call = call
        self._verifies = verifies
        # On a page of memory, as O_DIRECT wants it.
        self._buffer = memoryview(mmap.mmap(-1, page_index.namespace.page_bytes))
        self.conclusive = True
        """Every copy could be read."""

    def damaged(self, keys: Iterable[str]) -> list[Location]:
        """The damaged copies of these pages."""
        self.conclusive = True
        return [pid_scope for key in keys for pid_scope in self._page_index.copies(key) if self._is_damaged(key, pid_scope)]

    def _is_damaged(self, key: str, pid_scope: Location) -> bool:
        bundle, page = pid_scope
        # The open file may be the one that lied.
        self._descriptors.forget(bundle.path)
        read = ObjectRead(self._page_index.namespace, key, self._parts(), verifies_checksum=self._verifies, call=self._call)
        outcome = self._reader.read([Extent(bundle, page, [read])], self._call)
        if outcome.loaded:
            return not read.verify()
        if outcome.gone:
            self._page_index.bundle_set.invalidate()
        self.conclusive &= read.damaged
        return read.damaged

    def _parts(self) -> list[memoryview]:
        parts, start = list[memoryview](), 0
        for length in self._page_index.namespace.geometry.component_bytes:
            parts.append(self._buffer[start : start + length])
            start += length
        return parts
