"""Checks of a pool's constructor arguments, made before anything is allocated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence


def check_counts(**counts: int) -> None:
    """Refuse a count below 1; the keyword is the argument's name."""
    for name, count in counts.items():
        if count < 1:
            raise InvalidPoolError(f"{name} must be at least 1, got {count}")


def check_size(size: int, page_size: int) -> None:
    """Refuse a number of slots that is not a whole number of pages."""
    check_counts(page_size=page_size, size=size)
    if size % page_size:
        fitting = -(-size // page_size) * page_size
        raise InvalidPoolError(f"size must be a multiple of page_size ({page_size}), got {size}; pass {fitting}")


def check_layout(layout: str, layouts: Sequence[str]) -> None:
    """Refuse a layout that the pool does not have."""
    if layout not in layouts:
        raise InvalidPoolError(f"layout must be one of {', '.join(layouts)}; got {layout!r}")


def dtype_name(dtype: object, argument: str = "dtype") -> str:
    """Name of an element type without the `torch.` prefix; `argument` is what a refusal calls it."""
    if not isinstance(dtype, torch.dtype):
        raise InvalidPoolError(f"{argument} must be a torch.dtype such as torch.bfloat16, got {dtype!r}")
    return str(dtype).removeprefix("torch.")
