"""The copies of a plan: enqueued in a number of calls that hardly depends on the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from hicache_storage.transfer.plan import How
from hicache_storage.transfer.streams import RowSide, recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.transfer.plan import PartGroup
    from hicache_storage.transfer.streams import Device, Stream

SideT = TypeVar("SideT")
STAGING_BYTES: Final = 128 << 20
"""Length of a staging buffer; a direction whose plan needs them has two."""
BUS_BLOCKS: Final = 8
"""Multiprocessors of a kernel that reads or writes host memory: more are no faster."""
DEVICE_BLOCKS: Final = 32
"""Multiprocessors of a kernel that gathers or scatters on the device."""
MAX_PIECES: Final = 1024
"""Pieces of a transfer that go by DMA; the kernel takes the other pages.

A stream's queue has about as many places, and a call that finds none waits.
"""
DEVICE, HOST = 0, 1
"""Rows of page numbers."""


class PageCopies:
    """The copies between two pools in one direction.

    Some are enqueued on streams of their own. Those begin behind what the direction's stream holds
    when `begin` is called, and that waits for them, also where one is refused: an event recorded on
    it afterwards stands for all.

    Args:
        stream: of the direction.
        pages: in the pool that is written, none of them twice in a transfer.
        staging_bytes: as `PageTransfers` has it.
        outwards: True for copies from the device to the host.
    """

    def __init__(
        self,
        device: Device,
        plan: Sequence[PartGroup],
        stream: Stream,
        pages: int,
        staging_bytes: int,
        *,
        outwards: bool,
    ) -> None:
        self._stream = stream
        self._table = device.page_table(pages)
        self.lanes = [
            Lane(device, group, stream, self._table, staging_bytes, outwards) for group in plan
        ]

    def begin(self, pages: torch.Tensor) -> None:
        """Prepare the copies of a transfer.

        Args:
            pages: their numbers in two rows, `DEVICE` and `HOST`: int64 on the CPU.
        """
        self._stream.upload(self._table, pages)
        for lane in self.lanes:
            lane.begin(pages)

    def enqueue(self, layer: int) -> bool:
        """Enqueue the copies of the layers that begin with this one.

        False if there are none, as they came with earlier ones.
        """
        # All of them: no lane is left out because another one has enqueued something.
        enqueued = [lane.enqueue(layer) for lane in self.lanes]
        return any(enqueued)

    def enqueue_all(self) -> None:
        """Enqueue the copies of all layers."""
        for lane in self.lanes:
            for layer in lane.runs:
                lane.enqueue(layer)


class Run(NamedTuple):
    """Adjacent layers that are copied together."""

    what: str
    parts: range
    """Theirs, among those of all layers."""
    starts: torch.Tensor
    """Addresses of page 0, in two rows as page numbers, for each part of the first layer."""
    piece_bytes: int
    buffers: Sequence[Buffer]
    """The staging buffers, as these layers use them."""
    room: int
    """Pages that fit into a buffer."""


class Buffer(NamedTuple):
    """A staging buffer, as a run of layers uses it."""

    rows: object
    """The kernel that gathers the layers into it, or scatters them from there."""
    pieces: torch.Tensor
    """Addresses in it: (pages, parts of a layer)."""


class Lane:
    """One direction of the copies of parts that have the same lengths."""

    def __init__(
        self,
        device: Device,
        group: PartGroup,
        stream: Stream,
        table: object,
        staging_bytes: int,
        outwards: bool,
    ) -> None:
        import torch

        self._device = device
        self._group = group
        self._stream = stream
        self._table = table
        self._outwards = outwards
        self.staging: Staging | None = None
        how = group.out if outwards else group.into
        self._rows = self._row_copy(group.device, RowSide(group.host, HOST), BUS_BLOCKS)
        whole = range(group.layer_num)
        runs = [whole] if outwards and how is not How.DIRECT else [range(n, n + 1) for n in whole]
        if how is How.STAGED and not outwards:
            # A write-back passes whole pages, as it is acknowledged as a whole. A load passes few
            # layers at first, for which kernels wait (rule ST-2).
            runs = growing(len(whole))
        self._max_pages = 0 if how is How.KERNEL else MAX_PIECES // (group.parts * len(runs))
        buffers: list[torch.Tensor] = []
        if how is How.STAGED:
            # A stream of its own, so that one buffer is filled while the other one is drained.
            filler = device.stream(*(("gather", "lowest") if outwards else ("stage", "highest")))
            page_bytes = group.parts * group.layer_bytes * max(map(len, runs))
            pages = min(self._max_pages, group.host[0].shape[0])
            room = max(1, min(staging_bytes // page_bytes, pages))
            buffers = [device.scratch(room * page_bytes, (filler, stream)) for _ in range(2)]
            self.staging = Staging(device, filler, buffers)
        self.runs = {layers.start: self._run(layers, buffers) for layers in runs}
        """By their first layer."""
        views = group.device[0], group.host[0]
        pitches = [view.stride(0) * view.element_size() for view in views]
        self._pitches = torch.tensor(pitches).view(2, 1, 1)
        self._pages, self._sent = 0, 0
        self._offsets: torch.Tensor | None = None

    def begin(self, pages: torch.Tensor) -> None:
        """Take the pages of the next transfer."""
        self._pages = pages.shape[1]
        self._sent = min(self._pages, self._max_pages)
        if self._sent:
            self._offsets = pages[:, : self._sent].unsqueeze(2) * self._pitches
            if self.staging is not None:
                self.staging.begin(self._stream)

    def enqueue(self, layer: int) -> bool:
        """Enqueue the copies of the layers that begin with this one; False if none do."""
        run = self.runs.get(layer)
        if run is None:
            return False
        if self._offsets is not None and self._sent:
            on_device, on_host = self._offsets + run.starts
            if self.staging is None:
                self._send(self._stream, on_device, on_host, run)
            else:
                self._stage(self.staging, on_host, run)
        if self._sent < self._pages:
            rest = range(self._sent, self._pages)
            self._stream.copy_rows(self._rows, run.parts, rest, run.what)
        return True

    def _stage(self, staging: Staging, on_host: torch.Tensor, run: Run) -> None:
        parts = range(len(run.parts))
        for start in range(0, self._sent, run.room):
            pages = range(start, min(start + run.room, self._sent))
            buffer, pieces = run.buffers[staging.turn()], on_host[start : pages.stop]
            try:
                if self._outwards:
                    staging.filler.copy_rows(buffer.rows, parts, pages, run.what)
                else:
                    self._send(staging.filler, buffer.pieces, pieces, run)
            finally:
                # Also behind a copy that was refused half-way: what was enqueued uses the pages.
                staging.hand_over(self._stream)
            if self._outwards:
                self._send(self._stream, buffer.pieces, pieces, run)
            else:
                self._stream.copy_rows(buffer.rows, parts, pages, run.what)
            staging.release(self._stream)

    def _send(
        self, stream: Stream, on_device: torch.Tensor, on_host: torch.Tensor, run: Run
    ) -> None:
        to, origin = self._to_from(on_device, on_host)
        stream.copy_pieces(to, origin, run.piece_bytes, run.what)

    def _to_from(self, on_device: SideT, other: SideT) -> tuple[SideT, SideT]:
        return (other, on_device) if self._outwards else (on_device, other)

    def _row_copy(self, on_device: list[torch.Tensor], other: RowSide, blocks: int) -> object:
        sides = self._to_from(RowSide(on_device, DEVICE), other)
        return self._device.row_copy(*sides, self._table, blocks)

    def _run(self, layers: range, staging: Sequence[torch.Tensor]) -> Run:
        import torch

        group = self._group
        direction = "write-back" if self._outwards else "load"
        named = f"layer {layers.start}" if len(layers) == 1 else f"{len(layers)} layers"
        parts = range(layers.start * group.parts, layers.stop * group.parts)
        views = [each[parts.start : parts.stop] for each in (group.device, group.host)]
        starts = [[view.data_ptr() for view in each[: group.parts]] for each in views]
        block = group.layer_bytes * len(layers)
        room = len(staging[0]) // (group.parts * block) if staging else 0
        buffers: list[Buffer] = []
        for memory in staging:
            regions = memory[: group.parts * room * block].view(group.parts, -1)
            staged = [
                _like(regions[number % group.parts], block, view, views[HOST][number % group.parts])
                for number, view in enumerate(views[HOST])
            ]
            rows = self._row_copy(views[DEVICE], RowSide(staged, None), DEVICE_BLOCKS)
            firsts = torch.tensor([region.data_ptr() for region in regions])
            pages = torch.arange(0, room * block, block).unsqueeze(1)
            buffers.append(Buffer(rows, firsts + pages))
        what = f"{direction} of {named}"
        return Run(what, parts, torch.tensor(starts).unsqueeze(1), block, buffers, room)


class Staging:
    """Two buffers on the device that one stream fills while another one drains them.

    Args:
        filler: the stream that fills; it belongs to this.
        memory: kept here, as copies know addresses only.
    """

    def __init__(self, device: Device, filler: Stream, memory: Sequence[torch.Tensor]) -> None:
        self.filler = filler
        self.memory = memory
        self._device = device
        # One that was never recorded is complete, as the buffer is free. They are recorded again:
        # waits that were enqueued before keep the position that an event had then.
        self._drained = [device.event() for _ in range(2)]
        self._filled = device.event()
        self._turn = 0

    def begin(self, behind: Stream) -> None:
        """Let the filling wait for what another stream holds now."""
        self.filler.wait_event(recorded(self._device, behind))

    def turn(self) -> int:
        """Number of the next buffer; what fills it waits until it has been drained."""
        self._turn ^= 1
        self._before_fill()
        return self._turn

    def hand_over(self, drainer: Stream) -> None:
        """Let what drains the buffer wait until it has been filled."""
        self._filled.record(self.filler)
        drainer.wait_event(self._filled)

    def release(self, drainer: Stream) -> None:
        """Note that everything that drains the buffer has been enqueued."""
        self._drained[self._turn].record(drainer)

    # A method of its own, so that tests can leave out this wait alone.
    def _before_fill(self) -> None:
        self.filler.wait_event(self._drained[self._turn])


def growing(layers: int) -> list[range]:
    """Runs of 1, 1, 2, 4, ... layers: the first comes early, and later pieces are long."""
    runs, start = list[range](), 0
    while start < layers:
        runs.append(range(start, min(max(1, 2 * start), layers)))
        start = runs[-1].stop
    return runs


def _like(
    region: torch.Tensor, block: int, view: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """A view of blocks of bytes that is to them what `view` is to the pages of a pool.

    Args:
        first: the view of the layer that a block begins with.
    """
    typed, size = region.view(view.dtype), view.element_size()
    offset = typed.storage_offset() + (view.data_ptr() - first.data_ptr()) // size
    shape, strides = (len(region) // block, *view.shape[1:]), (block // size, *view.stride()[1:])
    return typed.as_strided(shape, strides, offset)
