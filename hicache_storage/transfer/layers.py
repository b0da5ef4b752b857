"""Progress of copies: the layers of a load, and the end of a write-back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.transfer.streams import Event, Stream


class LayerCounter:
    """The layers of one load as they arrive, one event for each (rule ST-2).

    A kernel in a CUDA graph cannot wait for one: the graph would have to know the events of every
    later load. Let the stream wait for the graph's last layer before each replay; layers arrive in
    order.

    Args:
        events: of the layers, recorded on one stream in this order.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = tuple(events)
        self._arrived = 0

    def wait(self, layer: int, stream: Stream) -> None:
        """Let a stream wait until a layer has arrived.

        To be called before the layer's kernels are launched.

        Raises:
            InvalidTransferError: a CUDA graph is being captured on the stream.
        """
        stream.wait_event(self._events[layer])

    def arrived(self) -> int:
        """Count the layers that have arrived, from the first on; does not block."""
        while self._arrived < len(self._events) and self._events[self._arrived].query():
            self._arrived += 1
        return self._arrived

    def done(self) -> bool:
        """Return True if all layers have arrived; does not block."""
        # One query for all layers: they arrive in order.
        if self._arrived < len(self._events) and self._events[-1].query():
            self._arrived = len(self._events)
        return self._arrived == len(self._events)

    def synchronize(self) -> None:
        """Block the calling thread until all layers have arrived."""
        self._events[-1].synchronize()


class Acknowledgement:
    """Tells when a write-back is done, and its host pages can be read."""

    def __init__(self, finished: Event) -> None:
        self._finished = finished
        self._is_done = False

    def done(self) -> bool:
        """Return True if the copy has ended; does not block."""
        # A query is a call of CUDA; what has ended is not asked about again.
        self._is_done = self._is_done or self._finished.query()
        return self._is_done

    def wait(self) -> None:
        """Block the calling thread until it is."""
        self._finished.synchronize()
