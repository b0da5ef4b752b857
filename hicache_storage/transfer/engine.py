"""Copies of pages between device and host, ordered by events.

The events order them against the compute stream, and against each other.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, Final, Protocol, Self

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer.copies import STAGING_BYTES, PageCopies, PageMoves
from hicache_storage.transfer.fences import PageFences
from hicache_storage.transfer.host_slots import HostSlots
from hicache_storage.transfer.in_flight import Unknown, end_after_failure, settle, wait_for_all
from hicache_storage.transfer.layers import Acknowledgement, LayerCounter
from hicache_storage.transfer.pages import HostPages, check_pages, page_numbers
from hicache_storage.transfer.plan import describe
from hicache_storage.transfer.streams import recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from hicache_storage.pools import DevicePoolBase, HostPoolBase
    from hicache_storage.transfer.host_slots import Completion, SlotPool
    from hicache_storage.transfer.pages import LayeredPages
    from hicache_storage.transfer.plan import Way
    from hicache_storage.transfer.streams import Device, Event, Stream

logger = logging.getLogger(__name__)

OUT: Final = "write-back"
IN: Final = "load"
"""The two directions, which are names of their streams."""


class TransferEngine(Protocol):
    """Copies of pages between L1 and L2; `PageTransfers` describes the calls.

    Called by one thread at a time; no call waits for a copy.
    """

    host_slots: HostSlots
    """Allocator of host pages."""

    def write_back(
        self, device_indices: torch.Tensor, host_indices: torch.Tensor
    ) -> Acknowledgement: ...

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerCounter: ...

    def before_overwrite(self, device_indices: torch.Tensor) -> None: ...


class PageTransfers:
    """The transfer engine of the SDK, for one pool.

    How pages are copied follows from the lengths of the pool; the log says it once.

    To be closed, or used in a `with` statement, before the pools' memory goes: it keeps both pools
    until its copies are over, also when it is garbage collected without being closed, which then
    waits for them.

    Args:
        device: makes the streams.
        compute: the stream whose kernels read and write the device pages.
        device_pages, host_pages: the two pools, of the same layers, page size and rows.
        host_pool: hands out the slots of `host_pages`.
        way: None lets lengths decide. `kernel`: a kernel reads and writes the host memory. `dma`:
            DMA wherever pieces are contiguous, for loads in growing groups of layers. For
            benchmarks, and machines that differ from those that were measured.
        staging_bytes: length of each of the two staging buffers that a direction has where its
            copies pass through some; a page at least, and not longer than the pool needs.
        streams: by direction, where several pools share them; None makes new ones.

    Raises:
        InvalidPoolError: the pools do not fit each other, and the message names the field; or the
            device cannot reach the host memory, or has no memory for the staging buffers.
        InvalidTransferError: `way` is unknown.
        ConfigError: the kernel cannot be compiled; the message names what is missing.
    """

    def __init__(
        self,
        device: Device,
        compute: Stream,
        device_pages: LayeredPages,
        host_pages: LayeredPages,
        host_pool: SlotPool,
        *,
        way: Way | None = None,
        staging_bytes: int = STAGING_BYTES,
        streams: Mapping[str, Stream] | None = None,
    ) -> None:
        check_pages(device_pages, host_pages)
        self.host_slots = HostSlots(host_pool)
        self.device = device
        self.streams = streams or copy_streams(device)
        """By direction: `OUT` and `IN`."""
        self._compute = compute
        self._device_pages = device_pages
        self._host_pages = host_pages
        out, into = self.streams[OUT], self.streams[IN]
        self._copies = PageCopies(device, device_pages, host_pages, (out, into), way, staging_bytes)
        self._device_fences = PageFences(device_pages.page_num)
        self._host_fences = PageFences(host_pages.page_num)
        # CUDA allows memory to be unlocked and unmapped under a copy, which then reads or writes
        # memory of another owner. At exit its context may go first, and the kernel releases the
        # memory anyway.
        used = device_pages, host_pages, self._copies
        weakref.finalize(self, settle, (out, into), used).atexit = False
        self._is_closed = False
        logger.info("copies of %s: %s", type(host_pool).__name__, describe(self._copies.plan))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the copies that run, and take no more. Idempotent.

        Raises:
            StreamFailedError: a copy has failed; it is closed all the same.
        """
        if not self._is_closed:
            self._is_closed = True
            wait_for_all(self.streams.values())

    @classmethod
    def between(
        cls,
        device: Device,
        compute: Stream,
        device_pool: DevicePoolBase,
        host_pool: HostPoolBase,
        *,
        way: Way | None = None,
        staging_bytes: int = STAGING_BYTES,
        streams: Mapping[str, Stream] | None = None,
    ) -> Self:
        """The engine of two of the SDK's pools.

        Raises:
            InvalidPoolError: the pools do not fit each other; the message names the argument that
                differs.
        """
        device_pool.check_host_pool(host_pool)
        return cls(
            device,
            compute,
            device_pool,
            HostPages(host_pool),
            host_pool,
            way=way,
            staging_bytes=staging_bytes,
            streams=streams,
        )

    def write_back(
        self, device_indices: torch.Tensor, host_indices: torch.Tensor
    ) -> Acknowledgement:
        """Copy device pages to host pages, behind every kernel launched so far on `compute`.

        The host pages may be read once it is acknowledged. They may be freed at any time, and the
        device pages overwritten after `before_overwrite`.

        Args:
            device_indices, host_indices: int64, as many whole pages of slots each.

        Raises:
            InvalidTransferError: the indices are not whole pages of the pools, as many each, or a
                host page occurs twice; nothing is copied.
        """
        transfers: Transfers = {self: self.checked(OUT, device_indices, host_indices)}
        return write_back_together(transfers, self.device, self.streams[OUT])

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerCounter:
        """Copy host pages to device pages layer by layer, behind every kernel launched so far.

        The caller has written the host pages, and may free them at any time.

        Args:
            host_indices, device_indices: int64, as many whole pages of slots each.

        Raises:
            InvalidTransferError: the indices are not whole pages of the pools, as many each, or a
                device page occurs twice; nothing is copied.
        """
        transfers: Transfers = {self: self.checked(IN, device_indices, host_indices)}
        return load_together(transfers, lambda: self._copy_layers(self.load_layer))

    def before_overwrite(self, device_indices: torch.Tensor) -> None:
        """Let `compute` wait for the copies that use device pages.

        To be called before a kernel overwrites them.
        """
        pages = _pages_in(self._device_pages, device_indices, "device")
        self._device_fences.before_write(self._compute, pages)

    # Steps, for transfers of several pools at once
    # -----------------------------------------------------------

    def checked(
        self, direction: str, device_indices: torch.Tensor, host_indices: torch.Tensor
    ) -> PageMoves:
        """The pages of a transfer that can be begun; nothing is enqueued yet."""
        if self._is_closed:
            raise InvalidTransferError("the transfer engine is closed; make a new one")
        counts = device_indices.numel(), host_indices.numel()
        if counts[0] != counts[1] or not counts[0]:
            raise InvalidTransferError(
                f"as many device_indices as host_indices, and not none: {counts[0]} and {counts[1]}"
            )
        device = _pages_in(self._device_pages, device_indices, "device")
        host = _pages_in(self._host_pages, host_indices, "host")
        # What is only read may occur twice.
        written, fences = (
            (host, self._host_fences) if direction == OUT else (device, self._device_fences)
        )
        if fences.has_repeated(written):
            raise InvalidTransferError(
                f"{'host' if direction == OUT else 'device'}_indices hold a page twice; what it "
                "would hold then is undefined"
            )
        return PageMoves(device, host)

    def begin(self, direction: str, moves: PageMoves) -> None:
        """Enqueue the copies of a write-back; of a load, get ready for `load_layer`."""
        stream = self.streams[direction]
        # Behind all kernels launched so far: nothing tells which of them use these pages (rule
        # ST-1).
        self._behind_compute(stream)
        if direction == OUT:
            self._device_fences.before_read(stream, moves.device)
            # A load on the other stream may still read the host pages (rule ST-3).
            self._host_fences.before_write(stream, moves.host)
            self._copies.write_back(moves)
        else:
            self._host_fences.before_read(stream, moves.host)
            # A write-back on the other stream may still read the device pages (rule ST-1).
            self._behind_copies(moves.device)
            self._copies.begin_load(moves)

    def load_layer(self, layer: int) -> bool:
        """Enqueue a layer's copies; False if all of them came with earlier layers."""
        return self._copies.load(layer)

    def end(self, direction: str, moves: PageMoves, until: Event) -> None:
        """Fence the pages until an event that was recorded behind the copies of all layers."""
        if direction == OUT:
            self._device_fences.reads(moves.device, until)
            self._host_fences.writes(moves.host, until)
        else:
            self._host_fences.reads(moves.host, until)
            self._device_fences.writes(moves.device, until)
        # The caller may free the host pages at any time; they are handed out when the copy has
        # ended.
        self._hold(moves.host, until, direction)

    def give_up(self, direction: str, moves: PageMoves) -> None:
        """Fence the pages of a transfer that failed: some of its copies may have been enqueued."""
        stream = self.streams[direction]
        end = end_after_failure(self.device, stream, self._copies.join)
        if isinstance(end, Unknown):
            # No stream can wait for it; the host pages are not handed out any more.
            self._hold(moves.host, end, None)
        elif end is not None:
            self.end(direction, moves, end)

    def _behind_compute(self, stream: Stream) -> None:
        stream.wait_event(recorded(self.device, self._compute))

    def _behind_copies(self, device_pages: torch.Tensor) -> None:
        self._device_fences.before_write(self.streams[IN], device_pages)

    def _copy_layers(self, copy_layer: Callable[[int], bool]) -> list[Event]:
        """Copy all layers; for each an event that comes when it has arrived."""
        arrivals: list[Event] = []
        for layer in range(self._host_pages.layer_num):
            # Layers that come together have one event.
            enqueued = copy_layer(layer)
            arrivals.append(recorded(self.device, self.streams[IN]) if enqueued else arrivals[-1])
        return arrivals

    def _hold(self, host_pages: torch.Tensor, until: Completion, behind: str | None) -> None:
        # Copies of one direction end in the order of their stream, so only the first needs to be
        # asked.
        self.host_slots.hold_pages(host_pages, until, behind)


Transfers = dict["PageTransfers", "PageMoves"]
"""The pages of a transfer by pool."""


def write_back_together(transfers: Transfers, device: Device, stream: Stream) -> Acknowledgement:
    """Write back pages of pools that share the device's stream of write-backs."""
    try:
        for engine, moves in transfers.items():
            engine.begin(OUT, moves)
        finished = recorded(device, stream)
    except BaseException:
        _give_up(OUT, transfers)
        raise
    for engine, moves in transfers.items():
        engine.end(OUT, moves, finished)
    return Acknowledgement(finished)


def load_together(transfers: Transfers, copy_layers: Callable[[], list[Event]]) -> LayerCounter:
    """Load pages of pools that share their streams.

    Args:
        copy_layers: enqueues the copies of all layers; for each an event behind them.
    """
    try:
        for engine, moves in transfers.items():
            engine.begin(IN, moves)
        arrivals = copy_layers()
    except BaseException:
        _give_up(IN, transfers)
        raise
    for engine, moves in transfers.items():
        engine.end(IN, moves, arrivals[-1])
    return LayerCounter(arrivals)


def _give_up(direction: str, transfers: Transfers) -> None:
    # Which pool failed is not known, and each has streams of its own beside the two.
    for engine, moves in transfers.items():
        engine.give_up(direction, moves)


def copy_streams(device: Device) -> dict[str, Stream]:
    """New streams by direction. Requests wait for loads, and nobody for write-backs."""
    return {OUT: device.stream(OUT, "lowest"), IN: device.stream(IN, "highest")}


def _pages_in(pool: LayeredPages, indices: torch.Tensor, where: str) -> torch.Tensor:
    numbers = page_numbers(indices, pool.page_size)
    if numbers.numel():
        first, last = numbers.aminmax()
        if int(first) < 0 or int(last) >= pool.page_num:
            raise InvalidTransferError(
                f"{where}_indices must be slots in [0, {pool.page_num * pool.page_size}), got "
                "pages that are not there"
            )
    return numbers
