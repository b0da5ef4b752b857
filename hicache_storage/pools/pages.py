"""Numbers of pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from hicache_storage.spec import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    Numbers = npt.NDArray[np.int64]
    """Numbers of pages, in a row for each side."""

NAMED_SLOTS: Final = 8
"""How many slots an error message names."""


def page_numbers(sides: Sequence[torch.Tensor], page_size: int) -> Numbers:
    """The number of each page in indices of several sides: a row for each side.

    Where a page size is a power of two, the first and the last slot of each page are looked at:
    slots of long prefixes are megabytes, and looking at each of them takes longer than all the rest
    of enqueueing. Indices on the device make the caller wait for its current stream.

    Args:
        sides: as many indices each, in whole pages of consecutive slots, and not none.

    Raises:
        InvalidTransferError: they are not int64, or not whole pages.
    """
    # Operations of torch cost several times as much on few pages.
    slots = [_on_host(indices, page_size).numpy() for indices in sides]
    first = np.array([side[::page_size] for side in slots])
    if page_size == 1:
        return first
    offsets = page_size - 1
    if not page_size & offsets:
        # A power of two: a shift takes a third of a division's time, and one reduction half of a
        # comparison's.
        last = np.array([side[offsets::page_size] for side in slots])
        last -= first
        is_aligned = not np.bitwise_or.reduce(first, axis=None) & offsets
        if is_aligned and not np.count_nonzero(last != offsets):
            return first >> offsets.bit_length()
    return np.array([check_pages(indices, page_size).numpy() for indices in sides])


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


def _on_host(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    if indices.dtype != torch.int64:
        raise InvalidTransferError(f"indices must be int64, got {indices.dtype}")
    # Asked first: each of the three calls costs as much as a question.
    is_row = indices.is_cpu and indices.dim() == 1 and indices.is_contiguous()
    slots = indices if is_row else indices.reshape(-1).cpu().contiguous()
    if slots.numel() % page_size:
        raise _not_whole(slots, page_size)
    return slots


def _not_whole(slots: torch.Tensor, page_size: int) -> InvalidTransferError:
    return InvalidTransferError(
        f"indices must be whole pages of {page_size} consecutive slots, not {named(slots)}"
    )
