"""Rows of tensors moved by their numbers, whatever their element type is.

torch is imported where it is used: the simulator, which uses this, is imported on machines without
it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


def gather_rows(destination: torch.Tensor, source: torch.Tensor, rows: torch.Tensor) -> None:
    """`destination[i] = source[rows[i]]`; all on one device, `rows` int64."""
    import torch

    to, origin = as_words(destination, source)
    torch.index_select(origin, 0, rows, out=to)


def move_rows(
    destination: torch.Tensor,
    destination_rows: torch.Tensor,
    source: torch.Tensor,
    source_rows: torch.Tensor,
) -> None:
    """`destination[destination_rows[i]] = source[source_rows[i]]`, through memory in between."""
    to, origin = as_words(destination, source)
    # torch has no operation that selects rows on both sides.
    to.index_copy_(0, destination_rows, origin.index_select(0, source_rows))


def scatter_rows(destination: torch.Tensor, rows: torch.Tensor, source: torch.Tensor) -> None:
    """`destination[rows[i]] = source[i]`; all on one device, `rows` int64."""
    to, origin = as_words(destination, source)
    to.index_copy_(0, rows, origin)


def rows_of(tensor: torch.Tensor, rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that together are the rows of these numbers, adjacent ones joined."""
    ordered = sorted(set(cast("list[int]", rows.tolist())))
    start = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or ordered[end] != ordered[end - 1] + 1:
            yield tensor.narrow(0, ordered[start], end - start)
            start = end


def as_words(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return views as the widest integers that all allow.

    Kernels move them fastest, and know all of them.
    """
    import torch

    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    # Words are cut out of a row, never out of several.
    tensors = tuple(tensor.unsqueeze(-1) if tensor.dim() == 1 else tensor for tensor in tensors)
    fitting = next(
        word for word in words if all(_holds(tensor, word.itemsize) for tensor in tensors)
    )
    return tuple(tensor.view(fitting) for tensor in tensors)


def _holds(tensor: torch.Tensor, word: int) -> bool:
    """Return True if the last axis of a tensor consists of whole, aligned words of some bytes."""
    size = tensor.element_size()
    if size == word:
        return True
    if size > word or tensor.stride(-1) != 1 or tensor.data_ptr() % word:
        return False
    return all(
        length * size % word == 0
        for length in (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    )
