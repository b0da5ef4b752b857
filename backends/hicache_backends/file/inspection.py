"""A second look at pages that were found damaged."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

from hicache_backends.file.catalog import Run
from hicache_storage.objects import ObjectRead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_backends.file.catalog import Catalog, Location
    from hicache_backends.file.reader import Reader
    from hicache_backends.posix.descriptors import Descriptors
    from hicache_storage.objects import Call


class Inspection:
    """Tells which copies of some pages are damaged: all that there are, as when one goes another takes its place.

    A copy that was written since, or that was misread once, is in order and stays.
    """

    def __init__(self, catalog: Catalog, reader: Reader, descriptors: Descriptors, call: Call, *, verifies: bool) -> None:
        self._catalog, self._reader, self._descriptors, self._call = catalog, reader, descriptors, call
        self._verifies = verifies
        # On a page of memory, as O_DIRECT wants it.
        self._buffer = memoryview(mmap.mmap(-1, catalog.namespace.page_bytes))
        self.certain = True
        """Every copy could be read."""

    def damaged(self, keys: Iterable[str]) -> list[Location]:
        """The damaged copies of these pages."""
        self.certain = True
        return [place for key in keys for place in self._catalog.copies(key) if self._is_damaged(key, place)]

    def _is_damaged(self, key: str, place: Location) -> bool:
        bundle, page = place
        # The open file may be the one that lied.
        self._descriptors.forget(bundle.path)
        read = ObjectRead(self._catalog.namespace, key, self._parts(), verifies_checksum=self._verifies, call=self._call)
        outcome = self._reader.read([Run(bundle, page, [read])], self._call)
        if outcome.arrived:
            return not read.verify()
        if outcome.gone:
            self._catalog.shelf.distrust()
        self.certain &= read.damaged
        return read.damaged

    def _parts(self) -> list[memoryview]:
        parts, start = list[memoryview](), 0
        for length in self._catalog.namespace.geometry.component_bytes:
            parts.append(self._buffer[start : start + length])
            start += length
        return parts
