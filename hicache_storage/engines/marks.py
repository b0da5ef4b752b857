"""Pages without bytes: what stands in the store for the KV of an engine whose side pools hold everything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.spec import PageGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence


class MarkPool:
    """A host pool of one byte a page, with the slots of the pool that it stands for.

    The contract counts hits in KV pages. An anchor that only hands out slots has none to store, so a mark is stored for
    each page: it says that the page has been backed up, and its side pools say whether it can be restored.
    """

    def __init__(self, *, layout: str, page_size: int, size: int) -> None:
        self.geometry = PageGeometry(layout=layout, dtype="uint8", page_size=page_size, size=size, component_bytes=(1,))
        self._marks = memoryview(bytearray(b"\x01" * (size // page_size)))

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """The mark of each page."""
        pages = (slot // self.geometry.page_size for slot in first_slots)
        return [[self._marks[page : page + 1]] for page in pages]
