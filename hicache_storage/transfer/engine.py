"""Copies of pages between device and host, ordered by events against the compute stream and each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer.fences import PageFences
from hicache_storage.transfer.host_slots import HostSlots
from hicache_storage.transfer.layers import Acknowledgement, LayerCounter
from hicache_storage.transfer.pages import first_slots
from hicache_storage.transfer.streams import recorded

if TYPE_CHECKING:
    import torch

    from hicache_storage.transfer.host_slots import SlotPool
    from hicache_storage.transfer.pages import LayeredPages
    from hicache_storage.transfer.streams import Device, Event, Stream


class TransferEngine(Protocol):
    """What moves pages between L1 and L2. Called by one thread at a time; no call waits for a copy."""

    host_slots: HostSlots
    """Where host pages are allocated and freed."""

    def write_back(self, device_indices: torch.Tensor, host_indices: torch.Tensor) -> Acknowledgement:
        """Copy device pages to host pages, behind every kernel launched so far on the compute stream.

        The host pages may be read once it is acknowledged. They may be freed at any time, and the device pages
        overwritten after `before_overwrite`.

        Args:
            device_indices, host_indices: int64, as many whole pages of slots each.
        """
        ...

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerCounter:
        """Copy host pages to device pages layer by layer, behind every kernel launched so far on the compute stream.

        The caller has written the host pages, and may free them at any time.
        """
        ...

    def before_overwrite(self, device_indices: torch.Tensor) -> None:
        """Let the compute stream wait for the copies that use device pages, before a kernel that overwrites them."""
        ...


class PageTransfers:
    """The transfer engine of the SDK: one stream for each direction.

    Args:
        device: makes the streams.
        compute: the stream whose kernels read and write the device pages.
        device_pages, host_pages: the two pools, of the same layers and page size.
        host_pool: hands out the slots of `host_pages`.

    Raises:
        InvalidTransferError: the pools do not fit each other.
    """

    def __init__(
        self, device: Device, compute: Stream, device_pages: LayeredPages, host_pages: LayeredPages, host_pool: SlotPool
    ) -> None:
        shapes = [(pages.layer_num, pages.page_size) for pages in (device_pages, host_pages)]
        if shapes[0] != shapes[1]:
            raise InvalidTransferError(f"device and host pages differ in layers or page size: {shapes[0]} and {shapes[1]}")
        self.host_slots = HostSlots(host_pool)
        self._device, self._compute = device, compute
        self._device_pages, self._host_pages = device_pages, host_pages
        self._out, self._in = device.stream("write-back"), device.stream("load")
        self._device_fences, self._host_fences = PageFences(), PageFences()

    def write_back(self, device_indices: torch.Tensor, host_indices: torch.Tensor) -> Acknowledgement:
        pages = self._pairs(device_indices, host_indices)
        source, destination = [page for page, _ in pages], [page for _, page in pages]
        self._behind_compute(self._out)
        self._device_fences.before_read(self._out, source)
        self._host_fences.before_write(self._out, destination)
        for layer in range(self._host_pages.layer_num):
            self._copy_out(layer, pages)
        finished = recorded(self._device, self._out)
        self._device_fences.reads(source, finished)
        self._host_fences.writes(destination, finished)
        self._hold(host_indices, finished)
        return Acknowledgement(finished)

    def load(self, host_indices: torch.Tensor, device_indices: torch.Tensor) -> LayerCounter:
        pages = self._pairs(host_indices, device_indices)
        source, destination = [page for page, _ in pages], [page for _, page in pages]
        self._behind_compute(self._in)
        self._host_fences.before_read(self._in, source)
        self._behind_copies(destination)
        arrivals = self._copy_layers(pages)
        self._host_fences.reads(source, arrivals[-1])
        self._device_fences.writes(destination, arrivals[-1])
        self._hold(host_indices, arrivals[-1])
        return LayerCounter(arrivals)

    def before_overwrite(self, device_indices: torch.Tensor) -> None:
        self._device_fences.before_write(self._compute, first_slots(device_indices, self._device_pages.page_size))

    def _pairs(self, sources: torch.Tensor, destinations: torch.Tensor) -> list[tuple[int, int]]:
        if sources.numel() != destinations.numel() or not sources.numel():
            raise InvalidTransferError(
                f"as many slots to copy from as to, and not none: {sources.numel()} and {destinations.numel()}"
            )
        size = self._host_pages.page_size
        return list(zip(first_slots(sources, size), first_slots(destinations, size), strict=True))

    def _behind_compute(self, stream: Stream) -> None:
        stream.wait_event(recorded(self._device, self._compute))

    def _behind_copies(self, device_pages: list[int]) -> None:
        self._device_fences.before_write(self._in, device_pages)

    def _copy_out(self, layer: int, pages: list[tuple[int, int]]) -> None:
        for device_page, host_page in pages:
            sources = self._device_pages.page_layer(device_page, layer)
            for source, destination in zip(sources, self._host_pages.page_layer(host_page, layer), strict=True):
                self._out.copy(
                    destination,
                    source,
                    f"write-back of layer {layer} of device page {device_page // self._device_pages.page_size}",
                )

    def _copy_layers(self, pages: list[tuple[int, int]]) -> list[Event]:
        """Copy all layers; for each an event that comes when it has arrived."""
        arrivals: list[Event] = []
        for layer in range(self._host_pages.layer_num):
            self._copy_in(layer, pages)
            arrivals.append(recorded(self._device, self._in))
        return arrivals

    def _copy_in(self, layer: int, pages: list[tuple[int, int]]) -> None:
        for host_page, device_page in pages:
            sources = self._host_pages.page_layer(host_page, layer)
            for source, destination in zip(sources, self._device_pages.page_layer(device_page, layer), strict=True):
                self._in.copy(
                    destination, source, f"load of layer {layer} into device page {device_page // self._device_pages.page_size}"
                )

    def _hold(self, host_indices: torch.Tensor, until: Event) -> None:
        self.host_slots.hold(host_indices, until)
