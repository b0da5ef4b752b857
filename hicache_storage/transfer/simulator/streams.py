"""Simulated streams and events."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import TYPE_CHECKING

from hicache_storage.transfer.simulator.clocks import Clock
from hicache_storage.transfer.simulator.operations import Place, Wait
from hicache_storage.transfer.streams import Rows, StreamFailedError

if TYPE_CHECKING:
    from random import Random

    import torch

    from hicache_storage.transfer.runs import RowRuns
    from hicache_storage.transfer.simulator.operations import Operation
    from hicache_storage.transfer.simulator.simulator import StreamSimulator
    from hicache_storage.transfer.streams import Event, Stream

STUCK_SECONDS = 120.0
"""A wait that takes longer is given up: nothing that a test enqueues takes a part of that."""


class SimulatedStream:
    """A queue and the thread that runs it. Made by `StreamSimulator.stream`."""

    def __init__(self, simulator: StreamSimulator, name: str, actor: int, random: Random) -> None:
        self.name, self.actor = name, actor
        self.clock = Clock()
        """What is ordered before whatever is enqueued next; guarded by the simulator's lock."""
        self._simulator, self._random = simulator, random
        self._queue = SimpleQueue[tuple["Operation | None", Place]]()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, SimulatedEvent):
            raise TypeError(f"a simulated stream waits for simulated events, not for {type(event).__name__}")
        place = self._simulator.order_behind(self, event)
        if place is not None:
            self.enqueue(Wait(place))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        self._simulator.copy(self, destination, source, what)

    def copy_rows(self, destination: torch.Tensor, source: torch.Tensor, rows: RowRuns, what: str) -> None:
        self._simulator.copy_rows(self, destination, source, rows, what)

    def upload(self, rows: torch.Tensor) -> Rows:
        host = rows.clone()
        # What is read before it has come names no row.
        uploaded = Rows(host, host.new_full(host.shape, -1))
        self._simulator.copy(self, uploaded.device, host, "upload of row numbers")
        return uploaded

    def gather(self, destination: torch.Tensor, source: torch.Tensor, rows: Rows, what: str) -> None:
        self._simulator.gather(self, destination, source, rows, what)

    def scatter(self, destination: torch.Tensor, rows: Rows, source: torch.Tensor, what: str) -> None:
        self._simulator.scatter(self, destination, rows, source, what)

    def move_rows(
        self, destination: torch.Tensor, destination_rows: Rows, source: torch.Tensor, source_rows: Rows, what: str
    ) -> None:
        self._simulator.move_rows(self, destination, destination_rows, source, source_rows, what)

    def synchronize(self) -> None:
        event = SimulatedEvent(self._simulator)
        event.record(self)
        event.synchronize()

    def enqueue(self, operation: Operation | None) -> Place:
        """Run an operation behind all others, or none; the place behind it."""
        place = Place()
        self._queue.put((operation, place))
        return place

    def end(self) -> None:
        """Run what is enqueued, then end the thread."""
        self._queue.put((None, _END))
        self._thread.join(STUCK_SECONDS)

    def _serve(self) -> None:
        while True:
            operation, place = self._queue.get()
            if place is _END:
                return
            # As on a GPU, a stream that has failed runs nothing more.
            if operation is not None and self._error is None:
                try:
                    operation.run(self._random)
                except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for it
                    self._error = error
            place.reach(self._error)


class SimulatedEvent:
    """A place in a simulated stream. Made by `StreamSimulator.event`."""

    def __init__(self, simulator: StreamSimulator) -> None:
        self._simulator = simulator
        self.place: Place | None = None
        """None where it was never recorded."""
        self.clock = Clock()
        """What is ordered before the place."""

    def record(self, stream: Stream) -> None:
        if not isinstance(stream, SimulatedStream):
            raise TypeError(f"a simulated event is recorded on a simulated stream, not on {type(stream).__name__}")
        self._simulator.record(self, stream)

    def query(self) -> bool:
        if self.place is None:
            return True
        if not self.place.reached():
            return False
        self._passed(self.place)
        return True

    def synchronize(self) -> None:
        place = self.place
        if place is None:
            return
        if not place.wait(STUCK_SECONDS):
            raise StreamFailedError(f"an event was not reached within {STUCK_SECONDS:.0f} s")
        self._passed(place)

    def _passed(self, place: Place) -> None:
        if place.error is not None:
            raise StreamFailedError(f"an operation failed: {place.error!r}") from place.error
        self._simulator.order_host_behind(self)


_END = Place()
