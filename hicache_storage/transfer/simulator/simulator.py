"""Stream simulator: streams and events on the CPU, with a race detector."""

from __future__ import annotations

import ctypes
import threading
import time
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue
from random import Random
from typing import TYPE_CHECKING, Final, Self, cast

from hicache_storage.transfer.plan import geometry
from hicache_storage.transfer.simulator.races import (
    HOST,
    Access,
    Clock,
    Race,
    ShadowMemory,
    byte_runs,
)
from hicache_storage.transfer.streams import StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from hicache_storage.transfer.streams import (
        Event,
        PageTable,
        Priority,
        RowCopy,
        RowSide,
        Stream,
    )

    Runs = Sequence[tuple[int, int]]
    """Ranges of addresses."""
    Piece = Callable[[int, int], object]
    """Does the given one of so many shares of an operation."""

PAUSE_SECONDS: Final = 0.001
"""Default limit of the pauses between two pieces of an operation."""
MAX_WAIT_SECONDS: Final = 120.0
"""Limit of a wait: what a test enqueues takes a small part of it."""
MAX_PIECES: Final = 4
POISON: Final = 0xA5
"""Value of every byte of new scratch memory, which exposes reads of unwritten memory."""


@dataclass(slots=True, eq=False)
class Hold:
    """Keeps operations that write some memory from beginning, until released or out of time."""

    runs: Runs
    seconds: float
    expired: bool = False
    """True if the time limit has passed before the release."""
    _over: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let them begin."""
        self._over.set()

    def concerns(self, runs: Runs) -> bool:
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


class SimulatedTable:
    """Page numbers: as the host gave them, and as kernels find them."""

    def __init__(self, pages: int) -> None:
        import torch

        self.host: tuple[torch.Tensor, ...] = ()
        # What is read before it has come names no page.
        self.device = [torch.full((pages,), -1) for _ in range(2)]


class SimulatedRows:
    """A prepared kernel: the views that it writes and reads, and where their page numbers are."""

    def __init__(self, sides: tuple[RowSide, RowSide]) -> None:
        import torch

        for views in zip(*(side.views for side in sides), strict=True):
            # Refuses what the kernel does not know.
            geometry(*views)
        self.columns = [side.column for side in sides]
        # As bytes: torch indexes those of every element type.
        self.views = [[view.view(torch.uint8) for view in side.views] for side in sides]

    def pages(self, side: int, numbers: Sequence[torch.Tensor], pages: range) -> torch.Tensor:
        """The page numbers of one side."""
        column = self.columns[side]
        if column is None:
            return numbers[0].new_tensor(range(len(pages)))
        return numbers[column][pages.start : pages.stop]

    def runs(self, side: int, parts: range, pages: torch.Tensor) -> list[tuple[int, int]]:
        """The bytes of some pages of some parts."""
        runs = list[tuple[int, int]]()
        for view in self.views[side][parts.start : parts.stop]:
            page, pitch = byte_runs(view[0]), view.stride(0)
            for number in sorted(set(cast("list[int]", pages.tolist()))):
                if not 0 <= number < len(view):
                    raise IndexError(f"page {number} of {len(view)}")
                for start, end in page:
                    run = start + number * pitch, end + number * pitch
                    if runs and runs[-1][1] == run[0]:
                        run = runs.pop()[0], run[1]
                    runs.append(run)
        return runs


class StreamSimulator:
    """A device whose streams are threads on the CPU. To be closed, or used in a `with` statement.

    Operations take effect when they run, piece by piece with pauses drawn from the seed, so that an
    order that nothing enforces sooner or later shows in the bytes. The verdict does not wait for
    that: `races` has every two operations on the same bytes, one of them writing, that neither a
    stream's order nor an event nor a wait of the host puts in order. It depends on what was
    enqueued, in which order, and not on when it ran.

    The host is one actor: calls from several threads have to be ordered by the caller.

    Args:
        seed: of pauses and pieces.
        pause_seconds: the longest pause between two pieces of an operation.
    """

    def __init__(self, seed: int | str = 0, *, pause_seconds: float = PAUSE_SECONDS) -> None:
        self.races: list[Race] = []
        """Races found so far, in the order of enqueueing."""
        self._seed = seed
        self._pause_seconds = pause_seconds
        # Guards clocks, shadow memory and the lists: hosts enqueue from several threads, and the
        # streams' own threads look for holds.
        # Reentrant: the garbage collector may settle another engine's copies anywhere.
        self._lock = threading.RLock()
        self._host = Clock()
        self._shadow = ShadowMemory()
        self._streams: list[SimulatedStream] = []
        self._holds: list[Hold] = []
        self._numbers = count()
        # Memory that was given back could come again as another tensor's, and its past would be
        # taken for that one's.
        self._kept = dict[int, "torch.Tensor"]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def stream(self, name: str, priority: Priority | None = None) -> SimulatedStream:
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
        self.name(f"scratch {next(self._numbers)}", memory)
        self._keep([memory])
        return memory

    def page_table(self, pages: int) -> SimulatedTable:
        return SimulatedTable(pages)

    def row_copy(self, destination: RowSide, source: RowSide, blocks: int) -> SimulatedRows:
        # Also of copies by DMA, which know addresses only.
        self._keep([*destination.views, *source.views])
        return SimulatedRows((destination, source))

    def name(self, name: str, tensor: torch.Tensor) -> None:
        """Say what messages call a contiguous tensor's memory."""
        with self._lock:
            for start, end in byte_runs(tensor):
                self._shadow.name(start, end, name)

    def host(
        self, what: str, *, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """Note that the host touches memory now, by itself or through a call that returns first."""
        reads, writes = list(reads), list(writes)
        self._keep([*reads, *writes])
        with self._lock:
            access = Access(what, "host", HOST, self._host.tick(HOST), self._host.copy())
            self._note(access, _runs(reads), _runs(writes))

    def hold(self, tensors: Iterable[torch.Tensor], seconds: float) -> Hold:
        """Keep operations that write these tensors from beginning, for `seconds` at most."""
        hold = Hold(_runs(tensors), seconds)
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
        """Enqueue a copy between tensors, and judge it."""
        self._keep([destination, source])
        axis = max(range(destination.dim()), key=lambda axis: destination.shape[axis], default=0)

        def run(share: int, shares: int) -> None:
            to, origin = (each.tensor_split(shares, axis) for each in (destination, source))
            to[share].copy_(origin[share])

        self.enqueue(stream, what, run, byte_runs(source), byte_runs(destination))

    def enqueue(
        self, stream: SimulatedStream, what: str, piece: Piece, reads: Runs, writes: Runs
    ) -> None:
        """Enqueue an operation, and judge it by the bytes that it reads and writes."""

        def run(random: Random) -> None:
            with self._lock:
                holds = [hold for hold in self._holds if hold.concerns(writes)]
            # Outside of the lock: other streams go on, and `release` must not have to wait.
            for hold in holds:
                hold.wait()
            shares = random.randint(1, MAX_PIECES)
            for share in range(shares):
                # Half of the pauses are none, so that streams also overtake each other by much.
                if random.random() < 0.5:
                    time.sleep(random.random() * self._pause_seconds)
                piece(share, shares)

        with self._lock:
            stream.clock.join(self._host)
            step, where = stream.clock.tick(stream.actor), f"stream {stream.name}"
            access = Access(what, where, stream.actor, step, stream.clock.copy())
            self._note(access, reads, writes)
            # Under the same lock as the judgement: the queue has the order that was judged.
            stream.put(run)

    def record(self, event: SimulatedEvent, stream: SimulatedStream) -> None:
        """Let an event stand for what a stream holds."""
        with self._lock:
            # What the host has seen complete happened before everything that it enqueues from now
            # on.
            stream.clock.join(self._host)
            event.clock = stream.clock.copy()
            event.place = stream.put(None)

    def order_behind(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Let a stream wait for an event."""
        with self._lock:
            stream.clock.join(event.clock)
            place = event.place
        if place is not None:
            stream.put(lambda random: place.reached.wait())

    def order_host_behind(self, event: SimulatedEvent) -> None:
        """Note that the host has seen an event complete."""
        with self._lock:
            self._host.join(event.clock)

    def _note(self, access: Access, reads: Runs, writes: Runs) -> None:
        self.races += self._shadow.access(access, reads, writes=False)
        self.races += self._shadow.access(access, writes, writes=True)

    def _keep(self, tensors: Sequence[torch.Tensor]) -> None:
        with self._lock:
            self._kept.update((each.untyped_storage().data_ptr(), each) for each in tensors)


class _Place:
    """Position of a recorded event in a stream. `error` is the failure of an earlier operation."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.error: BaseException | None = None


class SimulatedStream:
    """A queue and the thread that runs it. Made by `StreamSimulator.stream`."""

    def __init__(self, simulator: StreamSimulator, name: str, actor: int, random: Random) -> None:
        self.name = name
        self.actor = actor
        self.clock = Clock()
        """Clock of the next operation; guarded by the simulator's lock."""
        self._simulator = simulator
        self._random = random
        self._queue = SimpleQueue[tuple["Callable[[Random], object] | None", _Place] | None]()
        self._error: BaseException | None = None
        self._has_ended = False
        # A daemon: a test that fails half-way must not keep the interpreter from exiting.
        self._thread = threading.Thread(target=self._serve, name=f"stream-{name}", daemon=True)
        self._thread.start()

    def wait_event(self, event: Event) -> None:
        if not isinstance(event, SimulatedEvent):
            raise TypeError(
                f"a simulated stream waits for simulated events, not for {type(event).__name__}"
            )
        self._simulator.order_behind(self, event)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        self._simulator.copy(self, destination, source, what)

    def upload(self, table: PageTable, columns: tuple[torch.Tensor, torch.Tensor]) -> None:
        table = cast("SimulatedTable", table)
        table.host = tuple(numbers.clone() for numbers in columns)
        for to, numbers in zip(table.device, table.host, strict=True):
            self._simulator.copy(self, to[: len(numbers)], numbers, "upload of page numbers")

    def copy_rows(
        self, rows: RowCopy, table: PageTable, parts: range, pages: range, what: str
    ) -> None:
        rows, table = cast("SimulatedRows", rows), cast("SimulatedTable", table)
        writes, reads = (
            rows.runs(side, parts, rows.pages(side, table.host, pages)) for side in (0, 1)
        )
        for column in {*rows.columns} - {None}:
            reads += byte_runs(table.device[cast("int", column)][pages.start : pages.stop])

        def run(share: int, shares: int) -> None:
            # Not before it runs: until then the numbers may not have come.
            to, origin = (rows.pages(side, table.device, pages) for side in (0, 1))
            to, origin = to.tensor_split(shares)[share], origin.tensor_split(shares)[share]
            for part in parts:
                rows.views[0][part][to] = rows.views[1][part][origin]

        self._simulator.enqueue(self, what, run, reads, writes)

    def copy_pieces(
        self, destinations: torch.Tensor, sources: torch.Tensor, sizes: torch.Tensor, what: str
    ) -> None:
        count = min(destinations.numel(), sources.numel())
        to, origin, length = (
            cast("list[int]", each.reshape(-1)[:count].tolist())
            for each in (destinations, sources, sizes)
        )

        def run(share: int, shares: int) -> None:
            for start, first, size in zip(to, origin, length, strict=True):
                begin, end = size * share // shares, size * (share + 1) // shares
                ctypes.memmove(start + begin, first + begin, end - begin)

        reads, writes = (
            [(start, start + size) for start, size in zip(starts, length, strict=True)]
            for starts in (origin, to)
        )
        self._simulator.enqueue(self, what, run, reads, writes)

    def synchronize(self) -> None:
        event = SimulatedEvent(self._simulator)
        event.record(self)
        event.synchronize()

    def put(self, operation: Callable[[Random], object] | None) -> _Place:
        """Run an operation behind all others, or none; the place behind it."""
        place = _Place()
        if operation is None and self._has_ended:
            # Everything has run.
            place.reached.set()
        self._queue.put((operation, place))
        return place

    def end(self) -> None:
        """Run what is enqueued, then end the thread."""
        self._has_ended = True
        self._queue.put(None)
        self._thread.join(MAX_WAIT_SECONDS)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            operation, place = item
            # As on a GPU, a stream that has failed runs nothing more.
            if operation is not None and self._error is None:
                try:
                    operation(self._random)
                except BaseException as error:  # noqa: BLE001 - raised in the thread that waits for it
                    self._error = error
            place.error = self._error
            place.reached.set()


class SimulatedEvent:
    """A place in a simulated stream. Made by `StreamSimulator.event`."""

    def __init__(self, simulator: StreamSimulator) -> None:
        self._simulator = simulator
        self.place: _Place | None = None
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
        place = self.place
        if place is not None and not place.reached.is_set():
            return False
        # A query that has seen the event orders the host behind it, just as a wait does.
        self.synchronize()
        return True

    def synchronize(self) -> None:
        place = self.place
        if place is None:
            return
        if not place.reached.wait(MAX_WAIT_SECONDS):
            raise StreamFailedError(f"an event was not reached within {MAX_WAIT_SECONDS:.0f} s")
        if place.error is not None:
            raise StreamFailedError(f"an operation failed: {place.error!r}") from place.error
        self._simulator.order_host_behind(self)


def _runs(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    return [run for tensor in tensors for run in byte_runs(tensor)]
