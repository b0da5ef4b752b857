"""Copies of pages between device and host, ordered by events.

The events order them against the compute stream, and against each other.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, Self, cast

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer.copies import DEVICE, HOST, STAGING_BYTES, PageCopies
from hicache_storage.transfer.fences import PageFences
from hicache_storage.transfer.host_slots import HostSlots
from hicache_storage.transfer.layers import Acknowledgement, LayerCounter, LayerMap
from hicache_storage.transfer.pages import HostPages, check_pages, page_numbers
from hicache_storage.transfer.plan import describe, make_plan
from hicache_storage.transfer.streams import StreamFailedError, recorded

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from hicache_storage.pools import HostPoolBase
    from hicache_storage.transfer.host_slots import Completion
    from hicache_storage.transfer.pages import LayeredPages
    from hicache_storage.transfer.plan import Way
    from hicache_storage.transfer.streams import Device, Event, Stream

logger = logging.getLogger(__name__)

OUT: Final = "write-back"
IN: Final = "load"
"""The two directions, which are names of their streams."""
WRITTEN: Final = {OUT: HOST, IN: DEVICE}
"""The side that each direction writes."""
NAMES: Final = ("device_indices", "host_indices")
"""By side."""


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


class CopyStreams:
    """The two streams of copies, and the transfers of one or several pools on them.

    Args:
        device: makes the streams.
        compute: the stream whose kernels read and write the device pages.
        streams: by direction; None makes new ones.
    """

    def __init__(
        self, device: Device, compute: Stream, streams: Mapping[str, Stream] | None = None
    ) -> None:
        self.device = device
        # Requests wait for loads, and nobody for write-backs.
        self.streams = streams or {
            OUT: device.stream(OUT, "lowest"),
            IN: device.stream(IN, "highest"),
        }
        """By direction: `OUT` and `IN`."""
        self._compute = compute
        self._is_closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def synchronize(self) -> None:
        """Block the calling thread until all copies enqueued so far are over.

        Raises:
            StreamFailedError: one of them failed; the others are over all the same.
        """
        _wait_for_all(self.streams.values())

    def close(self) -> None:
        """Wait for the copies that run, and take no more. Idempotent.

        Raises:
            StreamFailedError: a copy has failed; it is closed all the same.
        """
        if not self._is_closed:
            self._is_closed = True
            self.synchronize()

    def _behind_compute(self, direction: str) -> None:
        # Behind all kernels launched so far: nothing tells which of them use these pages (rule
        # ST-1).
        self.streams[direction].wait_event(recorded(self.device, self._compute))

    def _enqueue(
        self, direction: str, transfers: Sequence[Transfer], layer_num: int = 0
    ) -> list[Event]:
        """Enqueue all copies; the event behind them, or behind those of each layer of a load."""
        stream = self.streams[direction]
        with self.device.current():
            try:
                self._behind_compute(direction)
                for engine, pages, _ in transfers:
                    engine.begin(direction, pages)
                events: list[Event] = []
                # Layers outside, pools inside: kernels of a layer wait for no later layer of any
                # pool (rule ST-2).
                for layer in range(layer_num):
                    enqueued = [
                        engine.load_layer(own)
                        for engine, _, layers in transfers
                        if (own := layers(layer)) is not None
                    ]
                    # Layers that come together have one event.
                    is_new = any(enqueued) or not events
                    events.append(recorded(self.device, stream) if is_new else events[-1])
                events = events or [recorded(self.device, stream)]
            except BaseException:
                # Which pool failed is not known: some copies of each may have been enqueued.
                for engine, pages, _ in transfers:
                    engine.give_up(direction, pages)
                raise
        for engine, pages, _ in transfers:
            engine.end(direction, pages, events[-1])
        return events


class PageTransfers(CopyStreams):
    """The transfer engine of the SDK, for one pool.

    How pages are copied follows from the lengths of the pool; the log says it once.

    To be closed, or used in a `with` statement, before the pools' memory goes: it keeps both pools
    until its copies are over, also when it is garbage collected without being closed, which then
    waits for them.

    Args:
        device: makes the streams.
        compute: the stream whose kernels read and write the device pages.
        device_pages: a device pool, or other pages of the same layers, page size and rows as the
            host pool's.
        host_pool: one of the SDK's.
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
        host_pool: HostPoolBase,
        *,
        way: Way | None = None,
        staging_bytes: int = STAGING_BYTES,
        streams: Mapping[str, Stream] | None = None,
    ) -> None:
        import torch

        from hicache_storage.pools import DevicePoolBase

        if isinstance(device_pages, DevicePoolBase):
            device_pages.check_host_pool(host_pool)
        host_pages = HostPages(host_pool)
        check_pages(device_pages, host_pages)
        super().__init__(device, compute, streams)
        self.host_slots = HostSlots(host_pool)
        self._layers = LayerMap(range(host_pages.layer_num))
        self._sides = device_pages, host_pages
        self.plan = make_plan(device_pages, host_pages, way)
        """How each part is copied."""
        # A write-back writes the host's pages, a load the device's.
        self._copies = {
            direction: PageCopies(
                device,
                self.plan,
                self.streams[direction],
                self._sides[written].page_num,
                staging_bytes,
                outwards=direction == OUT,
            )
            for direction, written in WRITTEN.items()
        }
        pages = [side.page_num for side in self._sides]
        self._fences = {direction: PageFences(max(pages)) for direction in WRITTEN}
        self._marks = torch.zeros(max(pages), dtype=torch.int64)
        self._numbers = torch.arange(max(pages))
        # CUDA allows memory to be unlocked and unmapped under a copy, which then reads or writes
        # memory of another owner. At exit its context may go first, and the kernel releases the
        # memory anyway.
        used = self._sides, self._copies
        weakref.finalize(self, _settle, self.streams.values(), used).atexit = False
        logger.info("copies of %s: %s", type(host_pool).__name__, describe(self.plan))

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
        pages = self.checked(OUT, device_indices, host_indices)
        return Acknowledgement(*self._enqueue(OUT, [Transfer(self, pages, self._layers)]))

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerCounter:
        """Copy host pages to device pages layer by layer, behind every kernel launched so far.

        The caller has written the host pages, and may free them at any time.

        Args:
            host_indices, device_indices: int64, as many whole pages of slots each.

        Raises:
            InvalidTransferError: the indices are not whole pages of the pools, as many each, or a
                device page occurs twice; nothing is copied.
        """
        pages = self.checked(IN, device_indices, host_indices)
        transfers = [Transfer(self, pages, self._layers)]
        return LayerCounter(self._enqueue(IN, transfers, len(self._layers.layers)))

    def before_overwrite(self, device_indices: torch.Tensor) -> None:
        """Let `compute` wait for the copies that use device pages.

        To be called before a kernel overwrites them.
        """
        pages = page_numbers([device_indices], self._sides[DEVICE].page_size)
        if pages.numel():
            self._check_range(pages)
            for fences in self._fences.values():
                fences.wait(self._compute, pages)

    # Steps, for transfers of several pools at once
    # -----------------------------------------------------------

    def checked(
        self, direction: str, device_indices: torch.Tensor, host_indices: torch.Tensor
    ) -> torch.Tensor:
        """The page numbers of a transfer that can be begun, in two rows: `DEVICE` and `HOST`."""
        if self._is_closed:
            raise InvalidTransferError("the transfer engine is closed; make a new one")
        counts = device_indices.numel(), host_indices.numel()
        if counts[0] != counts[1] or not counts[0]:
            raise InvalidTransferError(
                f"as many device_indices as host_indices, and not none: {counts[0]} and {counts[1]}"
            )
        pages = page_numbers([device_indices, host_indices], self._sides[DEVICE].page_size)
        self._check_range(pages)
        # What is only read may occur twice.
        if self._has_repeated(pages[WRITTEN[direction]]):
            raise InvalidTransferError(
                f"{NAMES[WRITTEN[direction]]} hold a page twice; what it would hold then is "
                "undefined"
            )
        return pages

    def begin(self, direction: str, pages: torch.Tensor) -> None:
        """Enqueue the copies of a write-back; of a load, get ready for `load_layer`."""
        self._behind_copies(direction, pages)
        self._copies[direction].begin(pages)
        if direction == OUT:
            self._copies[direction].enqueue_all()

    def load_layer(self, layer: int) -> bool:
        """Enqueue a layer's copies; False if all of them came with earlier layers."""
        return self._copies[IN].enqueue(layer)

    def end(self, direction: str, pages: torch.Tensor, until: Event) -> None:
        """Fence the pages until an event that was recorded behind the copies of all layers."""
        self._fences[direction].note(pages, until)
        # The caller may free the host pages at any time; they are handed out when the copy has
        # ended. Copies of one direction end in order.
        self._hold(pages[HOST], until, direction)

    def give_up(self, direction: str, pages: torch.Tensor) -> None:
        """Fence the pages of a transfer that failed: some of its copies may have been enqueued.

        Blocks only where no event can be recorded.
        """
        stream = self.streams[direction]
        # First without waiting. A stream that refuses to record may still let the thread wait for
        # it; one that refuses both tells nothing any more.
        with suppress(Exception):
            self.end(direction, pages, recorded(self.device, stream))
            return
        with suppress(Exception):
            stream.synchronize()
            return
        # No stream can wait for it; the host pages are not handed out any more.
        self._hold(pages[HOST], Never(), Never)

    def _behind_copies(self, direction: str, pages: torch.Tensor) -> None:
        # Copies on the other stream may still use the device pages (rule ST-1) or the host pages
        # (rule ST-3).
        other = self._fences[IN if direction == OUT else OUT]
        other.wait(self.streams[direction], pages)

    def _check_range(self, pages: torch.Tensor) -> None:
        low, high = (cast("list[int]", each.tolist()) for each in pages.aminmax(dim=1))
        for name, side, first, last in zip(NAMES, self._sides, low, high, strict=False):
            if first < 0 or last >= side.page_num:
                raise InvalidTransferError(
                    f"{name} must be slots in [0, {side.page_num * side.page_size}), got pages "
                    "that are not there"
                )

    def _has_repeated(self, pages: torch.Tensor) -> bool:
        if pages.numel() > self._marks.numel():
            return True
        # Of two marks on a page one remains.
        numbers = self._numbers[: pages.numel()]
        self._marks.scatter_(0, pages, numbers)
        return not self._marks.gather(0, pages).equal(numbers)

    def _hold(self, host_pages: torch.Tensor, until: Completion, behind: object) -> None:
        self.host_slots.hold_pages(host_pages, until, behind)


class Transfer(NamedTuple):
    """The pages of one pool in a transfer."""

    engine: PageTransfers
    pages: torch.Tensor
    layers: LayerMap
    """The layers that a load counts, and the pool's share in them."""


class Never:
    """The end of copies about which a failed stream tells nothing."""

    def query(self) -> bool:
        return False


def _wait_for_all(streams: Iterable[Stream]) -> None:
    with ExitStack() as waiting:
        # It calls all callbacks even if one raises.
        for stream in streams:
            waiting.callback(stream.synchronize)


def _settle(streams: Iterable[Stream], used: object) -> None:
    """Wait for all copies, also failed ones, before memory that they use is let go of."""
    with suppress(StreamFailedError):
        _wait_for_all(streams)
