"""Host pool of multi-head attention and its grouped-query and multi-query kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from hicache_storage.pools.arguments import check_counts, check_layout, check_size, dtype_name
from hicache_storage.pools.host.base import HostPoolBase
from hicache_storage.pools.memory import host_tensor
from hicache_storage.pools.shards import layout_rows

if TYPE_CHECKING:
    import torch


class MHAHostPool(HostPoolBase):
    """K and V of every layer.

    With S slots in N pages of P, L layers, H heads and D elements a head, `k_buffer` and `v_buffer`
    have the shape

    | layout | shape | components of a page |
    |---|---|---|
    | `layer_first` | (L, S, H, D) | K, V of layer 0, K, V of layer 1, ...: P * H * D elements each |
    | `page_first` | (S, L, H, D) | K, V: P * L * H * D elements each |
    | `page_first_direct` | (N, L, P, H, D) | the same |
    | `page_head` | (N, H, P, L, D) | the same |

    and are the halves of one tensor (2, ...). Where the heads of V are longer or shorter than those
    of K, they are two tensors. A flat page is all of K, then all of V.
    """

    LAYOUTS: ClassVar[tuple[str, ...]] = (
        "layer_first",
        "page_first",
        "page_first_direct",
        "page_head",
    )

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor

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
        layout: str = "page_first",
        pin_memory: bool = True,
    ) -> None:
        """Allocate the pool.

        Args:
            size: slots (tokens), a multiple of `page_size`.
            page_size: slots per page.
            layer_num: layers held by this rank.
            head_num: KV heads held by this rank.
            head_dim: elements per head of K.
            dtype: element type as stored, `torch.uint8` or a float8 type for quantized KV.
            v_head_dim: elements per head of V; None means as many as K.
            layout: one of `LAYOUTS`.
            pin_memory: lock the memory for CUDA copies, where CUDA is available.

        Raises:
            InvalidPoolError: an argument is out of range, or there is not that much memory.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_size(size, page_size)
        check_counts(
            layer_num=layer_num, head_num=head_num, head_dim=head_dim, v_head_dim=v_head_dim
        )
        check_layout(layout, self.LAYOUTS)
        name = dtype_name(dtype)
        self.dtype = dtype
        self.layer_num = layer_num
        self.head_num = head_num
        self.head_dim = head_dim
        self.v_head_dim = v_head_dim

        k_shape, v_shape = (
            _shape(layout, size // page_size, page_size, layer_num, head_num, dim)
            for dim in (head_dim, v_head_dim)
        )
        # One tensor where that is possible, as in SGLang: its halves are K and V.
        halves = head_dim == v_head_dim
        shapes = [(2, *k_shape)] if halves else [k_shape, v_shape]
        buffers = [host_tensor(shape, dtype, pin_memory=pin_memory) for shape in shapes]
        k_buffer, v_buffer = buffers[0].unbind() if halves else buffers
        self.k_buffer = k_buffer
        self.v_buffer = v_buffer
        by_layer = layout == "layer_first"
        super().__init__(
            layout=layout,
            dtype=name,
            size=size,
            page_size=page_size,
            buffers=buffers,
            page_axis=by_layer + halves,
            rows_per_page=page_size if layout in ("layer_first", "page_first") else 1,
            columns=self._halves() if by_layer else (self.k_buffer, self.v_buffer),
            parts=(self.k_buffer, self.v_buffer),
            has_row_axis=layout in ("page_first_direct", "page_head"),
            flat_dtype=dtype,
            head_num=head_num,
            head_rows=layout_rows(layout, page_size, layer_num),
        )

    def _halves(self) -> list[torch.Tensor]:
        return [
            half
            # K and V of each layer in turn, as SGLang orders its pointers.
            for layer in zip(self.k_buffer.unbind(), self.v_buffer.unbind(), strict=True)
            for half in layer
        ]


def _shape(
    layout: str, pages: int, page_size: int, layers: int, heads: int, dim: int
) -> tuple[int, ...]:
    return {
        "layer_first": (layers, pages * page_size, heads, dim),
        "page_first": (pages * page_size, layers, heads, dim),
        "page_first_direct": (pages, layers, page_size, heads, dim),
        "page_head": (pages, heads, page_size, layers, dim),
    }[layout]
