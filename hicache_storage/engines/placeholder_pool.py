"""Placeholder pages for the KV of an engine whose side pools hold all bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.spec import PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence


class PlaceholderPool:
    """A host pool of one byte a page, with the slots of a pool that has no bytes.

    The contract counts hits in KV pages, and an anchor that only allocates slots has none to store.
    So one byte is stored for each page: it records that the page has been backed up; its side pools
    decide whether it is restorable.
    """

    def __init__(self, *, layout: str, page_size: int, size: int) -> None:
        self.geometry = PageGeometry(
            layout=layout, dtype="uint8", page_size=page_size, size=size, component_bytes=(1,)
        )
        self._bytes = memoryview(bytearray(b"\x01" * (size // page_size)))

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Return the placeholder of each page."""
        pages = (slot // self.geometry.page_size for slot in first_slots)
        return [[self._bytes[page : page + 1]] for page in pages]
