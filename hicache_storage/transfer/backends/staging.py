"""Two buffers that one stream fills while another drains them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from hicache_storage.transfer.streams import recorded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_storage.transfer.pages import LaidOutPages, LayeredPages
    from hicache_storage.transfer.streams import Device, Event, Stream


class StagedPair(NamedTuple):
    """A pair of pools, and the device memory that their pages pass through on the way."""

    device: Device
    device_pages: LayeredPages
    host_pages: LaidOutPages
    staging_bytes: int
    """Length of a buffer."""
    streams: tuple[Stream, Stream]
    """Of write-backs and of loads."""


class Staging:
    """Device memory that pages pass through, piece by piece.

    One buffer is filled while the other is drained.

    Args:
        filler: the stream that fills; it belongs to this.
        buffers: page for page in the host pool's layout, each of the same size.
    """

    def __init__(self, device: Device, filler: Stream, buffers: Sequence[LaidOutPages]) -> None:
        self.filler = filler
        self.pages = buffers[0].page_num
        """Pages that fit into a buffer."""
        self._device = device
        self._buffers = tuple(buffers)
        # One that was never recorded is complete, as the buffer is free.
        self._drained = [device.event() for _ in buffers]
        self._turn = 0

    def begin(self, behind: Stream) -> None:
        """Let the filling wait for what another stream holds now."""
        self.filler.wait_event(recorded(self._device, behind))

    def through(
        self,
        drainer: Stream,
        fill: Callable[[LaidOutPages], None],
        drain: Callable[[LaidOutPages], None],
    ) -> None:
        """Enqueue one piece: `fill` on the filler, `drain` on `drainer`.

        Each is given the buffer.
        """
        buffer, drained = self._buffers[self._turn], self._drained[self._turn]
        self._turn = (self._turn + 1) % len(self._buffers)
        self._before_fill(drained)
        fill(buffer)
        self._before_drain(drainer)
        drain(buffer)
        # The same event again: waits that were enqueued before keep the position it had then.
        drained.record(drainer)

    # Methods of their own, so that tests can leave out one wait at a time.
    def _before_fill(self, drained: Event) -> None:
        self.filler.wait_event(drained)

    def _before_drain(self, drainer: Stream) -> None:
        drainer.wait_event(recorded(self._device, self.filler))
