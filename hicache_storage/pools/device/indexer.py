"""Device pool of the quantized keys that sparse attention selects tokens by."""

from __future__ import annotations

from typing import ClassVar

import torch

from hicache_storage.pools.arguments import (
    check_counts,
    check_quantization,
    check_size,
    index_page_bytes,
)
from hicache_storage.pools.device.base import DevicePoolBase, device_tensor


class IndexerDevicePool(DevicePoolBase):
    """Index keys and their scales: each layer is a tensor (pages, page_stride) of bytes of its own.

    It has the slots of the KV pool that it follows; indices derived from that pool's need no
    `alloc`.
    """

    HOST_POOL: ClassVar[str] = "IndexerHostPool"
    FIELDS: ClassVar[tuple[str, ...]] = ("index_head_dim", "quant_block_size")

    index_buffer: list[torch.Tensor]
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
        device: torch.device | str = "cuda",
    ) -> None:
        """Allocate the pool.

        Args:
            size: slots (tokens) of the KV pool that this one follows, a multiple of `page_size`.
            page_size: slots per page.
            layer_num: layers that have an indexer of their own.
            index_head_dim: one-byte elements per token and layer.
            quant_block_size: elements per scale; divides `index_head_dim`.
            device: where.

        Raises:
            InvalidPoolError: an argument is out of range, or there is not that much memory.
        """
        check_size(size, page_size)
        check_counts(layer_num=layer_num)
        check_quantization(index_head_dim, quant_block_size)
        self.index_head_dim = index_head_dim
        self.quant_block_size = quant_block_size
        self.page_stride = index_page_bytes(page_size, index_head_dim, quant_block_size)
        shape, place = (size // page_size, self.page_stride), torch.device(device)
        self.index_buffer = [device_tensor(shape, torch.uint8, place) for _ in range(layer_num)]
        super().__init__(
            [(pages,) for pages in self.index_buffer], page_size, place, rows_per_page=1
        )
