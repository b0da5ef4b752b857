"""The I/O backend `mapped`: kernels read and write page-locked host memory.

The pages may lie anywhere in it.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.transfer.regions.runs import in_order, named_pages
from hicache_storage.transfer.uploads import prepare_uploads

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hicache_storage.transfer.backends.staging import StagedPair
    from hicache_storage.transfer.regions.runs import PageMoves
    from hicache_storage.transfer.streams import Rows, Stream


class _Moved(NamedTuple):
    """The pages of a transfer, where kernels read their numbers."""

    device: Rows
    host: Rows
    name: str


class MappedCopies:
    """One kernel for each layer and part, on the transfer's own stream.

    How many calls that takes depends on neither the pages nor the layout. Where the device has no
    kernel that moves rows directly, two do it through a buffer, as many rows at a time as that
    takes; for each direction there is one.

    Args:
        pair: its device allocates the buffers, of one page of one layer's part at least, and makes
            host memory visible to kernels.

    Raises:
        InvalidPoolError: kernels cannot reach the host memory, or there is none for a buffer.
    """

    def __init__(self, pair: StagedPair) -> None:
        self._device_pages = pair.device_pages
        self._host_pages = pair.host_pages.seen_by(pair.device.mapped)
        self._out: torch.Tensor | None = None
        self._in: torch.Tensor | None = None
        if not pair.device.moves_rows:
            largest = max(
                part[0].numel() * part.element_size() for part in pair.device_pages.layer(0)
            )
            size = max(1, min(pair.staging_bytes // largest, pair.device_pages.page_num)) * largest
            out, into = pair.streams
            self._out = pair.device.scratch(size, [out])
            self._in = pair.device.scratch(size, [into])
        for stream in pair.streams:
            prepare_uploads(stream, pair.host_pages.page_num)

    def write_back(self, stream: Stream, moves: PageMoves) -> None:
        moved = _uploaded(stream, moves)
        for layer in range(self._device_pages.layer_num):
            what = f"write-back of layer {layer} of {moved.name}"
            for source, destination in zip(
                self._device_pages.layer(layer), self._host_pages.layer(layer), strict=True
            ):
                _move(stream, destination, moved.host, source, moved.device, self._out, what)

    def load(self, stream: Stream, moves: PageMoves) -> Callable[[int], None]:
        return partial(self._load_layer, stream, _uploaded(stream, moves))

    def _load_layer(self, stream: Stream, moved: _Moved, layer: int) -> None:
        what = f"load of layer {layer} into {moved.name}"
        for destination, source in zip(
            self._device_pages.layer(layer), self._host_pages.layer(layer), strict=True
        ):
            _move(stream, destination, moved.device, source, moved.host, self._in, what)


def _uploaded(stream: Stream, moves: PageMoves) -> _Moved:
    # Ascending host pages: what kernels read and write over the bus is as long as it can be.
    device, host = in_order(moves)
    return _Moved(stream.upload(device), stream.upload(host), named_pages("device", device))


def _move(
    stream: Stream,
    destination: torch.Tensor,
    destination_rows: Rows,
    source: torch.Tensor,
    source_rows: Rows,
    staging: torch.Tensor | None,
    what: str,
) -> None:
    if staging is None:
        stream.move_rows(destination, destination_rows, source, source_rows, what)
        return
    row_bytes = math.prod(source.shape[1:]) * source.element_size()
    room, count = len(staging) // row_bytes, len(source_rows.host)
    for start in range(0, count, room):
        rows = min(room, count - start)
        staged = staging[: rows * row_bytes].view(source.dtype).view(rows, *source.shape[1:])
        # Both kernels are on one stream: its order protects the buffer, without events.
        stream.gather(staged, source, source_rows.part(start, rows), what)
        stream.scatter(destination, destination_rows.part(start, rows), staged, what)
