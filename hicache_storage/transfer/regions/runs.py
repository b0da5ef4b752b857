"""The pages of a transfer as numbers.

Adjacent ones are joined into runs by vector arithmetic, however many there are.
"""

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


class RowRun(NamedTuple):
    """Adjacent rows that go to adjacent rows, given by the first row on either side."""

    source: int
    destination: int
    rows: int


class Pieces(NamedTuple):
    """Contiguous copies: int64 on the CPU, as many numbers in each."""

    destinations: torch.Tensor
    """Offsets in the destination, in bytes."""
    sources: torch.Tensor
    """Offsets in the source, in bytes."""
    sizes: torch.Tensor
    """Lengths, in bytes."""


class RowRuns:
    """Rows to copy from numbered places to numbered places, by ascending destination.

    Args:
        sources, destinations: int64 on the CPU, as many each; no destination twice.
    """

    def __init__(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        self.destinations, order = destinations.sort()
        self.sources = sources[order]
        breaks = ((self.destinations.diff() != 1) | (self.sources.diff() != 1)).nonzero().view(
            -1
        ) + 1
        self.starts = _with_zero(breaks)
        """int64: for each of the longest runs, which of the rows is its first."""
        self.lengths = self.starts.diff(append=self.starts.new_full((1,), len(order)))
        """int64: rows of each run."""
        self.pieces: dict[object, Pieces] = {}
        """Cached results of `pieces_of`: every layer of a pool has the same rows."""

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.destinations)

    @property
    def run_num(self) -> int:
        return len(self.starts)

    def runs(self) -> Iterator[RowRun]:
        """Yield the runs one by one; for few runs."""
        firsts = (
            cast("list[int]", numbers[self.starts].tolist())
            for numbers in (self.sources, self.destinations)
        )
        lengths = cast("list[int]", self.lengths.tolist())
        return (RowRun(*run) for run in zip(*firsts, lengths, strict=True))


def in_order(moves: PageMoves) -> PageMoves:
    """A transfer by ascending host pages."""
    host, order = moves.host.sort()
    return PageMoves(moves.device[order], host)


def named_pages(where: str, numbers: torch.Tensor) -> str:
    """The name of pages in messages."""
    return (
        f"{where} page {int(numbers[0])}" if len(numbers) == 1 else f"{len(numbers)} {where} pages"
    )


def _with_zero(numbers: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.cat((numbers.new_zeros(1), numbers))
