"""A host pool in one bytearray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hicache_storage.spec import PageGeometry, PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Sequence


class BytePool:
    """A host pool of plain bytes, whose pages consist of components one after the other.

    Args:
        pages: number of pages.
        page_size: slots of a page.
        components: lengths of a page's components, in bytes.
        layout: name of the layout, part of the pool's geometry.
    """

    def __init__(
        self,
        *,
        pages: int = 8,
        page_size: int = 2,
        components: Sequence[int] = (24, 40),
        layout: str = "page_first",
    ) -> None:
        self.geometry = PageGeometry(
            layout, "uint8", page_size, pages * page_size, tuple(components)
        )
        self.memory = bytearray(pages * self.geometry.page_bytes)
        """The pages, one after the other."""

    def page_buffers(self, first_slots: Sequence[int]) -> list[list[memoryview]]:
        """Return the components of the pages that begin at some slots."""
        view = memoryview(self.memory)
        pages = list[list[memoryview]]()
        for slot in first_slots:
            start = slot // self.geometry.page_size * self.geometry.page_bytes
            buffers = list[memoryview]()
            for length in self.geometry.component_bytes:
                buffers.append(view[start : start + length])
                start += length
            pages.append(buffers)
        return pages

    def page(self, index: int) -> bytes:
        """Return the bytes of a page."""
        size = self.geometry.page_bytes
        return bytes(self.memory[index * size : (index + 1) * size])

    def fill(self, index: int, seed: int) -> bytes:
        """Fill a page with a pattern of a seed, and return it.

        Equal seeds modulo 256 have equal patterns.
        """
        size = self.geometry.page_bytes
        # Neighbouring bytes differ, so that a page which is shifted is noticed.
        page = bytes((seed * 31 + offset) % 256 for offset in range(size))
        self.memory[index * size : (index + 1) * size] = page
        return page

    def transfer(
        self, name: str, keys: Sequence[str], pages: Sequence[int], **fields: Any
    ) -> PoolTransfer:
        """Make a transfer between keys and pages; `fields` are further ones of `PoolTransfer`."""
        import torch

        size = self.geometry.page_size
        slots = [page * size + offset for page in pages for offset in range(size)]
        return PoolTransfer(
            PoolName(name), torch.tensor(slots, dtype=torch.int64), keys=list(keys), **fields
        )
