"""Takes pages out of bundles: what deletes, repairs and shrinks, since a bundle itself never changes."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Index, tail_checksum
from hicache_backends.file.shelf import Bundle
from hicache_backends.posix.vectored import read_into, write_from
from hicache_storage.objects import ObjectRead

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from hicache_backends.file.board import Board
    from hicache_backends.file.catalog import Catalog, Location
    from hicache_backends.file.changes import Changes
    from hicache_backends.file.drafts import Drafts
    from hicache_backends.posix.descriptors import Descriptors
    from hicache_storage.objects import Namespace

logger = logging.getLogger(__name__)

_STEP_BYTES = 4 << 20
_ATTEMPTS = 24
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
        board: Board,
        drafts: Drafts,
        descriptors: Descriptors,
        changes: Changes,
        damaged: Callable[[Namespace, int], None],
        *,
        syncs: bool,
    ) -> None:
        self._board, self._drafts, self._descriptors, self._changes = board, drafts, descriptors, changes
        self._damaged, self._syncs = damaged, syncs

    def drop_all(self, catalog: Catalog, find: Callable[[], Sequence[Location]]) -> None:
        """Drop all pages that `find` finds, and tell everyone. It is asked again if someone else moves them meanwhile.

        Raises:
            OSError: some may still be there.
        """
        for attempt in range(_ATTEMPTS):
            bundles = dict[Bundle, set[str]]()
            for bundle, page in find():
                bundles.setdefault(bundle, set()).add(bundle.keys[page])
            moved = False
            for bundle, keys in bundles.items():
                try:
                    self.drop(catalog, bundle, keys)
                except FileNotFoundError:
                    moved = True
            self._changes.announce()
            if not moved:
                return
            # What takes their place may not be announced yet, or not be there.
            time.sleep(attempt * WAIT_SECONDS)
            catalog.shelf.distrust()
            catalog.catch_up(self._board.read())
        raise FileNotFoundError("others keep on rewriting the same bundles")

    def drop(self, catalog: Catalog, bundle: Bundle, keys: Container[str]) -> None:
        """Replace a bundle by one without these pages; others are told with the next announcement.

        Raises:
            FileNotFoundError: someone else has removed or replaced it meanwhile.
            OSError: the bundle is as it was.
        """
        kept = [page for page, key in enumerate(bundle.keys) if key not in keys]
        if kept and self._rewrite(catalog, bundle, kept):
            return
        if not self._changes.remove(catalog.shelf, bundle):
            raise FileNotFoundError(f"{bundle.path} has been removed or replaced")

    def _rewrite(self, catalog: Catalog, bundle: Bundle, kept: Sequence[int]) -> bool:
        """Replace a bundle by one with some of its pages; `False` where none of them is in order."""
        name = self._drafts.name(catalog.shape.bundle_bytes([bundle.keys[page] for page in kept]))
        try:
            descriptor = self._drafts.create(name)
            try:
                sound = self._copy(catalog, bundle, kept, descriptor)
                index = Index([bundle.keys[page] for page in sound], b"".join([bundle.envelope(page) for page in sound]))
                tail, end = catalog.shape.tail(index), len(sound) * catalog.namespace.page_bytes
                write_from(descriptor, [memoryview(tail)], end)
                os.utime(descriptor, ns=(bundle.recency, bundle.recency))
                if self._syncs:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if sound:
                size = end + len(tail)
                self._changes.replace(catalog, bundle, name, index, size=size, checksum=tail_checksum(tail))
            else:
                self._drafts.discard(name)
        except OSError:
            self._drafts.discard(name)
            raise
        if len(sound) < len(kept):
            self._damaged(catalog.namespace, len(kept) - len(sound))
        return bool(sound)

    def _copy(self, catalog: Catalog, bundle: Bundle, pages: Sequence[int], target: int) -> list[int]:
        """Copy the pages that are in order, one after the other; which these are."""
        source, page_bytes, sound = self._descriptors.borrow(bundle.path), catalog.namespace.page_bytes, list[int]()
        step = max(1, min(len(pages), _STEP_BYTES // page_bytes))
        buffer = memoryview(bytearray(step * page_bytes))
        for first, count in _runs(pages):
            for page in range(first, first + count, step):
                number = min(step, first + count - page)
                # A page that is cut off leaves what the buffer held, which does not fit its envelope.
                read_into(source.descriptor, [buffer[: number * page_bytes]], page * page_bytes)
                copied = [(page + at, buffer[at * page_bytes : (at + 1) * page_bytes]) for at in range(number)]
                whole = [(page, content) for page, content in copied if self._is_sound(catalog.namespace, bundle, page, content)]
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


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, count) of those that follow each other."""
    runs = list[tuple[int, int]]()
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
