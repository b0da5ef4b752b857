"""The I/O backend `mapped`: kernels read and write page-locked host memory themselves, wherever its pages lie."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.transfer.runs import moves_by_host

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from hicache_storage.transfer.runs import PageMoves
    from hicache_storage.transfer.staging import StagedPair
    from hicache_storage.transfer.streams import Rows, Stream


class _Piece(NamedTuple):
    """As many pages as the staging buffer takes of one part of a layer."""

    device: Rows
    host: Rows
    pages: int
    name: str


class MappedCopies:
    """Gathers pages on one side and scatters them on the other, layer by layer, on the transfer's own stream.

    How many calls that takes depends on neither the order of the pages nor the layout. Between the two kernels lies a
    buffer on the device, for each direction one.

    Args:
        pair: its device allocates the buffers, of one page of one layer's part at least, and makes host memory visible to kernels.

    Raises:
        InvalidPoolError: kernels cannot reach the host memory, or there is none for a buffer.
    """

    def __init__(self, pair: StagedPair) -> None:
        self._device_pages = pair.device_pages
        self._host_pages = pair.host_pages.seen_by(pair.device.mapped)
        largest = max(part[0].numel() * part.element_size() for part in pair.device_pages.layer(0))
        self._room = max(1, min(pair.staging_bytes // largest, pair.device_pages.page_num))
        self._out, self._in = (pair.device.scratch(self._room * largest, [stream]) for stream in pair.streams)

    def write_back(self, stream: Stream, moves: PageMoves) -> None:
        pieces = self._pieces(stream, moves)
        for layer in range(self._device_pages.layer_num):
            for piece, source, destination, staged in self._shares(layer, pieces, self._out):
                what = f"write-back of layer {layer} of {piece.name}"
                stream.gather(staged, source, piece.device, what)
                stream.scatter(destination, piece.host, staged, what)

    def load(self, stream: Stream, moves: PageMoves) -> Callable[[int], None]:
        return partial(self._load_layer, stream, self._pieces(stream, moves))

    def _load_layer(self, stream: Stream, pieces: Sequence[_Piece], layer: int) -> None:
        for piece, destination, source, staged in self._shares(layer, pieces, self._in):
            what = f"load of layer {layer} into {piece.name}"
            stream.gather(staged, source, piece.host, what)
            stream.scatter(destination, piece.device, staged, what)

    def _shares(
        self, layer: int, pieces: Sequence[_Piece], staging: torch.Tensor
    ) -> Iterator[tuple[_Piece, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """For each part and piece: the part on the device, the part on the host, and where the piece is staged."""
        for device, host in zip(self._device_pages.layer(layer), self._host_pages.layer(layer), strict=True):
            for piece in pieces:
                shape = (piece.pages, *device.shape[1:])
                staged = staging[: math.prod(shape) * device.element_size()].view(device.dtype).view(shape)
                yield piece, device, host, staged

    def _pieces(self, stream: Stream, moves: PageMoves) -> list[_Piece]:
        """The pages of a transfer in pieces that the buffer takes."""
        return [
            _Piece(stream.upload(device), stream.upload(host), len(host), name)
            for name, (device, host) in moves_by_host(moves, self._room)
        ]
