"""Stream simulator: streams and events on the CPU, with a race detector."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from queue import SimpleQueue
from random import Random
from typing import TYPE_CHECKING, Self

from hicache_storage.transfer.regions.rows import rows_of
from hicache_storage.transfer.simulator.clocks import HOST, Clock
from hicache_storage.transfer.simulator.operations import Copy, Gather, Move, Place, Scatter, Wait
from hicache_storage.transfer.simulator.races import Access, Race, ShadowMemory, byte_runs
from hicache_storage.transfer.streams import Rows, StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType

    import torch

    from hicache_storage.transfer.regions.runs import RowRuns
    from hicache_storage.transfer.simulator.operations import StreamOperation
    from hicache_storage.transfer.streams import Event, Stream

PAUSE_SECONDS = 0.001
"""Default limit of the pauses between two pieces of a copy."""
MAX_WAIT_SECONDS = 120.0
"""Limit of a wait: what a test enqueues takes a small part of it."""
POISON = 0xA5
"""Value of every byte of new scratch memory, which exposes reads of unwritten memory."""


@dataclass(slots=True, eq=False)
class Hold:
    """Keeps copies into some memory from beginning, until it is released or its time is over."""

    runs: Sequence[tuple[int, int]]
    seconds: float
    expired: bool = False
    """True if the time limit has passed before the release."""
    _over: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let them begin."""
        self._over.set()

    def concerns(self, runs: Sequence[tuple[int, int]]) -> bool:
        """Return True if one of the ranges overlaps those held."""
        return any(
            start < other_end and other < end
            for start, end in self.runs
            for other, other_end in runs
        )

    def wait(self) -> None:
        """Block until it is over."""
        if not self._over.wait(self.seconds):
            self.expired = True
            self._over.set()


class StreamSimulator:
    """A device whose streams are threads on the CPU. To be closed, or used in a `with` statement.

    Copies take effect when they run, piece by piece with pauses drawn from the seed, so that an
    order that nothing enforces sooner or later shows in the bytes. The verdict does not wait for
    that: `races` has every two operations on the same bytes, one of them writing, that neither a
    stream's order nor an event nor a wait of the host puts in order. It depends on what was
    enqueued, in which order, and not on when it ran.

    The host is one actor: calls from several threads have to be ordered by the caller.

    Args:
        seed: of pauses and pieces.
        pause_seconds: the longest pause between two pieces of a copy.
        moves_rows: whether streams have `move_rows`, as on machines with Triton.
    """

    def __init__(
        self, seed: int | str = 0, *, pause_seconds: float = PAUSE_SECONDS, moves_rows: bool = True
    ) -> None:
        self.moves_rows = moves_rows
        self.races: list[Race] = []
        """Races found so far, in the order of enqueueing."""
        self._seed = seed
        self._pause_seconds = pause_seconds
        # Guards clocks, shadow memory and the lists: hosts enqueue from several threads, and the
        # streams' own threads look for holds.
        self._lock = threading.Lock()
        self._host = Clock()
        self._shadow = ShadowMemory()
        self._streams: list[SimulatedStream] = []
        self._holds: list[Hold] = []
        self._scratch_numbers = count()
        # Memory that was given back could come again as another tensor's, and its past would be
        # taken for that one's.
        self._kept = dict[int, "torch.Tensor"]()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def stream(self, name: str) -> SimulatedStream:
        with self._lock:
            actor = HOST + 1 + len(self._streams)
            stream = SimulatedStream(self, name, actor, Random(f"{self._seed}/{name}/{actor}"))
            self._streams.append(stream)
        return stream

    def event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        """Memory that holds `POISON`, and is kept as long as the simulator is."""
        import torch

        memory = torch.full((size,), POISON, dtype=torch.uint8)
        self.name(f"scratch {next(self._scratch_numbers)}", memory)
        with self._lock:
            self._kept[memory.untyped_storage().data_ptr()] = memory
        return memory

    def is_locked(self, memory: torch.Tensor) -> bool:
        """Return True: copies never run in the enqueueing thread."""
        return True

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        """The memory itself: there is only one."""
        return memory

    def name(self, name: str, tensor: torch.Tensor) -> None:
        """Say what messages call a contiguous tensor's memory."""
        for start, end in byte_runs(tensor):
            with self._lock:
                self._shadow.name(start, end, name)

    def host(
        self, what: str, *, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """Note that the host touches memory now.

        Itself, or through a call that returns before the host goes on.
        """
        with self._lock:
            access = Access(what, "host", HOST, self._host.tick(HOST), self._host.copy())
            self._note(access, reads, writes)

    def hold(self, tensors: Iterable[torch.Tensor], seconds: float) -> Hold:
        """Keep copies into these tensors that have not begun from beginning.

        For `seconds` at most.
        """
        hold = Hold([run for tensor in tensors for run in byte_runs(tensor)], seconds)
        with self._lock:
            self._holds.append(hold)
        return hold

    def writers(self, tensor: torch.Tensor) -> list[Access]:
        """The operations that wrote a tensor's bytes last, in the order of enqueueing."""
        with self._lock:
            return self._shadow.writers(byte_runs(tensor))

    def close(self) -> None:
        """Release all holds, run what is enqueued, and end the threads."""
        with self._lock:
            streams, holds = list(self._streams), list(self._holds)
        for hold in holds:
            hold.release()
        for stream in streams:
            stream.end()

    # What streams and events ask
    # ---------------------------------------------------------------------------------

    def copy(
        self, stream: SimulatedStream, destination: torch.Tensor, source: torch.Tensor, what: str
    ) -> None:
        """Enqueue a copy, and judge it."""
        run = partial(Copy, destination, source)
        self._enqueue(stream, what, run, reads=[source], writes=[destination])

    def copy_rows(
        self,
        stream: SimulatedStream,
        destination: torch.Tensor,
        source: torch.Tensor,
        rows: RowRuns,
        what: str,
    ) -> None:
        """Enqueue a copy of rows, and judge it."""
        run = partial(Move, destination, rows.destinations, source, rows.sources)
        reads, writes = rows_of(source, rows.sources), rows_of(destination, rows.destinations)
        self._enqueue(stream, what, run, reads=list(reads), writes=list(writes))

    def gather(
        self,
        stream: SimulatedStream,
        destination: torch.Tensor,
        source: torch.Tensor,
        rows: Rows,
        what: str,
    ) -> None:
        """Enqueue a gathering kernel, and judge it."""
        run = partial(Gather, destination, source, rows.device)
        self._enqueue(
            stream,
            what,
            run,
            reads=[rows.device, *rows_of(source, rows.host)],
            writes=[destination],
        )

    def scatter(
        self,
        stream: SimulatedStream,
        destination: torch.Tensor,
        rows: Rows,
        source: torch.Tensor,
        what: str,
    ) -> None:
        """Enqueue a scattering kernel, and judge it."""
        run = partial(Scatter, destination, rows.device, source)
        self._enqueue(
            stream,
            what,
            run,
            reads=[rows.device, source],
            writes=list(rows_of(destination, rows.host)),
        )

    def move_rows(
        self,
        stream: SimulatedStream,
        destination: torch.Tensor,
        destination_rows: Rows,
        source: torch.Tensor,
        source_rows: Rows,
        what: str,
    ) -> None:
        """Enqueue a kernel that copies rows, and judge it."""
        run = partial(Move, destination, destination_rows.device, source, source_rows.device)
        numbers = [destination_rows.device, source_rows.device]
        writes = list(rows_of(destination, destination_rows.host))
        self._enqueue(
            stream, what, run, reads=[*numbers, *rows_of(source, source_rows.host)], writes=writes
        )

    def record(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        """Let an event stand for what a stream holds."""
        with self._lock:
            # What the host has seen complete happened before everything that it enqueues from now
            # on.
            stream.clock.join(self._host)
            event.clock = stream.clock.copy()
            event.place = stream.enqueue(None)

    def order_behind(self, stream: SimulatedStream, event: SimulatedEvent) -> Place | None:
        """Note that a stream waits for an event; the place to wait for."""
        with self._lock:
            stream.clock.join(event.clock)
            return event.place

    def order_host_behind(self, event: SimulatedEvent) -> None:
        """Note that the host has seen an event complete."""
        with self._lock:
            self._host.join(event.clock)

    def _enqueue(
        self,
        stream: SimulatedStream,
        what: str,
        operation: Callable[[float, Callable[[], None]], StreamOperation],
        *,
        reads: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        # Made before the lock is taken, which it takes itself when it runs.
        admission = self._admission([run for tensor in writes for run in byte_runs(tensor)])
        with self._lock:
            stream.clock.join(self._host)
            time = stream.clock.tick(stream.actor)
            self._note(
                Access(what, f"stream {stream.name}", stream.actor, time, stream.clock.copy()),
                reads,
                writes,
            )
            # Under the same lock as the judgement: the queue has the order that was judged.
            stream.enqueue(operation(self._pause_seconds, admission))

    def _note(
        self, access: Access, reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]
    ) -> None:
        for tensor in reads:
            self._kept[tensor.untyped_storage().data_ptr()] = tensor
            self.races += self._shadow.read(access, byte_runs(tensor))
        for tensor in writes:
            self._kept[tensor.untyped_storage().data_ptr()] = tensor
            self.races += self._shadow.write(access, byte_runs(tensor))

    def _admission(self, runs: Sequence[tuple[int, int]]) -> Callable[[], None]:
        def wait() -> None:
            with self._lock:
                holds = [hold for hold in self._holds if hold.concerns(runs)]
            # Outside of the lock: other streams go on, and `release` must not have to wait.
            for hold in holds:
                hold.wait()

        return wait


class SimulatedStream:
    """A queue and the thread that runs it. Made by `StreamSimulator.stream`."""

    def __init__(self, simulator: StreamSimulator, name: str, actor: int, random: Random) -> None:
        self.name = name
        self.actor = actor
        self.clock = Clock()
        """Clock of the next operation; guarded by the simulator's lock."""
        self._simulator = simulator
        self._random = random
        self._queue = SimpleQueue[tuple["StreamOperation | None", Place]]()
        self._error: BaseException | None = None
        # A daemon: a test that fails half-way must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._serve, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, SimulatedEvent):
            raise TypeError(
                f"a simulated stream waits for simulated events, not for {type(event).__name__}"
            )
        place = self._simulator.order_behind(self, event)
        if place is not None:
            self.enqueue(Wait(place))

    def copy(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        self._simulator.copy(self, destination, source, what)

    def copy_rows(
        self, destination: torch.Tensor, source: torch.Tensor, rows: RowRuns, what: str
    ) -> None:
        self._simulator.copy_rows(self, destination, source, rows, what)

    def upload(self, rows: torch.Tensor) -> Rows:
        host = rows.clone()
        # What is read before it has come names no row.
        uploaded = Rows(host, host.new_full(host.shape, -1))
        self._simulator.copy(self, uploaded.device, host, "upload of row numbers")
        return uploaded

    def gather(
        self, destination: torch.Tensor, source: torch.Tensor, rows: Rows, what: str
    ) -> None:
        self._simulator.gather(self, destination, source, rows, what)

    def scatter(
        self, destination: torch.Tensor, rows: Rows, source: torch.Tensor, what: str
    ) -> None:
        self._simulator.scatter(self, destination, rows, source, what)

    def move_rows(
        self,
        destination: torch.Tensor,
        destination_rows: Rows,
        source: torch.Tensor,
        source_rows: Rows,
        what: str,
    ) -> None:
        self._simulator.move_rows(self, destination, destination_rows, source, source_rows, what)

    def synchronize(self) -> None:
        event = SimulatedEvent(self._simulator)
        event.record(self)
        event.synchronize()

    def enqueue(self, operation: StreamOperation | None) -> Place:
        """Run an operation behind all others, or none; the place behind it."""
        place = Place()
        self._queue.put((operation, place))
        return place

    def end(self) -> None:
        """Run what is enqueued, then end the thread."""
        self._queue.put((None, _END))
        self._thread.join(MAX_WAIT_SECONDS)

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
        """Clock at the position."""

    def record(self, stream: Stream) -> None:
        if not isinstance(stream, SimulatedStream):
            raise TypeError(
                "a simulated event is recorded on a simulated stream, not on "
                f"{type(stream).__name__}"
            )
        self._simulator.record(self, stream)

    def query(self) -> bool:
        if self.place is None:
            return True
        if not self.place.reached():
            return False
        # A query that has seen the event orders the host behind it, just as a wait does.
        self._passed(self.place)
        return True

    def synchronize(self) -> None:
        place = self.place
        if place is None:
            return
        if not place.wait(MAX_WAIT_SECONDS):
            raise StreamFailedError(f"an event was not reached within {MAX_WAIT_SECONDS:.0f} s")
        self._passed(place)

    def _passed(self, place: Place) -> None:
        if place.error is not None:
            raise StreamFailedError(f"an operation failed: {place.error!r}") from place.error
        self._simulator.order_host_behind(self)


_END = Place()
