"""Host pool of multi-head latent attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache_storage.pools.arguments import check_counts, check_layout, check_size, dtype_name
from hicache_storage.pools.host.base import HostPoolBase
from hicache_storage.pools.memory import host_tensor

if TYPE_CHECKING:
    import torch


class MLAHostPool(HostPoolBase):
    """One latent row per token and layer, the same on all TP ranks.

    With S slots in N pages of P, L layers and D elements a row, `kv_buffer` has the shape

    | layout | shape | components of a page |
    |---|---|---|
    | `layer_first` | (L, S, 1, D) | one for each layer: P * D elements |
    | `page_first` | (S, L, 1, D) | one: P * L * D elements |
    | `page_first_direct` | (N, L, P, 1, D) | one: P * L * D elements |
    """

    LAYOUTS: ClassVar[tuple[str, ...]] = ("layer_first", "page_first", "page_first_direct")

    kv_buffer: torch.Tensor

    def __init__(
        self,
        *,
        size: int,
        page_size: int,
        layer_num: int,
        kv_cache_dim: int,
        dtype: torch.dtype,
        layout: str = "page_first",
        pin_memory: bool = True,
    ) -> None:
        """Allocate the pool.

        Args:
            size: slots (tokens), a multiple of `page_size`.
            page_size: slots per page.
            layer_num: layers held by this rank.
            kv_cache_dim: elements per row: latent and rope part together, or the width of a packed
                row.
            dtype: element type as stored.
            layout: one of `LAYOUTS`.
            pin_memory: lock the memory for CUDA copies, where CUDA is available.

        Raises:
            InvalidPoolError: an argument is out of range, or there is not that much memory.
        """
        check_size(size, page_size)
        check_counts(layer_num=layer_num, kv_cache_dim=kv_cache_dim)
        check_layout(layout, self.LAYOUTS)
        name = dtype_name(dtype)
        self.dtype = dtype
        self.layer_num = layer_num
        self.kv_cache_dim = kv_cache_dim
        shape = {
            "layer_first": (layer_num, size, 1, kv_cache_dim),
            "page_first": (size, layer_num, 1, kv_cache_dim),
            "page_first_direct": (size // page_size, layer_num, page_size, 1, kv_cache_dim),
        }[layout]
        self.kv_buffer = host_tensor(shape, dtype, pin_memory=pin_memory)
        super().__init__(
            layout=layout,
            dtype=name,
            size=size,
            page_size=page_size,
            buffers=(self.kv_buffer,),
            page_axis=1 if layout == "layer_first" else 0,
            rows_per_page=1 if layout == "page_first_direct" else page_size,
            columns=self.kv_buffer.unbind() if layout == "layer_first" else (self.kv_buffer,),
            parts=(self.kv_buffer,),
            has_row_axis=layout == "page_first_direct",
            flat_dtype=dtype,
        )
