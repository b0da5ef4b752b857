"""Which pages of a transfer lie side by side, so that one copy does for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    import torch


class Run(NamedTuple):
    """Adjacent pages that go to adjacent pages, given by the first page on either side."""

    source: int
    destination: int
    pages: int


def joint_runs(sources: torch.Tensor, destinations: torch.Tensor) -> list[Run]:
    """The longest runs of page numbers that are adjacent on both sides, by ascending destination.

    Args:
        sources, destinations: int64 on the CPU, as many each; no destination twice.
    """
    ordered, order = destinations.sort()
    origin = sources[order]
    breaks = ((ordered.diff() != 1) | (origin.diff() != 1)).nonzero().view(-1) + 1
    starts = [0, *cast("list[int]", breaks.tolist())]
    ends = [*starts[1:], len(ordered)]
    firsts = zip(cast("list[int]", origin[starts].tolist()), cast("list[int]", ordered[starts].tolist()), strict=True)
    return [Run(source, to, end - start) for (source, to), start, end in zip(firsts, starts, ends, strict=True)]


def named_pages(where: str, first: int, pages: int) -> str:
    """What messages call adjacent pages."""
    return f"{where} page {first}" if pages == 1 else f"{where} pages {first} to {first + pages - 1}"
