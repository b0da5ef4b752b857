"""Host pool of recurrent states: Mamba, gated delta nets and other linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from hicache_storage.pools.arguments import (
    check_counts,
    check_layout,
    check_size,
    check_state_shapes,
    dtype_name,
)
from hicache_storage.pools.host.base import HostPoolBase
from hicache_storage.pools.memory import host_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class MambaHostPool(HostPoolBase):
    """The state after a prefix: a temporal (SSM) state and convolution windows per layer.

    A slot is a whole state, so a page is one slot. With S slots and L layers, `temporal_buffer` and
    each of `conv_buffers` have the shape

    | layout | shape | components of a page |
    |---|---|---|
    | `layer_first` | (L, S, *state) | temporal of layer 0, 1, ..., then the first window of layer 0, 1, ..., and so on |
    | `page_first`, `page_first_direct` | (S, L, 1, *state) | temporal, first window, second window, ... |

    A model without a temporal state has one with a 0 in its shape; it is no component. A flat page
    is the bytes (uint8) of the temporal state and the windows one after the other; they are the
    same in all layouts.
    """

    LAYOUTS: ClassVar[tuple[str, ...]] = ("layer_first", "page_first", "page_first_direct")

    temporal_buffer: torch.Tensor
    conv_buffers: tuple[torch.Tensor, ...]

    def __init__(
        self,
        *,
        size: int,
        layer_num: int,
        temporal_shape: Sequence[int],
        conv_shapes: Sequence[Sequence[int]],
        temporal_dtype: torch.dtype,
        conv_dtype: torch.dtype,
        layout: str = "page_first",
        pin_memory: bool = True,
    ) -> None:
        """Allocate the pool.

        Args:
            size: slots, that is, states.
            layer_num: layers with such a state held by this rank.
            temporal_shape: shape of one layer's temporal state; a 0 in it says that there is none.
            conv_shapes: shapes of one layer's convolution windows.
            temporal_dtype: element type of the temporal state.
            conv_dtype: element type of the windows.
            layout: one of `LAYOUTS`.
            pin_memory: lock the memory for CUDA copies, where CUDA is available.

        Raises:
            InvalidPoolError: an argument is out of range, a page would be empty, or there is not
                that much memory.
        """
        check_size(size, 1)
        check_counts(layer_num=layer_num)
        check_layout(layout, self.LAYOUTS)
        name = (
            f"{dtype_name(temporal_dtype, 'temporal_dtype')}+{dtype_name(conv_dtype, 'conv_dtype')}"
        )
        check_state_shapes(temporal_shape, conv_shapes)
        self.layer_num = layer_num
        self.temporal_shape = tuple(temporal_shape)
        self.conv_shapes = tuple(map(tuple, conv_shapes))
        self.temporal_dtype = temporal_dtype
        self.conv_dtype = conv_dtype

        by_layer = layout == "layer_first"
        leading = (layer_num, size) if by_layer else (size, layer_num, 1)
        self.temporal_buffer = host_tensor(
            (*leading, *temporal_shape), temporal_dtype, pin_memory=pin_memory
        )
        self.conv_buffers = tuple(
            host_tensor((*leading, *shape), conv_dtype, pin_memory=pin_memory)
            for shape in conv_shapes
        )
        buffers = (self.temporal_buffer, *self.conv_buffers)
        super().__init__(
            layout=layout,
            dtype=name,
            size=size,
            page_size=1,
            buffers=buffers,
            page_axis=1 if by_layer else 0,
            rows_per_page=1,
            columns=[layer for buffer in buffers for layer in buffer] if by_layer else buffers,
            parts=buffers,
            has_row_axis=not by_layer,
            flat_dtype=torch.uint8,
        )
