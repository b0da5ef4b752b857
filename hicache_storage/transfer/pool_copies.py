"""The copies between one device pool and its host pool."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from hicache_storage.pools.pages import page_numbers
from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer.copies import DEVICE, HOST, IN, OUT, Lane
from hicache_storage.transfer.host_slots import HostSlots, PageFences
from hicache_storage.transfer.plan import describe, make_plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.pools import DevicePages, PagedHostPool
    from hicache_storage.pools.pages import Numbers
    from hicache_storage.transfer.plan import Way
    from hicache_storage.transfer.streams import Device, Event, Stream

logger = logging.getLogger(__name__)

WRITTEN: Final = {OUT: HOST, IN: DEVICE}
"""The side that each direction writes."""
NAMES: Final = ("device_indices", "host_indices")
"""By side."""


class PoolPair(NamedTuple):
    """A device pool, and the host pool that backs it up: of the model's layers in its shape.

    In a hybrid model, attention and Mamba pools have some each.
    """

    device_pool: DevicePages
    """A device pool, or other pages of the same layers, page size and rows as the host pool's."""
    host_pool: PagedHostPool


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
        device_pool, host_pool = pair
        device_pool.check_host_pool(host_pool)
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
                Lane(device, group, streams[direction], table, staging_bytes, direction)
                for group in self.plan
            ]
            for direction, table in self._tables.items()
        }
        """The copies of each direction."""
        pages = max(self._page_nums)
        self.fences = {direction: PageFences(pages) for direction in WRITTEN}
        # The caller may free host pages at any time; they are handed out when the copies that use
        # them have ended.
        self.host_slots = HostSlots(host_pool, self.fences.values())
        # Half as long as page numbers: less to read, and no pool has 2^31 pages.
        self._marks = np.zeros(pages, np.int32)
        self._numbers = np.arange(pages, dtype=np.int32)
        logger.info("copies of %s, %s: %s", name, type(host_pool).__name__, describe(self.plan))

    def pages(self, direction: str, indices: Indices) -> Numbers:
        """The page numbers of a transfer in two rows, `DEVICE` and `HOST`.

        Raises:
            InvalidTransferError: the indices are not whole pages of the pools, as many each, or a
                page that is written occurs twice.
        """
        counts = [side.numel() for side in indices]
        if counts[0] != counts[1] or not counts[0]:
            raise InvalidTransferError(
                f"as many device_indices as host_indices, and not none: {counts[0]} and {counts[1]}"
            )
        pages = self._existing(indices)
        # What is only read may occur twice.
        side = WRITTEN[direction]
        if self._has_repeated(pages[side]):
            raise InvalidTransferError(
                f"{NAMES[side]} hold a page twice; what it would hold then is undefined"
            )
        return pages

    def begin(self, direction: str, pages: Numbers) -> None:
        """Get ready for the copies of a transfer."""
        stream = self._streams[direction]
        # Copies on the other stream may still use the device pages (rule ST-1) or the host pages
        # (rule ST-3).
        self.fences[IN if direction == OUT else OUT].wait(stream, pages)
        stream.upload(self._tables[direction], pages)
        for lane in self.lanes[direction]:
            lane.begin(pages)

    def end(self, direction: str, pages: Numbers, until: Event) -> None:
        """Fence the pages until an event that was recorded behind all copies."""
        self.fences[direction].note(pages, until)

    def give_up(self, direction: str, pages: Numbers) -> None:
        """Fence the pages of a transfer that failed: some of its copies may have been enqueued."""
        with suppress(Exception):
            self.end(direction, pages, self._streams[direction].record())
            return
        # A stream that refuses to record tells nothing any more: none can wait for it, and the host
        # pages are not handed out again.
        self.host_slots.keep(torch.from_numpy(pages[HOST]))

    def before_overwrite(self, compute: Stream, device_indices: torch.Tensor) -> None:
        """Let `compute` wait for the copies that use device pages."""
        if device_indices.numel():
            pages = self._existing([device_indices])
            for fences in self.fences.values():
                fences.wait(compute, pages)

    def _existing(self, sides: Sequence[torch.Tensor]) -> Numbers:
        """The page numbers of indices of the device, or of both sides."""
        pages = page_numbers(sides, self.page_size)
        # Negative numbers are the largest unsigned ones.
        largest = pages.view("u8").max(axis=1).tolist()
        for name, count, last in zip(NAMES, self._page_nums, largest, strict=False):
            if last >= count:
                raise InvalidTransferError(
                    f"{name} must be slots in [0, {count * self.page_size}), got "
                    "pages that are not there"
                )
        return pages

    def _has_repeated(self, pages: Numbers) -> bool:
        if pages.size > self._marks.size:
            return True
        # Of two marks on a page one remains.
        numbers = self._numbers[: pages.size]
        self._marks[pages] = numbers
        return self._marks.take(pages).tobytes() != numbers.tobytes()
