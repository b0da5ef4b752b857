"""The pages of a transfer: which lie side by side, so that one copy does for all of them, and in what pieces they are staged."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch


class PageMoves(NamedTuple):
    """The pages of a transfer: the i-th device page from or to the i-th host page."""

    device: torch.Tensor
    """Page numbers: int64 on the CPU. No page twice where it is copied to."""
    host: torch.Tensor
    """The same of host pages, as many."""


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


def moves_by_host(moves: PageMoves, most: int) -> Iterator[tuple[str, PageMoves]]:
    """A transfer by ascending host pages, at most so many at a time; with each part what messages call its device pages."""
    host, order = moves.host.sort()
    device = moves.device[order]
    for start in range(0, len(order), most):
        part = PageMoves(device[start : start + most], host[start : start + most])
        count = len(part.host)
        yield f"{count} device pages" if count > 1 else named_pages("device", int(part.device[0]), 1), part


def named_pages(where: str, first: int, pages: int) -> str:
    """What messages call adjacent pages."""
    return f"{where} page {first}" if pages == 1 else f"{where} pages {first} to {first + pages - 1}"
