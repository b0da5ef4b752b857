"""Copies of pages between device and host, ordered by events.

The events order them against the compute stream, and against each other.
"""

from __future__ import annotations

import logging
import weakref
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer.backends.registry import STAGING_BYTES, page_copies
from hicache_storage.transfer.fences import PageFences
from hicache_storage.transfer.host_slots import HostSlots
from hicache_storage.transfer.in_flight import CopiesInFlight, Unknown, end_after_failure
from hicache_storage.transfer.layers import Acknowledgement, LayerCounter
from hicache_storage.transfer.pages import HostPages, check_pages, page_numbers
from hicache_storage.transfer.regions.runs import PageMoves
from hicache_storage.transfer.streams import recorded

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    import torch

    from hicache_storage.pools import DevicePoolBase, HostPoolBase
    from hicache_storage.transfer.backends.registry import Backend
    from hicache_storage.transfer.host_slots import Completion, SlotPool
    from hicache_storage.transfer.pages import LayeredPages
    from hicache_storage.transfer.streams import Device, Event, Stream

logger = logging.getLogger(__name__)

OUT, IN = "write-back", "load"
"""Names of the two directions and their streams."""


class TransferEngine(Protocol):
    """Copies of pages between L1 and L2.

    Called by one thread at a time; no call waits for a copy.
    """

    host_slots: HostSlots
    """Allocator of host pages."""

    def write_back(
        self, device_indices: torch.Tensor, host_indices: torch.Tensor
    ) -> Acknowledgement:
        """Copy device pages to host pages.

        The copies run behind every kernel launched so far on the compute stream.

        The host pages may be read once it is acknowledged. They may be freed at any time, and the
        device pages overwritten after `before_overwrite`.

        Args:
            device_indices, host_indices: int64, as many whole pages of slots each.

        Raises:
            InvalidTransferError: the indices are not whole pages of the pools, as many each, or a
                host page occurs twice; nothing is copied.
        """
        ...

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerCounter:
        """Copy host pages to device pages layer by layer.

        The copies run behind every kernel launched so far on the compute stream.

        The caller has written the host pages, and may free them at any time.

        Args:
            host_indices, device_indices: int64, as many whole pages of slots each.

        Raises:
            InvalidTransferError: the indices are not whole pages of the pools, as many each, or a
                device page occurs twice; nothing is copied.
        """
        ...

    def before_overwrite(self, device_indices: torch.Tensor) -> None:
        """Let the compute stream wait for the copies that use device pages.

        To be called before a kernel overwrites them.
        """
        ...


class PageTransfer(NamedTuple):
    """A transfer whose arguments have been checked."""

    moves: PageMoves
    host_indices: torch.Tensor


class PageTransfers:
    """The transfer engine of the SDK, for one pool.

    It has one stream for each direction, and what its backend adds.

    To be closed, or used in a `with` statement, before the pools' memory goes: it keeps both pools
    until its copies are over, also when it is garbage collected without being closed, which then
    waits for them.

    Args:
        device: makes the streams.
        compute: the stream whose kernels read and write the device pages.
        device_pages, host_pages: the two pools, of the same layers, page size and rows.
        host_pool: hands out the slots of `host_pages`.
        backend: how copies are made. `direct`: the copy engine moves runs of pages that are
            adjacent on both sides. `kernel`: pages are gathered and scattered on the device and
            cross the bus through staging buffers; only the order of host pages counts. `mapped`:
            kernels read and write page-locked host memory themselves; no order counts. Which is
            fastest depends on machine, layout, page size and fragmentation:
            `benchmarks/device_copies.py` measures it.
        staging_bytes: length of each staging buffer, in bytes: for each direction `kernel` has
            two, `mapped` one. None is longer than its pool needs.
        streams: for write-backs and for loads, where several pools share them; None makes new ones.

    Raises:
        InvalidPoolError: the pools do not fit each other, and the message names the field; or the
            device has no memory for the staging buffers, or `backend` is `mapped` and the host memory
            is not page-locked.
        InvalidTransferError: `backend` is unknown, or does not know the host pages.
    """

    def __init__(
        self,
        device: Device,
        compute: Stream,
        device_pages: LayeredPages,
        host_pages: LayeredPages,
        host_pool: SlotPool,
        *,
        backend: Backend = "direct",
        staging_bytes: int = STAGING_BYTES,
        streams: tuple[Stream, Stream] | None = None,
    ) -> None:
        check_pages(device_pages, host_pages)
        self.host_slots = HostSlots(host_pool)
        self._device = device
        self._compute = compute
        self._device_pages = device_pages
        self._host_pages = host_pages
        streams = streams or (device.stream(OUT), device.stream(IN))
        self._out = streams[0]
        self._in = streams[1]
        self._copies = page_copies(
            backend, device, device_pages, host_pages, staging_bytes, streams
        )
        self._device_fences = PageFences(device_pages.page_num)
        self._host_fences = PageFences(host_pages.page_num)
        self._in_flight = CopiesInFlight(device_pages, host_pages, self._copies)
        # At exit the CUDA context may go first, and the kernel releases the memory anyway.
        weakref.finalize(self, self._in_flight.settle).atexit = False
        self._is_closed = False
        if not all(map(device.is_locked, host_pages.layer(0))):
            logger.warning(
                "the memory of %s is not page-locked: every copy makes the thread that calls "
                "write_back or load wait for it; make the pool with pin_memory=True",
                type(host_pool).__name__,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the copies that run, and take no more. Idempotent.

        Raises:
            StreamFailedError: a copy has failed; it is closed all the same.
        """
        self._is_closed = True
        self._in_flight.wait()

    @classmethod
    def between(
        cls,
        device: Device,
        compute: Stream,
        device_pool: DevicePoolBase,
        host_pool: HostPoolBase,
        *,
        backend: Backend = "direct",
        staging_bytes: int = STAGING_BYTES,
        streams: tuple[Stream, Stream] | None = None,
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
            backend=backend,
            staging_bytes=staging_bytes,
            streams=streams,
        )

    def write_back(
        self, device_indices: torch.Tensor, host_indices: torch.Tensor
    ) -> Acknowledgement:
        # Outside of `try`: nothing is enqueued yet, so no page needs a fence.
        transfer = self.checked_write_back(device_indices, host_indices)
        try:
            self.begin_write_back(transfer)
            finished = recorded(self._device, self._out)
        except BaseException:
            # Some copies may have been enqueued: their pages stay fenced until those have run.
            self.give_up(OUT, transfer, end_after_failure(self._device, self._out))
            raise
        self.end_write_back(transfer, finished)
        return Acknowledgement(finished)

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerCounter:
        transfer = self.checked_load(host_indices, device_indices)
        try:
            arrivals = self._copy_layers(self.begin_load(transfer))
        except BaseException:
            self.give_up(IN, transfer, end_after_failure(self._device, self._in))
            raise
        self.end_load(transfer, arrivals[-1])
        return LayerCounter(arrivals)

    def before_overwrite(self, device_indices: torch.Tensor) -> None:
        self._device_fences.before_write(
            self._compute, _pages_in(self._device_pages, device_indices, "device")
        )

    # Steps, for transfers of several pools at once
    # -----------------------------------------------------------

    def checked_write_back(
        self, device_indices: torch.Tensor, host_indices: torch.Tensor
    ) -> PageTransfer:
        """A write-back that can be begun; nothing is enqueued yet.

        Raises:
            InvalidTransferError: the indices are not whole pages of the pools, as many each, no
                host page twice.
        """
        # A device page may occur twice here, because it is only read.
        transfer = self._checked(device_indices, host_indices)
        _refuse_repeated("host_indices", transfer.moves.host)
        return transfer

    def begin_write_back(self, transfer: PageTransfer) -> None:
        """Enqueue the copies of all layers."""
        # Behind all kernels launched so far: nothing tells which of them writes these pages (rule
        # ST-1).
        self._behind_compute(self._out)
        self._device_fences.before_read(self._out, transfer.moves.device)
        # A load on the other stream may still read the host pages (rule ST-3).
        self._host_fences.before_write(self._out, transfer.moves.host)
        self._copies.write_back(self._out, transfer.moves)

    def end_write_back(self, transfer: PageTransfer, finished: Event) -> None:
        """Fence the pages until an event that was recorded behind the copies."""
        self._device_fences.reads(transfer.moves.device, finished)
        self._host_fences.writes(transfer.moves.host, finished)
        self._in_flight.note(OUT, finished)
        # The caller may free the host pages at any time; they are handed out when the copy has
        # ended.
        self._hold(transfer.host_indices, finished, OUT)

    def checked_load(
        self, host_indices: torch.Tensor, device_indices: torch.Tensor
    ) -> PageTransfer:
        """A load that can be begun; nothing is enqueued yet.

        Raises:
            InvalidTransferError: the indices are not whole pages of the pools, as many each, no
                device page twice.
        """
        transfer = self._checked(device_indices, host_indices)
        _refuse_repeated("device_indices", transfer.moves.device)
        return transfer

    def begin_load(self, transfer: PageTransfer) -> Callable[[int], None]:
        """Get ready; what is returned enqueues the copies of one of the pool's layers."""
        self._behind_compute(self._in)
        self._host_fences.before_read(self._in, transfer.moves.host)
        # A write-back on the other stream may still read the device pages (rule ST-1).
        self._behind_copies(transfer.moves.device)
        return self._copies.load(self._in, transfer.moves)

    def end_load(self, transfer: PageTransfer, arrived: Event) -> None:
        """Fence the pages until an event that was recorded behind the copies of all layers."""
        self._host_fences.reads(transfer.moves.host, arrived)
        self._device_fences.writes(transfer.moves.device, arrived)
        self._in_flight.note(IN, arrived)
        self._hold(transfer.host_indices, arrived, IN)

    def give_up(self, direction: str, transfer: PageTransfer, end: Event | Unknown | None) -> None:
        """Fence the pages of a transfer that failed after it was begun.

        Some of its copies may have been enqueued.

        Args:
            direction: `OUT` or `IN`.
            transfer: what was begun.
            end: what `end_after_failure` gives.
        """
        if isinstance(end, Unknown):
            # No stream can wait for it; the host pages are not handed out any more.
            self._hold(transfer.host_indices, end, None)
        elif end is not None:
            (self.end_write_back if direction == OUT else self.end_load)(transfer, end)

    def _checked(self, device_indices: torch.Tensor, host_indices: torch.Tensor) -> PageTransfer:
        if self._is_closed:
            raise InvalidTransferError("the transfer engine is closed; make a new one")
        counts = device_indices.numel(), host_indices.numel()
        if counts[0] != counts[1] or not counts[0]:
            raise InvalidTransferError(
                f"as many device_indices as host_indices, and not none: {counts[0]} and {counts[1]}"
            )
        moves = PageMoves(
            _pages_in(self._device_pages, device_indices, "device"),
            _pages_in(self._host_pages, host_indices, "host"),
        )
        return PageTransfer(moves, host_indices)

    def _behind_compute(self, stream: Stream) -> None:
        stream.wait_event(recorded(self._device, self._compute))

    def _behind_copies(self, device_pages: torch.Tensor) -> None:
        self._device_fences.before_write(self._in, device_pages)

    def _copy_layers(self, copy_layer: Callable[[int], None]) -> list[Event]:
        """Copy all layers; for each an event that comes when it has arrived."""
        arrivals: list[Event] = []
        for layer in range(self._host_pages.layer_num):
            copy_layer(layer)
            arrivals.append(recorded(self._device, self._in))
        return arrivals

    def _hold(self, host_indices: torch.Tensor, until: Completion, behind: str | None) -> None:
        # Copies of one direction end in the order of their stream, so only the first needs to be
        # asked.
        self.host_slots.hold(host_indices, until, behind=behind)


def _pages_in(pool: LayeredPages, indices: torch.Tensor, where: str) -> torch.Tensor:
    numbers = page_numbers(indices, pool.page_size)
    if bool(((numbers < 0) | (numbers >= pool.page_num)).any()):
        size = pool.page_num * pool.page_size
        raise InvalidTransferError(
            f"{where}_indices must be slots in [0, {size}), got pages that are not there"
        )
    return numbers


def _refuse_repeated(argument: str, pages: torch.Tensor) -> None:
    if bool((pages.sort().values.diff() == 0).any()):
        raise InvalidTransferError(
            f"{argument} hold a page twice; what it would hold then is undefined"
        )
