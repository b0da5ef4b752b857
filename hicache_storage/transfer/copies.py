"""The copies of a plan: enqueued in a number of calls that hardly depends on the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_storage.transfer.plan import How, make_plan
from hicache_storage.transfer.streams import RowSide, recorded

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.transfer.pages import LayeredPages
    from hicache_storage.transfer.plan import PartGroup, Way
    from hicache_storage.transfer.streams import Device, PageTable, RowCopy, Stream

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
"""Columns of a page table."""


class PageMoves(NamedTuple):
    """The pages of a transfer: the i-th device page from or to the i-th host page."""

    device: torch.Tensor
    """Page numbers: int64 on the CPU. No page twice where it is copied to."""
    host: torch.Tensor


class PageCopies:
    """The copies between two pools.

    Some are enqueued on streams of their own. Those begin behind what the direction's stream holds
    when it is called, and that waits for them: an event recorded on it afterwards stands for all.

    Args:
        streams: of write-backs and of loads.
        way, staging_bytes: as `PageTransfers` has them.
    """

    def __init__(
        self,
        device: Device,
        device_pages: LayeredPages,
        host_pages: LayeredPages,
        streams: tuple[Stream, Stream],
        way: Way | None,
        staging_bytes: int,
    ) -> None:
        self.plan = make_plan(device_pages, host_pages, way)
        # No host page is written twice in a write-back, and no device page in a load.
        tables = device.page_table(host_pages.page_num), device.page_table(device_pages.page_num)
        self._out, self._in = (
            [Lane(device, group, stream, table, staging_bytes, outwards) for group in self.plan]
            for stream, table, outwards in zip(streams, tables, (True, False), strict=True)
        )

    def write_back(self, moves: PageMoves) -> None:
        """Enqueue the copies of all layers from the device to the host."""
        _begin(self._out, moves)
        for lane in self._out:
            for layer in lane.runs:
                lane.enqueue(layer)

    def begin_load(self, moves: PageMoves) -> None:
        """Prepare the copies from the host to the device."""
        _begin(self._in, moves)

    def load(self, layer: int) -> bool:
        """Enqueue the copies of a layer; False if all of them came with earlier ones."""
        # All of them: no group of parts is left out because another one has enqueued something.
        enqueued = [lane.enqueue(layer) for lane in self._in]
        return any(enqueued)

    def join(self, stream: Stream) -> None:
        """Let a direction's stream wait for what streams of their own hold."""
        for lane in (*self._out, *self._in):
            if lane.staging is not None and lane.stream is stream:
                stream.wait_event(recorded(lane.device, lane.staging.filler))


def _begin(lanes: Sequence[Lane], moves: PageMoves) -> None:
    if any(lane.runs_kernels(len(moves.host)) for lane in lanes):
        lanes[0].stream.upload(lanes[0].table, moves)
    for lane in lanes:
        lane.begin(moves)


class Run(NamedTuple):
    """Adjacent layers that are copied together."""

    layers: range
    parts: range
    """Theirs, among those of all layers."""
    starts: tuple[torch.Tensor, torch.Tensor]
    """Addresses of device and host page 0, for each part of the first layer."""
    sizes: torch.Tensor
    """Of pieces, as many as DMA may get at once."""
    buffers: Sequence[Buffer]
    """The staging buffers, as these layers use them."""
    room: int
    """Pages that fit into a buffer."""


class Buffer(NamedTuple):
    """A staging buffer, as a run of layers uses it."""

    rows: RowCopy
    """Gathers the layers into it, or scatters them from there."""
    pieces: torch.Tensor
    """Addresses in it: (pages, parts of a layer)."""


class Lane:
    """One direction of the copies of parts that have the same lengths."""

    def __init__(
        self,
        device: Device,
        group: PartGroup,
        stream: Stream,
        table: PageTable,
        staging_bytes: int,
        outwards: bool,
    ) -> None:
        self.device = device
        self.stream = stream
        self.table = table
        self.staging: Staging | None = None
        self._group = group
        self._outwards = outwards
        how = group.out if outwards else group.into
        self._rows = self._row_copy(group.device, RowSide(group.host, HOST), BUS_BLOCKS)
        whole = range(group.layer_num)
        runs = [whole] if outwards and how is not How.DIRECT else [range(n, n + 1) for n in whole]
        buffers: list[torch.Tensor] = []
        if how is How.STAGED:
            # A write-back passes whole pages, as it is acknowledged as a whole. A load passes few
            # layers at first, for which kernels wait (rule ST-2).
            runs = runs if outwards else growing(len(whole))
            # A stream of its own, so that one buffer is filled while the other one is drained.
            filler = device.stream(*(("gather", "lowest") if outwards else ("stage", "highest")))
            page_bytes = group.parts * group.layer_bytes * max(map(len, runs))
            room = max(1, min(staging_bytes // page_bytes, group.host[0].shape[0]))
            buffers = [device.scratch(room * page_bytes, (filler, stream)) for _ in range(2)]
            self.staging = Staging(device, filler, buffers)
        self._max_pages = 0 if how is How.KERNEL else MAX_PIECES // (group.parts * len(runs))
        self.runs = {layers.start: self._run(layers, buffers) for layers in runs}
        self._name, self._pages, self._sent = "", 0, 0
        self._offsets: list[torch.Tensor] = []

    def runs_kernels(self, pages: int) -> bool:
        """Return True if kernels need the numbers of so many pages."""
        return self.staging is not None or pages > self._max_pages

    def begin(self, moves: PageMoves) -> None:
        """Take the pages of the next transfer."""
        self._pages = len(moves.host)
        self._sent = min(self._pages, self._max_pages)
        self._name = f"{self._pages} device pages"
        if self._pages == 1:
            self._name = f"device page {int(moves.device[0])}"
        if self._sent:
            views = self._group.device[0], self._group.host[0]
            self._offsets = [
                numbers[: self._sent].unsqueeze(1) * (view.stride(0) * view.element_size())
                for numbers, view in zip(moves, views, strict=True)
            ]
            if self.staging is not None:
                self.staging.begin(self.stream)

    def enqueue(self, layer: int) -> bool:
        """Enqueue the copies of the layers that begin with this one; False if none do."""
        run = self.runs.get(layer)
        if run is None:
            return False
        layers = f"layer {layer}" if len(run.layers) == 1 else f"{len(run.layers)} layers"
        direction = ("load of {} into {}", "write-back of {} of {}")[self._outwards]
        what = direction.format(layers, self._name)
        if self._sent:
            on_host = self._offsets[HOST] + run.starts[HOST]
            if self.staging is not None:
                self._stage(self.staging, run, on_host, what)
            else:
                on_device = self._offsets[DEVICE] + run.starts[DEVICE]
                self._send(self.stream, run, on_device, on_host, what)
        if self._sent < self._pages:
            rest = range(self._sent, self._pages)
            self.stream.copy_rows(self._rows, self.table, run.parts, rest, what)
        return True

    def _stage(self, staging: Staging, run: Run, on_host: torch.Tensor, what: str) -> None:
        for start in range(0, self._sent, run.room):
            pages = range(start, min(start + run.room, self._sent))
            buffer = run.buffers[staging.turn()]
            staged, pieces = buffer.pieces, on_host[start : pages.stop]
            parts = range(len(run.parts))
            if self._outwards:
                staging.filler.copy_rows(buffer.rows, self.table, parts, pages, what)
                staging.hand_over(self.stream)
                self._send(self.stream, run, staged, pieces, what)
            else:
                self._send(staging.filler, run, staged, pieces, what)
                staging.hand_over(self.stream)
                self.stream.copy_rows(buffer.rows, self.table, parts, pages, what)
            staging.release(self.stream)

    def _send(
        self, stream: Stream, run: Run, on_device: torch.Tensor, on_host: torch.Tensor, what: str
    ) -> None:
        to, origin = (on_host, on_device) if self._outwards else (on_device, on_host)
        stream.copy_pieces(to, origin, run.sizes, what)

    def _row_copy(self, on_device: list[torch.Tensor], other: RowSide, blocks: int) -> RowCopy:
        pages = RowSide(on_device, DEVICE)
        return self.device.row_copy(*((other, pages) if self._outwards else (pages, other)), blocks)

    def _run(self, layers: range, staging: Sequence[torch.Tensor]) -> Run:
        group = self._group
        parts = range(layers.start * group.parts, layers.stop * group.parts)
        on_device, on_host = (
            views[parts.start : parts.stop] for views in (group.device, group.host)
        )
        block = group.layer_bytes * len(layers)
        room = len(staging[0]) // (group.parts * block) if staging else 0
        buffers: list[Buffer] = []
        for memory in staging:
            regions = memory[: group.parts * room * block].view(group.parts, -1)
            views = [
                _like(regions[number % group.parts], block, view, on_host[number % group.parts])
                for number, view in enumerate(on_host)
            ]
            rows = self._row_copy(on_device, RowSide(views, None), DEVICE_BLOCKS)
            pages = _full(room, block).cumsum(0).sub(block).unsqueeze(1)
            buffers.append(Buffer(rows, pages + _addresses(regions.unbind())))
        starts = _addresses(on_device[: group.parts]), _addresses(on_host[: group.parts])
        sizes = _full(min(MAX_PIECES, room * group.parts if staging else MAX_PIECES), block)
        return Run(layers, parts, starts, sizes, buffers, room)


class Staging:
    """Two buffers on the device that one stream fills while another one drains them.

    Args:
        filler: the stream that fills; it belongs to this.
        memory: kept here, as copies know addresses only.
    """

    def __init__(self, device: Device, filler: Stream, memory: Sequence[torch.Tensor]) -> None:
        self.filler = filler
        self._memory = memory
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


def _addresses(views: Sequence[torch.Tensor]) -> torch.Tensor:
    import torch

    return torch.tensor([view.data_ptr() for view in views])


def _full(count: int, value: int) -> torch.Tensor:
    import torch

    return torch.full((count,), value, dtype=torch.int64)
