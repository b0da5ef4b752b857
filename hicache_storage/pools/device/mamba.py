"""Device pool of recurrent states: Mamba, gated delta nets and other linear attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch

from hicache_storage.pools.arguments import check_counts, check_size, check_state_shapes, dtype_name
from hicache_storage.pools.device.base import DevicePoolBase, device_tensor

if TYPE_CHECKING:
    from collections.abc import Sequence


class MambaDevicePool(DevicePoolBase):
    """The states of running requests and of cached prefixes.

    A slot is a whole state, so a page is one slot.

    With S slots and L layers with such a state, `temporal_buffer` and each of `conv_buffers` have
    the shape (L, S, *state), and layer l of the pool is their l-th step along the first axis.
    Layers are counted in the pool: a `PoolPair` of `hicache_storage.transfer` has a
    hybrid model's own numbers. A model without a temporal state has one with a 0 in its shape; it
    is never copied.
    """

    HOST_POOL: ClassVar[str] = "MambaHostPool"
    FIELDS: ClassVar[tuple[str, ...]] = (
        "temporal_shape",
        "conv_shapes",
        "temporal_dtype",
        "conv_dtype",
    )

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
        device: torch.device | str = "cuda",
    ) -> None:
        """Allocate the pool.

        Args:
            size: slots, that is, states.
            layer_num: layers with such a state held by this rank.
            temporal_shape: shape of one layer's temporal state; a 0 in it says that there is none.
            conv_shapes: shapes of one layer's convolution windows.
            temporal_dtype: element type of the temporal state.
            conv_dtype: element type of the windows.
            device: where.

        Raises:
            InvalidPoolError: an argument is out of range, a slot would be empty, or there is not
                that much memory.
        """
        check_size(size, 1)
        check_counts(layer_num=layer_num)
        dtype_name(temporal_dtype, "temporal_dtype")
        dtype_name(conv_dtype, "conv_dtype")
        check_state_shapes(temporal_shape, conv_shapes)
        self.temporal_shape = tuple(temporal_shape)
        self.conv_shapes = tuple(map(tuple, conv_shapes))
        self.temporal_dtype = temporal_dtype
        self.conv_dtype = conv_dtype
        place = torch.device(device)
        self.temporal_buffer = device_tensor(
            (layer_num, size, *temporal_shape), temporal_dtype, place
        )
        self.conv_buffers = tuple(
            device_tensor((layer_num, size, *shape), conv_dtype, place) for shape in conv_shapes
        )
        # A part without elements has no rows that could be copied.
        parts = [part for part in (self.temporal_buffer, *self.conv_buffers) if part.numel()]
        super().__init__(list(zip(*parts, strict=True)), 1, place)
