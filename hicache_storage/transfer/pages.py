"""Numbers of pages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, cast

from hicache_storage.spec import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

NAMED_SLOTS: Final = 8
"""How many slots an error message names."""


def page_numbers(sides: Sequence[torch.Tensor], page_size: int) -> torch.Tensor:
    """The number of each page in indices of several sides: (sides, pages), int64 on the CPU.

    Indices on the device make the caller wait for its current stream.

    Args:
        sides: as many indices each, in whole pages of consecutive slots.

    Raises:
        InvalidTransferError: they are not int64, or not whole pages.
    """
    import torch

    flat: list[torch.Tensor] = []
    for indices in sides:
        if indices.dtype != torch.int64:
            raise InvalidTransferError(f"indices must be int64, got {indices.dtype}")
        slots = indices if indices.dim() == 1 and indices.is_cpu else indices.reshape(-1).cpu()
        if slots.numel() % page_size:
            raise _not_whole(slots, page_size)
        flat.append(slots)
    numbers = torch.stack([slots[::page_size] for slots in flat])
    if page_size == 1:
        return numbers
    numbers.div_(page_size, rounding_mode="floor")
    weights, of_page, of_offsets = _weights(page_size)
    # All slots of a page are compared, as copies take them from the first one.
    expected = of_offsets.add(numbers, alpha=of_page)
    for slots, sums in zip(flat, expected, strict=True):
        pages = slots.view(-1, page_size)
        found = pages @ weights
        if not found.equal(sums):
            raise _not_whole(pages[found != sums][0], page_size)
    return numbers


@functools.cache
def _weights(page_size: int) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Weights of a page's slots, and what a page's number and offsets are multiplied by.

    One product a page in the place of a comparison a slot, which takes twice as long. Weights are
    odd and far apart: another slot, or two in the other's place, change the sum modulo 2**64.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    weights = torch.randint(1 << 62, (page_size,), generator=generator) | 1
    of_page = int(weights.sum() * page_size)
    return weights, of_page, (weights * torch.arange(page_size)).sum()


def _not_whole(slots: torch.Tensor, page_size: int) -> InvalidTransferError:
    named = ", ".join(str(slot) for slot in cast("list[object]", slots[:NAMED_SLOTS].tolist()))
    return InvalidTransferError(
        f"indices must be whole pages of {page_size} consecutive slots, got {named}, ..."
    )
