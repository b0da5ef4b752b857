"""The copies of a plan: enqueued in a number of calls that hardly depends on the pages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import numpy as np
import torch

from hicache_storage.transfer.plan import How, load_group
from hicache_storage.transfer.streams import RowSide

if TYPE_CHECKING:
    from hicache_storage.pools.pages import Numbers
    from hicache_storage.transfer.plan import PartGroup
    from hicache_storage.transfer.streams import Device, Priority, Stream

SideT = TypeVar("SideT")
STAGING_BYTES: Final = 128 << 20
"""Longest staging buffer; a direction whose plan needs them has two."""
MAX_PIECES: Final = 1024
"""Pieces of a transfer that go by DMA; the kernel takes the other pages.

A stream's queue has about as many places, and a call that finds none waits.
"""

DEVICE, HOST = 0, 1
"""Rows of page numbers."""
OUT: Final = "write-back"
IN: Final = "load"
"""The two directions, which are names of their streams."""
PRIORITIES: Final[dict[str, Priority]] = {OUT: "lowest", IN: "highest"}
"""Of their streams: requests wait for loads, and nobody for write-backs."""


class Run(NamedTuple):
    """Adjacent layers that are copied together."""

    what: str
    layers: range
    parts: range
    """Theirs, among those of all layers."""
    starts: list[Numbers]
    """For each side addresses of page 0: a row for each part of the first layer."""
    piece_bytes: int
    room: int
    """Pages that fit into a staging buffer."""
    buffers: list[tuple[object, torch.Tensor]]
    """For each staging buffer the kernel that gathers the layers into it, or scatters them from
    there, and the addresses of pieces in it: (pages, parts of a layer)."""


class Lane:
    """One direction of the copies of parts that have the same lengths.

    Some are enqueued on a stream of its own. Those begin behind what the direction's stream holds
    when `begin` is called, and that waits for them, also where one is refused: an event recorded on
    it afterwards stands for all.

    Args:
        stream: of the direction.
        table: has the page numbers of a transfer.
        direction: `OUT` or `IN`.
    """

    def __init__(
        self,
        device: Device,
        group: PartGroup,
        stream: Stream,
        table: object,
        direction: str,
    ) -> None:
        self._device = device
        self._group = group
        self._stream = stream
        self._table = table
        self._direction = direction
        outwards = direction == OUT
        how = group.out if outwards else group.into
        self._is_staged = how is How.STAGED
        self._rows = self._row_copy(group.device, RowSide(group.host, HOST))
        # A write-back is acknowledged as a whole; kernels wait for a load's layers (rule ST-2).
        whole, together = range(group.layer_num), 1
        if outwards and how is not How.DIRECT:
            together = len(whole)
        elif self._is_staged:
            together = load_group(group.layer_bytes, group.layer_num)
        runs = [whole[start : start + together] for start in whole[::together]]
        self._max_pages = 0 if how is How.KERNEL else MAX_PIECES // (group.parts * len(runs))
        self.memory: list[torch.Tensor] = []
        """The staging buffers; kept here, as copies know addresses only."""
        if self._is_staged:
            # A stream of its own fills one buffer while the direction's drains the other one.
            self.filler = device.stream(f"staging of a {direction}", PRIORITIES[direction])
            page_bytes = group.parts * group.layer_bytes * together
            pages = min(self._max_pages, group.host[0].shape[0])
            size = max(1, min(STAGING_BYTES // page_bytes, pages)) * page_bytes
            self.memory = [device.scratch(size, (self.filler, stream)) for _ in range(2)]
            self._turn = 0
        self.runs = [self._run(layers) for layers in runs]
        views = group.device[0], group.host[0]
        self._pitches = np.array([[view.stride(0) * view.element_size()] for view in views])
        self._count = self._sent = 0
        self._offsets = np.empty((2, 0), np.int64)

    def begin(self, pages: Numbers) -> None:
        """Take the pages of the next transfer.

        Args:
            pages: their numbers in two rows, `DEVICE` and `HOST`, which are uploaded.
        """
        self._count = pages.shape[1]
        self._sent = min(self._count, self._max_pages)
        self._offsets = pages[:, : self._sent] * self._pitches
        if self._is_staged:
            self.before_staging()

    def enqueue(self, run: Run) -> None:
        """Enqueue the copies of some layers."""
        if self._sent:
            addresses = self._addresses(HOST, run)
            on_host: int = addresses.ctypes.data
            if self._is_staged:
                for start in range(0, self._sent, run.room):
                    self._stage(run, on_host, range(start, min(start + run.room, self._sent)))
            else:
                on_device = self._addresses(DEVICE, run)
                to, origin = self._to_from(on_device.ctypes.data, on_host)
                self._stream.copy_pieces(to, origin, addresses.size, run.piece_bytes, run.what)
        if self._sent < self._count:
            rest = range(self._sent, self._count)
            self._stream.copy_rows(self._rows, run.parts, rest, run.what)

    def _stage(self, run: Run, on_host: int, pages: range) -> None:
        self._turn ^= 1
        rows, staged = run.buffers[self._turn]
        parts = self._group.parts
        to, origin = self._to_from(staged.data_ptr(), on_host + 8 * parts * pages.start)

        def send(stream: Stream) -> None:
            stream.copy_pieces(to, origin, parts * len(pages), run.piece_bytes, run.what)

        def move(stream: Stream) -> None:
            # The kernels of a staging buffer know the parts of its run alone.
            stream.copy_rows(rows, range(len(run.parts)), pages, run.what)

        fill, drain = self._to_from(send, move)
        try:
            fill(self.filler)
            # What the next transfer fills follows its `before_staging`.
            if pages.stop < self._sent or run is not self.runs[-1]:
                self.before_refill()
        finally:
            # Also behind a copy that was refused half-way: what was enqueued uses the pages.
            self.hand_over()
        drain(self._stream)

    # Methods of their own, so that tests can leave out one wait alone.

    def before_staging(self) -> None:
        """Let staging wait for what the direction's stream holds."""
        self.filler.wait_event(self._stream.record())

    def before_refill(self) -> None:
        """Let the next filling wait until the other buffer has been drained."""
        # What drains this buffer is not enqueued yet.
        self.filler.wait_event(self._stream.record())

    def hand_over(self) -> None:
        """Let draining wait for filling."""
        self._stream.wait_event(self.filler.record())

    def _addresses(self, side: int, run: Run) -> Numbers:
        """Addresses of pieces: (pages, parts of a layer)."""
        # Added part by part: rows of two numbers would take half as long again.
        addresses: Numbers = (run.starts[side] + self._offsets[side]).T.copy()
        return addresses

    def _to_from(self, on_device: SideT, other: SideT) -> tuple[SideT, SideT]:
        return (other, on_device) if self._direction == OUT else (on_device, other)

    def _row_copy(self, on_device: list[torch.Tensor], other: RowSide) -> object:
        return self._device.row_copy(*self._to_from(RowSide(on_device, DEVICE), other), self._table)

    def _run(self, layers: range) -> Run:
        group = self._group
        named = f"layer {layers.start}" if len(layers) == 1 else f"{len(layers)} layers"
        parts = range(layers.start * group.parts, layers.stop * group.parts)
        on_device, on_host = (
            [*each[parts.start : parts.stop]] for each in (group.device, group.host)
        )
        starts = [
            np.array([[view.data_ptr()] for view in each[: group.parts]])
            for each in (on_device, on_host)
        ]
        block = group.layer_bytes * len(layers)
        room = len(self.memory[0]) // (group.parts * block) if self.memory else 0
        buffers: list[tuple[object, torch.Tensor]] = []
        for memory in self.memory:
            regions = memory[: group.parts * room * block].view(group.parts, -1)
            staged = [
                _like(regions[number % group.parts], block, view, on_host[number % group.parts])
                for number, view in enumerate(on_host)
            ]
            rows = self._row_copy(on_device, RowSide(staged, None))
            firsts = torch.tensor([region.data_ptr() for region in regions])
            buffers.append((rows, firsts + torch.arange(0, room * block, block).unsqueeze(1)))
        what = f"{self._direction} of {named}"
        return Run(what, layers, parts, starts, block, room, buffers)


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
