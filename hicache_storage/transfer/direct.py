"""The I/O backend `direct`: a copy engine moves runs of pages, from where they lie to where they belong."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hicache_storage.transfer.runs import joint_runs, named_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from hicache_storage.transfer.pages import LayeredPages
    from hicache_storage.transfer.runs import PageMoves, Run
    from hicache_storage.transfer.streams import Stream


class DirectCopies:
    """One copy for each layer, part and run of pages that are adjacent on both sides.

    Where a layer's rows lie apart in host memory, that copy is one of rows with gaps between them; in the layout
    `page_head` it falls apart into as many as pages times heads.
    """

    def __init__(self, device_pages: LayeredPages, host_pages: LayeredPages) -> None:
        self._device_pages, self._host_pages = device_pages, host_pages

    def write_back(self, stream: Stream, moves: PageMoves) -> None:
        runs = joint_runs(moves.device, moves.host)
        names = [named_pages("device", run.source, run.pages) for run in runs]
        for layer in range(self._device_pages.layer_num):
            what = [f"write-back of layer {layer} of {name}" for name in names]
            _copy(stream, self._device_pages.layer(layer), self._host_pages.layer(layer), runs, what)

    def load(self, stream: Stream, moves: PageMoves) -> Callable[[int], None]:
        runs = joint_runs(moves.host, moves.device)
        return partial(self._load_layer, stream, runs, [named_pages("device", run.destination, run.pages) for run in runs])

    def _load_layer(self, stream: Stream, runs: Sequence[Run], names: Sequence[str], layer: int) -> None:
        what = [f"load of layer {layer} into {name}" for name in names]
        _copy(stream, self._host_pages.layer(layer), self._device_pages.layer(layer), runs, what)


def _copy(
    stream: Stream,
    sources: Sequence[torch.Tensor],
    destinations: Sequence[torch.Tensor],
    runs: Sequence[Run],
    what: Sequence[str],
) -> None:
    for source, destination in zip(sources, destinations, strict=True):
        for run, name in zip(runs, what, strict=True):
            stream.copy(destination.narrow(0, run.destination, run.pages), source.narrow(0, run.source, run.pages), name)
