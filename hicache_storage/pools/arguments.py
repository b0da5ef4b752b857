"""Checks of a pool's constructor arguments, made before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

SCALE_BYTES = 4
"""An index key's scales are float32."""


def check_counts(**counts: int) -> None:
    """Refuse a count below 1; the keyword is the argument's name.

    Raises:
        InvalidPoolError: a count is below 1; the message names the argument.
    """
    for name, count in counts.items():
        if count < 1:
            raise InvalidPoolError(f"{name} must be at least 1, got {count}")


def check_size(size: int, page_size: int) -> None:
    """Refuse a number of slots that is not a whole number of pages.

    Raises:
        InvalidPoolError: the message names a size that would do.
    """
    check_counts(page_size=page_size, size=size)
    if size % page_size:
        fitting = -(-size // page_size) * page_size
        raise InvalidPoolError(
            f"size must be a multiple of page_size ({page_size}), got {size}; pass {fitting}"
        )


def check_layout(layout: str, layouts: Sequence[str]) -> None:
    """Refuse a layout that the pool does not have.

    Raises:
        InvalidPoolError: the message lists the layouts of the pool.
    """
    if layout not in layouts:
        raise InvalidPoolError(f"layout must be one of {', '.join(layouts)}; got {layout!r}")


def dtype_name(dtype: object, argument: str = "dtype") -> str:
    """Return the name of an element type without the `torch.` prefix.

    `argument` is what a refusal calls it.

    Raises:
        InvalidPoolError: it is no `torch.dtype`.
    """
    if not isinstance(dtype, torch.dtype):
        raise InvalidPoolError(
            f"{argument} must be a torch.dtype such as torch.bfloat16, got {dtype!r}"
        )
    return str(dtype).removeprefix("torch.")


def check_state_shapes(temporal_shape: Sequence[int], conv_shapes: Sequence[Sequence[int]]) -> None:
    """Refuse the shapes of a recurrent state without bytes, or with an invalid length.

    Raises:
        InvalidPoolError: the message names the argument.
    """
    if not conv_shapes and 0 in temporal_shape:
        raise InvalidPoolError(
            "conv_shapes is empty and temporal_shape holds a 0: a page would have no bytes"
        )
    if any(count < 0 for count in temporal_shape):
        raise InvalidPoolError(
            f"temporal_shape must not hold negative numbers, got {tuple(temporal_shape)}"
        )
    for number, shape in enumerate(conv_shapes):
        if any(count < 1 for count in shape):
            raise InvalidPoolError(
                f"conv_shapes[{number}] must hold positive numbers, got {tuple(shape)}"
            )


def check_quantization(index_head_dim: int, quant_block_size: int) -> None:
    """Refuse an index key that is not a whole number of quantized blocks.

    Raises:
        InvalidPoolError: the message names both arguments.
    """
    check_counts(index_head_dim=index_head_dim, quant_block_size=quant_block_size)
    if index_head_dim % quant_block_size:
        raise InvalidPoolError(
            f"quant_block_size ({quant_block_size}) must divide index_head_dim ({index_head_dim})"
        )


def index_page_bytes(page_size: int, index_head_dim: int, quant_block_size: int) -> int:
    """Bytes of one page of one layer: the keys, and a scale for each block."""
    return page_size * (index_head_dim + index_head_dim // quant_block_size * SCALE_BYTES)
