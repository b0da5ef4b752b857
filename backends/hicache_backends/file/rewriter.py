"""Takes pages out of bundles: what deletes, repairs and shrinks, since a bundle itself never changes."""

from __future__ import annotations

import logging
import os
import time
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Index
from hicache_backends.file.shelf import Bundle
from hicache_backends.file.vectored import read_into, write_from

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Sequence

    from hicache_backends.file.board import Board
    from hicache_backends.file.catalog import Catalog, Location
    from hicache_backends.file.changes import Changes
    from hicache_backends.file.descriptors import Descriptors
    from hicache_backends.file.drafts import Drafts

logger = logging.getLogger(__name__)

_STEP_BYTES = 4 << 20
_ATTEMPTS = 24
WAIT_SECONDS = 0.001
"""Longer with each attempt: who has won a bundle needs to be given time to replace it."""


class Rewriter:
    """Replaces bundles by others with fewer pages. Safe for many threads."""

    def __init__(self, board: Board, drafts: Drafts, descriptors: Descriptors, changes: Changes, *, syncs: bool) -> None:
        self._board, self._drafts, self._descriptors, self._changes = board, drafts, descriptors, changes
        self._syncs = syncs

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
        if not kept:
            if not self._changes.remove(catalog.shelf, bundle):
                raise FileNotFoundError(f"{bundle.path} has been removed or replaced")
            return
        index = Index([bundle.keys[page] for page in kept], b"".join([bundle.envelope(page) for page in kept]))
        name = self._drafts.name(catalog.shape.bundle_bytes(index.keys))
        try:
            descriptor = self._drafts.create(name)
            try:
                end = self._copy(catalog, bundle, kept, descriptor)
                write_from(descriptor, [memoryview(catalog.shape.tail(index))], end)
                os.utime(descriptor, ns=(bundle.recency, bundle.recency))
                if self._syncs:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            self._changes.replace(catalog, bundle, name, index)
        except OSError:
            self._drafts.discard(name)
            raise

    def _copy(self, catalog: Catalog, bundle: Bundle, pages: Sequence[int], target: int) -> int:
        source, page_bytes, end = self._descriptors.borrow(bundle.path), catalog.namespace.page_bytes, 0
        buffer = memoryview(bytearray(min(len(pages) * page_bytes, _STEP_BYTES)))
        for first, count in _runs(pages):
            for at in range(0, count * page_bytes, _STEP_BYTES):
                part = buffer[: min(_STEP_BYTES, count * page_bytes - at)]
                # A page that is cut off keeps what the buffer held: its checksum tells, as before.
                read_into(source.descriptor, [part], first * page_bytes + at)
                write_from(target, [part], end)
                end += len(part)
        return end


def _runs(pages: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as (first, count) of those that follow each other."""
    runs = list[tuple[int, int]]()
    for page in pages:
        if runs and sum(runs[-1]) == page:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((page, 1))
    return runs
