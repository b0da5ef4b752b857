"""Transfer engines with one planted fault each.

And drivers that use host pages when they no longer may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivers_plain import Plain

from hicache_storage.spec import PoolName
from hicache_storage.transfer import (
    Acknowledgement,
    LayerCounter,
    LayerMap,
    PageTransfers,
    PoolPair,
    recorded,
)
from hicache_storage.transfer.pool_copies import IN, OUT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hicache_storage.objects.requests import PoolRequest, RegisteredPool
    from hicache_storage.pools import DevicePages, MHAHostPool
    from hicache_storage.spec import HiCacheStorageExtraInfo, PoolTransfer
    from hicache_storage.transfer import Device, Indices, Stream
    from hicache_storage.transfer.plan import Way


class Engine(PageTransfers):
    """A right engine, made as a target makes one."""

    WAY: Way | None = None

    def __init__(
        self, device: Device, compute: Stream, device_pages: DevicePages, host_pool: MHAHostPool
    ) -> None:
        pair = PoolPair(device_pages, host_pool, LayerMap(range(host_pool.layer_num)))
        super().__init__(device, compute, {PoolName.KV: pair}, way=self.WAY, staging_bytes=1)
        self.pool = self.pools[PoolName.KV]


class StagingEngine(Engine):
    """A right engine that gathers pages in staging buffers of one page."""

    WAY = "dma"


# Engines
# --------------------------------------------------------------------------------------------------------------


class WritesBackTooEarly(Engine):
    """Copies out without waiting for the kernels that write the pages."""

    def _behind_compute(self, direction: str) -> None:
        if direction != OUT:
            super()._behind_compute(direction)


class GathersTooEarly(StagingEngine):
    """Gathers pages without waiting for the kernels that write them."""

    def _behind_compute(self, direction: str) -> None:
        if direction != OUT:
            super()._behind_compute(direction)


class LoadsOverKernels(Engine):
    """Copies in without waiting for the kernels that still read the pages."""

    def _behind_compute(self, direction: str) -> None:
        if direction != IN:
            super()._behind_compute(direction)


class LoadsOverCopiesOut(Engine):
    def load(self, pages: Mapping[str, Indices]) -> LayerCounter:
        self.pool._behind_copies = lambda direction, pages: None  # type: ignore[method-assign]
        return super().load(pages)


class OverwritesTooEarly(Engine):
    """Lets kernels overwrite pages that are still being copied out."""

    def before_overwrite(self, device_indices: Mapping[str, torch.Tensor]) -> None:
        pass


class AcknowledgesTooEarly(Engine):
    """Says that a write-back is done when its last layer has been enqueued."""

    def write_back(self, pages: Mapping[str, Indices]) -> Acknowledgement:
        begun = recorded(self.device, self.streams[OUT])
        super().write_back(pages)
        return Acknowledgement(begun)


class SignalsAllLayersAtTheEnd(Engine):
    def load(self, pages: Mapping[str, Indices]) -> LayerCounter:
        events = super().load(pages)._events
        return LayerCounter([events[-1]] * len(events))


class SignalsOneLayerEarly(Engine):
    def load(self, pages: Mapping[str, Indices]) -> LayerCounter:
        begun = recorded(self.device, self.streams[IN])
        return LayerCounter([begun, *super().load(pages)._events[:-1]])


class BlocksWhileLoading(Engine):
    """Returns from a load when the last layer has arrived."""

    def load(self, pages: Mapping[str, Indices]) -> LayerCounter:
        counter = super().load(pages)
        counter.synchronize()
        return counter


class FreesUnderALoad(Engine):
    """Keeps the host pages of write-backs, and forgets those of loads."""

    def load(self, pages: Mapping[str, Indices]) -> LayerCounter:
        hold = self.pool.host_slots.hold_pages
        self.pool.host_slots.hold_pages = lambda pages, until, behind: None  # type: ignore[method-assign]
        try:
            return super().load(pages)
        finally:
            self.pool.host_slots.hold_pages = hold  # type: ignore[method-assign]


class FreesUnderACopy(FreesUnderALoad):
    """Forgets those of write-backs, too."""

    def write_back(self, pages: Mapping[str, Indices]) -> Acknowledgement:
        self.pool.host_slots.hold_pages = lambda pages, until, behind: None  # type: ignore[method-assign]
        return super().write_back(pages)


# Drivers
# --------------------------------------------------------------------------------------------------------------


class DeliversHostPagesLate(Plain):
    """Fills the pages of a get during the next call."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.late: list[tuple[RegisteredPool, str, list[memoryview]]] = []

    def read(self, request: PoolRequest) -> list[bool]:
        targets = request.pool.access.targets(request.slots)
        self.late += [
            (request.pool, key, page) for key, page in zip(request.keys, targets, strict=True)
        ]
        return [self.there(request.pool, key) for key in request.keys]

    def batch_get_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        self._catch_up()
        return super().batch_get_v2(transfers, extra_info)

    def batch_set_v2(
        self, transfers: Sequence[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[PoolName, list[bool]]:
        self._catch_up()
        return super().batch_set_v2(transfers, extra_info)

    def _catch_up(self) -> None:
        for pool, key, page in self.late:
            self.take(pool, key, page)
        self.late.clear()
