"""Host pool of the quantized keys that sparse attention selects tokens by."""

from __future__ import annotations

from typing import ClassVar

import torch

from hicache_storage.pools.arguments import (
    check_counts,
    check_layout,
    check_quantization,
    check_size,
    index_page_bytes,
)
from hicache_storage.pools.host.base import HostPoolBase
from hicache_storage.pools.memory import host_tensor


class IndexerHostPool(HostPoolBase):
    """Index keys and their scales, packed as bytes page by page and layer by layer.

    A page of one layer is `page_stride` = P * (D + D / B * 4) bytes, for D one-byte elements a
    token with one float32 scale for each B of them; how keys and scales lie inside it is the
    engine's business. With N pages of P slots and L layers, `index_buffer` (uint8) has the shape

    | layout | shape | components of a page |
    |---|---|---|
    | `layer_first` | (L, N, page_stride) | one for each layer: page_stride bytes |
    | `page_first`, `page_first_direct` | (N, L, 1, page_stride) | one: L * page_stride bytes |
    """

    LAYOUTS: ClassVar[tuple[str, ...]] = ("layer_first", "page_first", "page_first_direct")

    index_buffer: torch.Tensor
    page_stride: int
    """Bytes of one page of one layer."""

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        layer_num: int,
        index_head_dim: int = 128,
        quant_block_size: int = 128,
        layout: str = "page_first",
        pin_memory: bool = True,
    ) -> None:
        """Allocate the pool.

        Args:
            size: slots (tokens) of the KV pool that this one follows, a multiple of `page_size`.
            page_size: slots per page.
            layer_num: layers that have an indexer of their own.
            index_head_dim: one-byte elements per token and layer.
            quant_block_size: elements per scale; divides `index_head_dim`.
            layout: one of `LAYOUTS`.
            pin_memory: lock the memory for CUDA copies, where CUDA is available.

        Raises:
            InvalidPoolError: an argument is out of range, or there is not that much memory.
        """
        check_size(size, page_size)
        check_counts(layer_num=layer_num)
        check_quantization(index_head_dim, quant_block_size)
        check_layout(layout, self.LAYOUTS)
        self.layer_num = layer_num
        self.index_head_dim = index_head_dim
        self.quant_block_size = quant_block_size
        self.page_stride = index_page_bytes(page_size, index_head_dim, quant_block_size)
        pages, by_layer = size // page_size, layout == "layer_first"
        shape = (
            (layer_num, pages, self.page_stride)
            if by_layer
            else (pages, layer_num, 1, self.page_stride)
        )
        self.index_buffer = host_tensor(shape, torch.uint8, pin_memory=pin_memory)
        super().__init__(
            layout=layout,
            dtype="uint8",
            size=size,
            page_size=page_size,
            buffers=(self.index_buffer,),
            page_axis=1 if by_layer else 0,
            # A page of a layer is one row: the keys and scales of its tokens are packed into it.
            rows_per_page=1,
            columns=self.index_buffer.unbind() if by_layer else (self.index_buffer,),
            parts=(self.index_buffer,),
            has_row_axis=not by_layer,
            flat_dtype=torch.uint8,
        )
