"""Numbers of pages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final, cast

from hicache_storage.spec import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

DEVICE, HOST = 0, 1
"""Rows of page numbers."""
NAMED_SLOTS: Final = 8
"""How many slots an error message names."""


def page_numbers(sides: Sequence[torch.Tensor], page_size: int) -> torch.Tensor:
    """The number of each page in indices of several sides: (sides, pages), int64 on the CPU.

    The first and the last slot of each page are looked at: slots of long prefixes are megabytes,
    and looking at each of them takes longer than all the rest of enqueueing. Indices on the device
    make the caller wait for its current stream.

    Args:
        sides: as many indices each, in whole pages of consecutive slots.

    Raises:
        InvalidTransferError: they are not int64, or not whole pages.
    """
    import torch

    ends: list[torch.Tensor] = []
    for indices in sides:
        if indices.dtype != torch.int64:
            raise InvalidTransferError(f"indices must be int64, got {indices.dtype}")
        if indices.numel() % page_size:
            raise _not_whole(indices.reshape(-1), page_size)
        slots = indices.reshape(-1).cpu().contiguous()
        ends.append(slots.as_strided((2, slots.numel() // page_size), (page_size - 1, page_size)))
    found = torch.stack(ends)
    first = found.select(1, 0)
    if page_size == 1:
        return first.contiguous()
    shift = page_size.bit_length() - 1
    # A shift takes a quarter of a division's time.
    numbers = first >> shift if 1 << shift == page_size else first // page_size
    offsets = _end_offsets(page_size)
    if not offsets.add(numbers.unsqueeze(1), alpha=page_size).equal(found):
        for slots in sides:
            check_pages(slots, page_size)
    return numbers


def check_pages(indices: torch.Tensor, page_size: int) -> None:
    """Look at each slot.

    Raises:
        InvalidTransferError: the indices are not int64, or not whole pages of consecutive slots.
    """
    import torch

    if indices.dtype != torch.int64:
        raise InvalidTransferError(f"indices must be int64, got {indices.dtype}")
    if indices.numel() % page_size:
        raise _not_whole(indices, page_size)
    pages = indices.reshape(-1, page_size)
    first = pages[:, :1]
    whole = first - first % page_size + torch.arange(page_size)
    if not whole.equal(pages):
        raise _not_whole(pages[(whole != pages).any(1)][0], page_size)


@functools.cache
def _end_offsets(page_size: int) -> torch.Tensor:
    import torch

    return torch.tensor([[0], [page_size - 1]])


def _not_whole(slots: torch.Tensor, page_size: int) -> InvalidTransferError:
    named = ", ".join(str(slot) for slot in cast("list[object]", slots[:NAMED_SLOTS].tolist()))
    return InvalidTransferError(
        f"indices must be whole pages of {page_size} consecutive slots, got {named}, ..."
    )
