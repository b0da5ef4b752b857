"""Device pool of multi-head latent attention."""

from __future__ import annotations

from typing import ClassVar

import torch

from hicache_storage.pools.arguments import check_counts, check_size, dtype_name
from hicache_storage.pools.device.base import DevicePoolBase, device_tensor


class MLADevicePool(DevicePoolBase):
    """One latent row per token and layer.

    Each layer is a tensor (slots, 1, elements of a row) of its own.
    """

    HOST_POOL: ClassVar[str] = "MLAHostPool"
    FIELDS: ClassVar[tuple[str, ...]] = ("kv_cache_dim", "dtype")

    kv_buffer: list[torch.Tensor]

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        layer_num: int,
        kv_cache_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cuda",
    ) -> None:
        """Allocate the pool.

        Args:
            size: slots (tokens), a multiple of `page_size`.
            page_size: slots per page.
            layer_num: layers held by this rank.
            kv_cache_dim: elements per row: latent and rope part together, or the width of a packed
                row.
            dtype: element type as stored.
            device: where.

        Raises:
            InvalidPoolError: an argument is out of range, or there is not that much memory.
        """
        check_size(size, page_size)
        check_counts(layer_num=layer_num, kv_cache_dim=kv_cache_dim)
        dtype_name(dtype)
        self.dtype = dtype
        self.kv_cache_dim = kv_cache_dim
        place = torch.device(device)
        self.kv_buffer = [
            device_tensor((size, 1, kv_cache_dim), dtype, place) for _ in range(layer_num)
        ]
        super().__init__([(rows,) for rows in self.kv_buffer], page_size, place)
