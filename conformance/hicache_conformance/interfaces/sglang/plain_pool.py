"""A host pool with the methods of SGLang's pools, over one row of pages, for drivers that work
without SGLang.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PlainPool:
    """Pages one after the other, each in one piece."""

    def __init__(self, *, pages: int, page_size: int, page_bytes: int, dtype: torch.dtype, layout: str) -> None:
        import torch

        self.layout = layout
        self.page_size = page_size
        self.page_num = pages
        self.logical_page_size = page_size
        self.size = pages * page_size
        # Elements that do not fill a page would be no elements.
        self.dtype = dtype if page_bytes % dtype.itemsize == 0 else torch.uint8
        self.kv_buffer = torch.zeros(pages, page_bytes // self.dtype.itemsize, dtype=self.dtype)
        self.size_per_token = page_bytes // page_size

    def get_size_per_token(self) -> int:
        """Bytes of a slot, all components together."""
        return self.size_per_token

    def get_ksize_per_token(self) -> int:
        """The same: there is one component."""
        return self.size_per_token

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        """The page at slot `index`: a view, or, flat, a copy."""
        page = self.kv_buffer[int(index) // self.page_size]
        return page.clone() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        """A blank page to read into."""
        return self.kv_buffer.new_zeros(self.kv_buffer.shape[1])

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        """Copy a flat page in."""
        self.kv_buffer[int(index) // self.page_size].copy_(data_page)

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        """Address and length of each page."""
        pages = [int(slot) // self.page_size for slot in indices[:: self.page_size]]
        length = self.kv_buffer.shape[1] * self.kv_buffer.element_size()
        return [self.kv_buffer[page].data_ptr() for page in pages], [length] * len(pages)

    def get_hybrid_pool_buffer(self) -> list[torch.Tensor]:
        """The memory to register."""
        return [self.kv_buffer]
