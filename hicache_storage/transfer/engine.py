"""Copies of pages between device and host, ordered by events.

The events order them against the compute stream, and against each other.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import torch

from hicache_storage.pools.pages import page_numbers
from hicache_storage.spec import InvalidPoolError, InvalidTransferError
from hicache_storage.transfer.copies import DEVICE, HOST, IN, OUT, PRIORITIES, Lane
from hicache_storage.transfer.host_slots import HostSlots, PageFences
from hicache_storage.transfer.plan import make_plan
from hicache_storage.transfer.streams import StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_storage.pools import DevicePages, PagedHostPool
    from hicache_storage.pools.pages import Numbers
    from hicache_storage.transfer.copies import Run
    from hicache_storage.transfer.plan import Way
    from hicache_storage.transfer.streams import Device, Event, Stream

logger = logging.getLogger(__name__)

WRITTEN: Final = {OUT: HOST, IN: DEVICE}
"""The side that each direction writes."""


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
        way: as `PageTransfers` has it.
    """

    def __init__(
        self,
        device: Device,
        streams: Mapping[str, Stream],
        name: str,
        pair: PoolPair,
        way: Way | None,
    ) -> None:
        device_pool, host_pool = pair
        device_pool.check_host_pool(host_pool)
        self._streams = streams
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
                Lane(device, group, streams[direction], table, direction) for group in self.plan
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
        plan = "; ".join(map(str, self.plan))
        logger.info("copies of %s, %s: %s", name, type(host_pool).__name__, plan)

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
        pages = self.existing(indices)
        # What is only read may occur twice.
        side = WRITTEN[direction]
        written = pages[side]
        order = np.arange(written.size, dtype=np.int32)
        # Of two marks on a page one remains.
        self._marks[written] = order
        if self._marks.take(written).tobytes() != order.tobytes():
            raise InvalidTransferError(
                f"{Indices._fields[side]}_indices hold a page twice; what it would hold then is "
                "undefined"
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

    def give_up(self, direction: str, pages: Numbers) -> None:
        """Fence the pages of a transfer that failed: some of its copies may have been enqueued."""
        with suppress(Exception):
            self.fences[direction].note(pages, self._streams[direction].record())
            return
        # A stream that refuses to record tells nothing any more: none can wait for it, and the host
        # pages are not handed out again.
        self.host_slots.keep(torch.from_numpy(pages[HOST]))

    def existing(self, sides: Sequence[torch.Tensor]) -> Numbers:
        """The page numbers of indices of the device, or of both sides."""
        pages = page_numbers(sides, self.page_size)
        # Negative numbers are the largest unsigned ones.
        largest = pages.view("u8").max(axis=1).tolist()
        for name, count, last in zip(Indices._fields, self._page_nums, largest, strict=False):
            if last >= count:
                raise InvalidTransferError(
                    f"{name}_indices must be slots in [0, {count * self.page_size}), got "
                    "pages that are not there"
                )
        return pages


class Acknowledgement:
    """The end of a copy: host pages of a write-back can be read, layers of a load have arrived.

    Args:
        events: of the copy, recorded on one stream in this order. Without any it has ended.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self._is_done = False

    def done(self) -> bool:
        """Return True if the copy has ended; does not block."""
        # A query is a call of CUDA; what has ended is not asked about again.
        self._is_done = self._is_done or all(event.query() for event in self.events[-1:])
        return self._is_done

    def synchronize(self) -> None:
        """Block the calling thread until the copy has ended."""
        for event in self.events[-1:]:
            event.synchronize()


class LayerCounter(Acknowledgement):
    """The layers of one load as they arrive, one event for each (rule ST-2).

    A kernel in a CUDA graph cannot wait for one: the graph would have to know the events of every
    later load. Let the stream wait for the graph's last layer before each replay; layers arrive in
    order.
    """

    def wait(self, layer: int, stream: Stream) -> None:
        """Let a stream wait until a layer has arrived.

        To be called before the layer's kernels are launched.

        Raises:
            InvalidTransferError: a CUDA graph is being captured on the stream.
        """
        if self.events:
            stream.wait_event(self.events[layer])


class PageTransfers:
    """The transfer engine: moves the pages of all pools of a model between L1 and L2.

    On two streams. Called by one thread at a time; no call waits for a copy.

    A load copies one layer of the model after the other. Pools without pages in a transfer are left
    out of it. How pages are copied follows from the lengths of the pools; the log says it once.

    To be closed before the pools' memory goes: it keeps all pools until its copies are over, also
    when it is garbage collected without being closed, which then waits for them.

    Args:
        device: makes the streams.
        compute: the stream whose kernels read and write the device pages.
        pools: by name.
        way: None lets lengths decide. `kernel`: a kernel reads and writes the host memory. `dma`:
            DMA wherever pieces are contiguous. For benchmarks, and machines that differ from those
            that were measured.

    Raises:
        InvalidPoolError: the pools of a pair do not fit each other, and the message names the
            field; or the device cannot reach the host memory, or has no memory for the staging
            buffers.
        InvalidTransferError: `way` is unknown.
        ConfigError: the kernel cannot be compiled; the message names what is missing.
    """

    def __init__(
        self,
        device: Device,
        compute: Stream,
        pools: Mapping[str, PoolPair],
        *,
        way: Way | None = None,
    ) -> None:
        if not pools:
            raise InvalidPoolError("pools must hold at least one pool")
        self.device = device
        self.streams = {
            direction: device.stream(direction, priority)
            for direction, priority in PRIORITIES.items()
        }
        """By direction: `OUT` and `IN`. All pools share them, so that one event behind the copies
        stands for all."""
        self.pools = {
            name: PoolCopies(device, self.streams, name, pair, way) for name, pair in pools.items()
        }
        self.host_slots = {name: pool.host_slots for name, pool in self.pools.items()}
        """Allocators of host pages, by pool."""
        self.layer_num = 1 + max(pair.host_pool.shape.layers[-1] for pair in pools.values())
        """Layers of the model, as far as a pool has a share in them."""
        self._steps = {direction: self._order(direction, pools) for direction in (OUT, IN)}
        self._compute = compute
        self._is_closed = False
        # CUDA allows memory to be unlocked and unmapped under a copy, which then reads or writes
        # memory of another owner. At exit its context may go first, and the kernel releases the
        # memory anyway.
        used = [*pools.values(), *self.pools.values()]
        weakref.finalize(self, _settle, self.streams.values(), used).atexit = False

    def write_back(self, pages: Mapping[str, Indices]) -> Acknowledgement:
        """Copy device pages to host pages, behind every kernel launched so far on `compute`.

        The host pages may be read once it is acknowledged. They may be freed at any time, and the
        device pages overwritten after `before_overwrite`.

        Raises:
            InvalidTransferError: the indices of a pool are not whole pages, by the first and the
                last slot of each, or not as many on both sides, or a host page occurs twice, or
                there is no such pool; nothing is copied.
        """
        return Acknowledgement(self._enqueue(OUT, pages))

    def load(self, pages: Mapping[str, Indices]) -> LayerCounter:
        """Copy host pages to device pages layer by layer, behind every kernel launched so far.

        The caller has written the host pages, and may free them at any time. The counter counts the
        model's layers, not a pool's.

        Raises:
            InvalidTransferError: as `write_back` does; here no device page may occur twice.
        """
        return LayerCounter(self._enqueue(IN, pages))

    def before_overwrite(self, device_indices: Mapping[str, torch.Tensor]) -> None:
        """Let `compute` wait for the copies that use device pages.

        To be called before a kernel overwrites them.
        """
        for name, indices in device_indices.items():
            pool = self._pool(name)
            if indices.numel():
                pages = pool.existing([indices])
                for fences in pool.fences.values():
                    fences.wait(self._compute, pages)

    def close(self) -> None:
        """Wait for the copies that run, and take no more. Idempotent.

        Raises:
            StreamFailedError: a copy has failed; all are over, and it is closed all the same.
        """
        if not self._is_closed:
            self._is_closed = True
            _wait_for_all(self.streams.values())

    def _order(
        self, direction: str, pools: Mapping[str, PoolPair]
    ) -> list[list[tuple[str, Lane, Run]]]:
        """What there is to be enqueued for each of the model's layers.

        Layers outside, pools inside: kernels of a layer wait for no later layer of any pool (rule
        ST-2).
        """
        steps: list[list[tuple[str, Lane, Run]]] = [[] for _ in range(self.layer_num)]
        for name, pair in pools.items():
            for lane in self.pools[name].lanes[direction]:
                for run in lane.runs:
                    steps[pair.host_pool.shape.layers[run.layers.start]].append((name, lane, run))
        # A write-back has no events of layers.
        return steps if direction == IN else [step for step in steps if step]

    def behind_compute(self, direction: str) -> None:
        """Let the copies of a direction wait for all kernels launched so far.

        Nothing tells which of them use the copies' pages (rule ST-1).
        """
        self.streams[direction].wait_event(self._compute.record())

    def _enqueue(self, direction: str, indices: Mapping[str, Indices]) -> list[Event]:
        """Enqueue all copies; the event behind them, or behind those of each layer of a load."""
        if self._is_closed:
            raise InvalidTransferError("the transfer engine is closed; make a new one")
        # All pools are checked before anything is enqueued: a transfer is made as a whole or not at
        # all.
        pools = {name: self._pool(name) for name in indices}
        pages = {name: pool.pages(direction, indices[name]) for name, pool in pools.items()}
        stream = self.streams[direction]
        events: list[Event] = []
        with self.device.current():
            try:
                self.behind_compute(direction)
                for name, pool in pools.items():
                    pool.begin(direction, pages[name])
                for steps in self._steps[direction]:
                    mine = [(lane, run) for name, lane, run in steps if name in pages]
                    for lane, run in mine:
                        lane.enqueue(run)
                    if direction == IN:
                        # Layers that come together have one event.
                        events.append(stream.record() if mine or not events else events[-1])
                events = events or [stream.record()]
            except BaseException:
                # Which pool failed is not known: some copies of each may have been enqueued.
                for name, pool in pools.items():
                    pool.give_up(direction, pages[name])
                raise
        for name, pool in pools.items():
            pool.fences[direction].note(pages[name], events[-1])
        return events

    def _pool(self, name: str) -> PoolCopies:
        if name not in self.pools:
            raise InvalidTransferError(f"no such pool: {name}; there are {', '.join(self.pools)}")
        return self.pools[name]


def _wait_for_all(streams: Iterable[Stream]) -> None:
    with ExitStack() as waiting:
        # It calls all callbacks even if one raises.
        for stream in streams:
            waiting.callback(stream.synchronize)


def _settle(streams: Iterable[Stream], used: object) -> None:
    """Wait for all copies, also failed ones, before memory that they use is let go of."""
    with suppress(StreamFailedError):
        _wait_for_all(streams)
