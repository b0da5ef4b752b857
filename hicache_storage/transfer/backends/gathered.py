"""The I/O backend `kernel`: pages are gathered and scattered on the device.

They cross the bus in large pieces.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.transfer.backends.staging import Staging
from hicache_storage.transfer.regions.runs import RowRuns, in_order, named_pages
from hicache_storage.transfer.uploads import prepare_uploads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.transfer.backends.staging import StagedPair
    from hicache_storage.transfer.pages import LaidOutPages
    from hicache_storage.transfer.regions.runs import PageMoves
    from hicache_storage.transfer.streams import Rows, Stream


class _Piece(NamedTuple):
    """As many pages as a staging buffer takes, in the order of their host pages."""

    device: Rows
    """The device pages."""
    rows: RowRuns
    """Between host pages and those of the buffer, whichever is the source."""
    name: str

    @property
    def pages(self) -> int:
        return len(self.rows)


class GatheredCopies:
    """Moves pages between the device's layers and the host through staging buffers on the device.

    A buffer is laid out as the host pool is. A write-back gathers all layers of a number of pages
    there, and copies them to the host whole: one call for each part, wherever the pages are. A load
    copies one layer of a number of pages there, and scatters it. Copies are long where host pages
    are adjacent; neither cares for the order of the device pages.

    Args:
        pair: its device makes the streams that fill the buffers, and their memory: two for each
            direction, of one page at least.
    """

    def __init__(self, pair: StagedPair) -> None:
        self._device_pages = pair.device_pages
        self._host_pages = pair.host_pages
        self._device = pair.device
        self._staging_bytes = pair.staging_bytes
        out, into = pair.streams
        # A write-back passes whole pages, as it is acknowledged as a whole. A load passes one layer
        # at a time, for which kernels wait (rule ST-2).
        self._out = self._staging("gather", out, pair.host_pages.layer_num)
        self._in = self._staging("stage", into, 1)
        # The two streams that run kernels: only those need row numbers on the device.
        for kernels in (self._out.filler, into):
            prepare_uploads(kernels, pair.host_pages.page_num)

    def write_back(self, stream: Stream, moves: PageMoves) -> None:
        staging = self._out
        # The filler is a stream of its own, which has not waited for kernels and other copies yet.
        staging.begin(stream)
        for piece in self._pieces(staging.filler, staging.pages, moves, outwards=True):
            staging.through(
                stream,
                partial(self._gather, staging.filler, piece),
                partial(self._copy_out, stream, piece),
            )

    def load(self, stream: Stream, moves: PageMoves) -> Callable[[int], None]:
        staging = self._in
        staging.begin(stream)
        return partial(
            self._load_layer,
            stream,
            staging,
            self._pieces(stream, staging.pages, moves, outwards=False),
        )

    def _load_layer(
        self, stream: Stream, staging: Staging, pieces: Sequence[_Piece], layer: int
    ) -> None:
        for piece in pieces:
            fill = partial(self._copy_in, staging.filler, piece, layer)
            staging.through(stream, fill, partial(self._scatter, stream, piece, layer))

    def _gather(self, stream: Stream, piece: _Piece, buffer: LaidOutPages) -> None:
        for layer in range(self._host_pages.layer_num):
            what = f"write-back of layer {layer} of {piece.name}"
            for source, staged in zip(
                self._device_pages.layer(layer), buffer.layer(layer), strict=True
            ):
                stream.gather(staged.narrow(0, 0, piece.pages), source, piece.device, what)

    def _copy_out(self, stream: Stream, piece: _Piece, buffer: LaidOutPages) -> None:
        what = f"write-back of {named_pages('host', piece.rows.destinations)} from staging"
        for source, destination in zip(buffer.parts, self._host_pages.parts, strict=True):
            stream.copy_rows(destination, source, piece.rows, what)

    def _copy_in(self, stream: Stream, piece: _Piece, layer: int, buffer: LaidOutPages) -> None:
        what = f"staging of layer {layer} of {named_pages('host', piece.rows.sources)}"
        for source, staged in zip(self._host_pages.layer(layer), buffer.layer(0), strict=True):
            stream.copy_rows(staged, source, piece.rows, what)

    def _scatter(self, stream: Stream, piece: _Piece, layer: int, buffer: LaidOutPages) -> None:
        what = f"load of layer {layer} into {piece.name}"
        for staged, destination in zip(
            buffer.layer(0), self._device_pages.layer(layer), strict=True
        ):
            stream.scatter(destination, piece.device, staged.narrow(0, 0, piece.pages), what)

    def _pieces(
        self, kernels: Stream, room: int, moves: PageMoves, *, outwards: bool
    ) -> list[_Piece]:
        """Return the pages of a transfer in pieces that a buffer takes.

        `kernels` is the stream that gathers or scatters.
        """
        device, host = in_order(moves)
        # Once for all pieces: each upload costs a call of CUDA and a buffer.
        uploaded = kernels.upload(device)
        pieces: list[_Piece] = []
        for start in range(0, len(host), room):
            pages = host[start : start + room]
            staged = pages.new_tensor(range(len(pages)))
            rows = RowRuns(staged, pages) if outwards else RowRuns(pages, staged)
            name = named_pages("device", device[start : start + room])
            pieces.append(_Piece(uploaded.part(start, len(pages)), rows, name))
        return pieces

    def _staging(self, name: str, drainer: Stream, layers: int) -> Staging:
        # A stream of its own, so that one buffer is filled while the other crosses the bus.
        filler = self._device.stream(name)
        layer_bytes = sum(
            part[0].numel() * part.element_size() for part in self._host_pages.layer(0)
        )
        # At least one page, even if that is longer than `staging_bytes`.
        pages = max(
            1, min(self._staging_bytes // (layers * layer_bytes), self._host_pages.page_num)
        )
        allocate = partial(self._device.scratch, streams=(filler, drainer))
        return Staging(
            self._device,
            filler,
            [self._host_pages.alike(pages, layers, allocate) for _ in range(2)],
        )
