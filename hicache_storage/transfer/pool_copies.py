"""The copies between one device pool and its host pool."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from hicache_storage.spec import InvalidPoolError, InvalidTransferError
from hicache_storage.transfer.copies import DEVICE, HOST, Lane
from hicache_storage.transfer.fences import PageFences
from hicache_storage.transfer.host_slots import HostSlots
from hicache_storage.transfer.pages import page_numbers
from hicache_storage.transfer.plan import describe, make_plan
from hicache_storage.transfer.streams import recorded

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hicache_storage.pools import DevicePages, HostPoolBase
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


class PoolPair(NamedTuple):
    """A device pool, the host pool that backs it up, and the model's layers that both hold."""

    device_pool: DevicePages
    """A device pool, or other pages of the same layers, page size and rows as the host pool's."""
    host_pool: HostPoolBase
    layers: Sequence[int]
    """For each layer of the pools its number in the model, counted from the rank's first layer on.

    In a hybrid model, attention and Mamba pools have some each.
    """


class Indices(NamedTuple):
    """Slots of one pool: int64, as many whole pages on the device as on the host."""

    device: torch.Tensor
    host: torch.Tensor


class PoolCopies:
    """The copies of one pair of pools, and what tells which pages they use.

    Args:
        streams: by direction.
        name: of the pool, for messages.
        way, staging_bytes: as `PageTransfers` has them.
    """

    def __init__(
        self,
        device: Device,
        streams: Mapping[str, Stream],
        name: str,
        pair: PoolPair,
        way: Way | None,
        staging_bytes: int,
    ) -> None:
        import torch

        device_pool, host_pool, layers = pair
        device_pool.check_host_pool(host_pool)
        if [*layers] != sorted({*layers}) or len(layers) != host_pool.layer_num or layers[0] < 0:
            raise InvalidPoolError(
                f"layers of pool {name!r} must be {host_pool.layer_num} ascending numbers from 0 "
                f"on, got {[*layers]}"
            )
        self.host_slots = HostSlots(host_pool)
        self._device = device
        self._streams = streams
        self._pair = pair
        self.page_size = host_pool.page_size
        self._page_nums = device_pool.page_num, host_pool.page_num
        self.plan = make_plan(device_pool, host_pool, way)
        """How each part is copied."""
        # A write-back writes the host's pages, a load the device's.
        self._tables = {
            direction: device.page_table(self._page_nums[side])
            for direction, side in WRITTEN.items()
        }
        self.lanes = {
            direction: [
                Lane(device, group, streams[direction], table, staging_bytes, direction == OUT)
                for group in self.plan
            ]
            for direction, table in self._tables.items()
        }
        """The copies of each direction."""
        pages = max(self._page_nums)
        self._fences = {direction: PageFences(pages) for direction in WRITTEN}
        self._marks = torch.zeros(pages, dtype=torch.int64)
        self._numbers = torch.arange(pages)
        logger.info("copies of %s, %s: %s", name, type(host_pool).__name__, describe(self.plan))

    def check(self, direction: str, pages: torch.Tensor) -> None:
        """Refuse page numbers of another pool, or a written page that occurs twice."""
        self._check_range(pages)
        # What is only read may occur twice.
        if self._has_repeated(pages[WRITTEN[direction]]):
            raise InvalidTransferError(
                f"{NAMES[WRITTEN[direction]]} hold a page twice; what it would hold then is "
                "undefined"
            )

    def begin(self, direction: str, pages: torch.Tensor) -> None:
        """Get ready for the copies of a transfer."""
        self._behind_copies(direction, pages)
        self._streams[direction].upload(self._tables[direction], pages)
        for lane in self.lanes[direction]:
            lane.begin(pages)

    def end(self, direction: str, pages: torch.Tensor, until: Event) -> None:
        """Fence the pages until an event that was recorded behind all copies."""
        self._fences[direction].note(pages, until)
        # The caller may free the host pages at any time; they are handed out when the copy has
        # ended. Copies of one direction end in order.
        self.host_slots.hold_pages(pages[HOST], until, direction)

    def give_up(self, direction: str, pages: torch.Tensor) -> None:
        """Fence the pages of a transfer that failed: some of its copies may have been enqueued.

        Blocks only where no event can be recorded.
        """
        stream = self._streams[direction]
        # First without waiting. A stream that refuses to record may still let the thread wait for
        # it; one that refuses both tells nothing any more.
        with suppress(Exception):
            self.end(direction, pages, recorded(self._device, stream))
            return
        with suppress(Exception):
            stream.synchronize()
            return
        # No stream can wait for it; the host pages are not handed out any more.
        self.host_slots.hold_pages(pages[HOST], Never(), Never)

    def before_overwrite(self, compute: Stream, device_indices: torch.Tensor) -> None:
        """Let `compute` wait for the copies that use device pages."""
        pages = page_numbers([device_indices], self.page_size)
        if pages.numel():
            self._check_range(pages)
            for fences in self._fences.values():
                fences.wait(compute, pages)

    def _behind_copies(self, direction: str, pages: torch.Tensor) -> None:
        # Copies on the other stream may still use the device pages (rule ST-1) or the host pages
        # (rule ST-3).
        other = self._fences[IN if direction == OUT else OUT]
        other.wait(self._streams[direction], pages)

    def _check_range(self, pages: torch.Tensor) -> None:
        low, high = (cast("list[int]", each.tolist()) for each in pages.aminmax(dim=1))
        for name, count, first, last in zip(NAMES, self._page_nums, low, high, strict=False):
            if first < 0 or last >= count:
                raise InvalidTransferError(
                    f"{name} must be slots in [0, {count * self.page_size}), got "
                    "pages that are not there"
                )

    def _has_repeated(self, pages: torch.Tensor) -> bool:
        if pages.numel() > self._marks.numel():
            return True
        # Of two marks on a page one remains.
        numbers = self._numbers[: pages.numel()]
        self._marks.scatter_(0, pages, numbers)
        return not self._marks.gather(0, pages).equal(numbers)


def moved_pages(
    device_indices: torch.Tensor, host_indices: torch.Tensor, page_size: int
) -> torch.Tensor:
    """The page numbers of a transfer in two rows, `DEVICE` and `HOST`.

    Raises:
        InvalidTransferError: the indices are not whole pages, as many each.
    """
    counts = device_indices.numel(), host_indices.numel()
    if counts[0] != counts[1] or not counts[0]:
        raise InvalidTransferError(
            f"as many device_indices as host_indices, and not none: {counts[0]} and {counts[1]}"
        )
    return page_numbers([device_indices, host_indices], page_size)


class Never:
    """The end of copies about which a failed stream tells nothing."""

    def query(self) -> bool:
        return False
