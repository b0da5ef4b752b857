"""Numbers of pages."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from hicache_storage.spec import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

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
        slots = _on_host(indices, page_size)
        ends.append(slots.as_strided((2, slots.numel() // page_size), (page_size - 1, page_size)))
    found = torch.stack(ends)
    first = found.select(1, 0)
    if page_size == 1:
        return first.contiguous()
    shift = page_size.bit_length() - 1
    # A shift takes a quarter of a division's time.
    numbers = first >> shift if 1 << shift == page_size else first // page_size
    if not _end_offsets(page_size).add(numbers.unsqueeze(1), alpha=page_size).equal(found):
        for indices in sides:
            check_pages(indices, page_size)
    return numbers


def check_pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    """The number of each page, after a look at every slot.

    Raises:
        InvalidTransferError: the indices are not int64, or not whole pages of consecutive slots.
    """
    slots = _on_host(indices, page_size)
    numbers = slots[::page_size] // page_size
    expected = page_slots(numbers, page_size)
    if not expected.equal(slots):
        pages = slots.view(-1, page_size)
        raise _not_whole(pages[(pages != expected.view_as(pages)).any(1)].view(-1), page_size)
    return numbers


def page_slots(numbers: torch.Tensor, page_size: int) -> torch.Tensor:
    """The slots of some pages."""
    return (numbers.unsqueeze(1) * page_size + numbers.new_tensor(range(page_size))).view(-1)


def named(slots: torch.Tensor) -> str:
    """Some slots, the first of them by name."""
    text = ", ".join(str(int(slot)) for slot in slots[:NAMED_SLOTS])
    return text if slots.numel() <= NAMED_SLOTS else f"{text}, ... ({slots.numel()} in all)"


@functools.cache
def _end_offsets(page_size: int) -> torch.Tensor:
    import torch

    return torch.tensor([[0], [page_size - 1]])


def _on_host(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    import torch

    if indices.dtype != torch.int64:
        raise InvalidTransferError(f"indices must be int64, got {indices.dtype}")
    slots = indices.reshape(-1).cpu().contiguous()
    if slots.numel() % page_size:
        raise _not_whole(slots, page_size)
    return slots


def _not_whole(slots: torch.Tensor, page_size: int) -> InvalidTransferError:
    return InvalidTransferError(
        f"indices must be whole pages of {page_size} consecutive slots, not {named(slots)}"
    )
