"""Pools of engines: what they have in common, and the interfaces by which they give their pages."""

from __future__ import annotations

from itertools import compress
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.pools import PageAccess


PAGES, P, WIDTH = 6, 4, 10


class Attributes:
    """Attributes of every engine pool."""

    layout = "page_first"
    dtype = torch.bfloat16
    page_size = P
    size = PAGES * P


class AddressPool(Attributes):
    """SGLang's interface for zero copies: K and V of different lengths, page after page."""

    def __init__(self) -> None:
        self.k_buffer = torch.zeros(self.size, WIDTH, dtype=torch.uint8)
        self.v_buffer = torch.zeros(self.size, WIDTH // 2, dtype=torch.uint8)
        self.operations: list[list[int]] = []

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        assert len(indices) % self.page_size == 0
        slots = indices.tolist()
        self.operations.append(slots)
        pointers = [
            buffer.data_ptr() + slot * buffer.shape[1]
            for slot in slots[:: self.page_size]
            for buffer in (self.k_buffer, self.v_buffer)
        ]
        return pointers, [P * WIDTH, P * WIDTH // 2] * (len(slots) // self.page_size)


class FlatPool(Attributes):
    """SGLang's interface for copies: two layers, so that a page is not contiguous."""

    layout = "layer_first"
    dtype = torch.float32

    def __init__(self) -> None:
        self.kv_buffer = torch.zeros(2, self.size, WIDTH, dtype=self.dtype)

    def get_data_page(self, index: int, flat: bool = True) -> torch.Tensor:
        page = self.kv_buffer[:, index : index + P]
        return page.flatten() if flat else page

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2, P, WIDTH, dtype=self.dtype).flatten()

    def set_from_flat_data_page(self, index: int, data_page: torch.Tensor) -> None:
        self.kv_buffer[:, index : index + P] = data_page.reshape(2, P, WIDTH)


class WithoutAddresses(FlatPool):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        raise self.error


def write(
    access: PageAccess,
    slots: Sequence[int],
    pages: Sequence[bytes],
    delivered: Sequence[bool] | None = None,
) -> None:
    """Deliver pages as a storage does; those not delivered are written half."""
    delivered = [True] * len(slots) if delivered is None else delivered
    targets = access.targets(slots)
    for buffers, page, complete in zip(targets, pages, delivered, strict=True):
        start = 0
        for buffer in buffers:
            end = len(buffer) if complete else len(buffer) // 2
            buffer[:end] = page[start : start + end]
            start += len(buffer)
    access.deliver(list(compress(slots, delivered)), list(compress(targets, delivered)))


def read(access: PageAccess, slots: Sequence[int]) -> list[bytes]:
    return [b"".join(buffers) for buffers in access.sources(slots)]


def some_pages(access: PageAccess, count: int) -> list[bytes]:
    return [
        bytes((page * 37 + at) % 256 for at in range(access.geometry.page_bytes))
        for page in range(1, count + 1)
    ]
