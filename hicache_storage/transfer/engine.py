"""Copies of pages between device and host, ordered by events.

The events order them against the compute stream, and against each other.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Self

from hicache_storage.spec import InvalidPoolError, InvalidTransferError
from hicache_storage.transfer.copies import IN, OUT, PRIORITIES, STAGING_BYTES
from hicache_storage.transfer.pool_copies import PoolCopies
from hicache_storage.transfer.streams import StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from hicache_storage.transfer.copies import Lane, Run
    from hicache_storage.transfer.plan import Way
    from hicache_storage.transfer.pool_copies import Indices, PoolPair
    from hicache_storage.transfer.streams import Device, Event, Stream


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

    To be closed, or used in a `with` statement, before the pools' memory goes: it keeps all pools
    until its copies are over, also when it is garbage collected without being closed, which then
    waits for them.

    Args:
        device: makes the streams.
        compute: the stream whose kernels read and write the device pages.
        pools: by name.
        way: None lets lengths decide. `kernel`: a kernel reads and writes the host memory. `dma`:
            DMA wherever pieces are contiguous, for loads in growing groups of layers. For
            benchmarks, and machines that differ from those that were measured.
        staging_bytes: length of each of the two staging buffers that a direction of a pool has
            where its copies pass through some; a page at least, and not longer than the pool needs.

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
        staging_bytes: int = STAGING_BYTES,
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
            name: PoolCopies(device, self.streams, name, pair, way, staging_bytes)
            for name, pair in pools.items()
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
        used = list(self.pools.values())
        weakref.finalize(self, _settle, self.streams.values(), used).atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

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
        for pool, indices in [(self._pool(name), each) for name, each in device_indices.items()]:
            pool.before_overwrite(self._compute, indices)

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
            pool.end(direction, pages[name], events[-1])
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
