"""Layers: what a model waits for while its pages are loaded, and which of its layers a pool holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.transfer.streams import Event, Stream


class LayerMap:
    """Which of a model's layers a pool holds: in a hybrid model, attention and Mamba pools have some each.

    Args:
        layers: for each layer of the pool its number in the model, counted from the rank's first layer on, ascending.

    Raises:
        InvalidPoolError: they are not ascending numbers from 0 on.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        if list(self.layers) != sorted(set(self.layers)) or any(layer < 0 for layer in self.layers):
            raise InvalidPoolError(f"layers must be ascending numbers from 0 on, got {self.layers}")
        self._own = {layer: own for own, layer in enumerate(self.layers)}

    def __call__(self, layer: int) -> int | None:
        """The pool's own number of a model's layer; None where it has no share in that."""
        return self._own.get(layer)


class LayerCounter:
    """The layers of one load as they arrive, one event for each (rule ST-2)."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = tuple(events)

    def wait(self, layer: int, stream: Stream) -> None:
        """Let a stream wait until a layer has arrived; call it before the layer's kernels are launched."""
        stream.wait_event(self._events[layer])

    def arrived(self) -> int:
        """How many layers have arrived, from the first on; does not block."""
        return next((layer for layer, event in enumerate(self._events) if not event.query()), len(self._events))

    def done(self) -> bool:
        """Whether all layers have arrived; does not block."""
        return self.arrived() == len(self._events)

    def synchronize(self) -> None:
        """Block the calling thread until all layers have arrived."""
        for event in self._events:
            event.synchronize()


class Acknowledgement:
    """Tells when a write-back is done, and its host pages can be read."""

    def __init__(self, finished: Event) -> None:
        self._finished = finished

    def done(self) -> bool:
        """Whether it is; does not block."""
        return self._finished.query()

    def wait(self) -> None:
        """Block the calling thread until it is."""
        self._finished.synchronize()
