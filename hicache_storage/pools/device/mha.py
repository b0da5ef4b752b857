"""Device pool of multi-head attention and its grouped-query and multi-query kinds."""

from __future__ import annotations

from typing import ClassVar

import torch

from hicache_storage.pools.arguments import check_counts, check_size, dtype_name
from hicache_storage.pools.device.base import DevicePoolBase, device_tensor


class MHADevicePool(DevicePoolBase):
    """K and V of every layer, each a tensor (slots, heads, elements of a head) of its own."""

    HOST_POOL: ClassVar[str] = "MHAHostPool"
    FIELDS: ClassVar[tuple[str, ...]] = ("head_num", "head_dim", "v_head_dim", "dtype")

    k_buffer: list[torch.Tensor]
    v_buffer: list[torch.Tensor]

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        layer_num: int,
        head_num: int,
        head_dim: int,
        dtype: torch.dtype,
        v_head_dim: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        """Allocate the pool.

        Args:
            size: slots (tokens), a multiple of `page_size`.
            page_size: slots per page.
            layer_num: layers held by this rank.
            head_num: KV heads held by this rank.
            head_dim: elements per head of K.
            dtype: element type as stored.
            v_head_dim: elements per head of V; None means as many as K.
            device: where.

        Raises:
            InvalidPoolError: an argument is out of range, or there is not that much memory.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_size(size, page_size)
        check_counts(
            layer_num=layer_num, head_num=head_num, head_dim=head_dim, v_head_dim=v_head_dim
        )
        dtype_name(dtype)
        self.dtype = dtype
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim
        place = torch.device(device)
        k_shape = (size, head_num, head_dim)
        v_shape = (size, head_num, v_head_dim)
        self.k_buffer = [device_tensor(k_shape, dtype, place) for _ in range(layer_num)]
        self.v_buffer = [device_tensor(v_shape, dtype, place) for _ in range(layer_num)]
        super().__init__(list(zip(self.k_buffer, self.v_buffer, strict=True)), page_size, place)
