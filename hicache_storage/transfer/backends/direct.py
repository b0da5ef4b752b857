"""The I/O backend `direct`: a copy engine moves pages from where they lie to where they belong."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicache_storage.transfer.regions.runs import RowRuns, named_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hicache_storage.transfer.pages import LayeredPages
    from hicache_storage.transfer.regions.runs import PageMoves
    from hicache_storage.transfer.streams import Stream


class DirectCopies:
    """One call for each layer and part, with the addresses of all pages.

    Pages that are adjacent on both sides are one piece where their rows are. Where a layer's rows
    lie apart in host memory, every row is a piece.
    """

    def __init__(self, device_pages: LayeredPages, host_pages: LayeredPages) -> None:
        self._device_pages = device_pages
        self._host_pages = host_pages

    def write_back(self, stream: Stream, moves: PageMoves) -> None:
        rows, name = RowRuns(moves.device, moves.host), named_pages("device", moves.device)
        for layer in range(self._device_pages.layer_num):
            what = f"write-back of layer {layer} of {name}"
            _copy(
                stream, self._device_pages.layer(layer), self._host_pages.layer(layer), rows, what
            )

    def load(self, stream: Stream, moves: PageMoves) -> Callable[[int], None]:
        return partial(
            self._load_layer,
            stream,
            RowRuns(moves.host, moves.device),
            named_pages("device", moves.device),
        )

    def _load_layer(self, stream: Stream, rows: RowRuns, name: str, layer: int) -> None:
        what = f"load of layer {layer} into {name}"
        _copy(stream, self._host_pages.layer(layer), self._device_pages.layer(layer), rows, what)


def _copy(
    stream: Stream,
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    rows: RowRuns,
    what: str,
) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        stream.copy_rows(destination, source, rows, what)
