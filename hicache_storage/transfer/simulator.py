"""Stream simulator: streams and events on the CPU, with a race detector."""

from __future__ import annotations

import ctypes
import threading
from bisect import bisect_left
from collections import deque
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from hicache_storage.transfer.plan import geometry
from hicache_storage.transfer.streams import StreamFailedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hicache_storage.pools.pages import Numbers
    from hicache_storage.transfer.streams import Priority, RowSide, Stream

    Runs = Sequence[tuple[int, int]]
    """Ranges of addresses."""

HOST: Final = 0
"""The actor that enqueues and waits: calls of several threads are ordered by the caller."""
Clock = dict[int, int]
"""A vector clock: the last known step of each actor."""
QUERY_STEPS: Final = (0, 1, 10, 1000)
"""How many operations run during a query: drawn, so that streams overtake each other."""


# Race detector: conflicting accesses to memory without an order
# ---------------------------------------------------------------------------------


def join(clock: Clock, other: Clock) -> None:
    """Let a clock know what `other` knows, too."""
    for actor, time in other.items():
        clock[actor] = max(time, clock.get(actor, 0))


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """One operation, as the detector sees it."""

    what: str
    """Description given by the code that enqueued it."""
    where: str
    """Name of its stream, or `host`."""
    actor: int
    clock: Clock
    """Vector clock of the access, itself included."""
    writes: bool

    def __str__(self) -> str:
        deed = "writes" if self.writes else "reads"
        return f"{self.what!r} ({self.where}) {deed}"


@dataclass(slots=True)
class _Cell:
    """The last write of a range of bytes, and the last read by each actor since."""

    write: Access | None = None
    reads: dict[int, Access] = field(default_factory=dict[int, Access])


class ShadowMemory:
    """The last accesses to each byte. Not thread-safe.

    All addresses are covered by cells; a cell is split where an access begins or ends within it.
    """

    def __init__(self) -> None:
        self._starts = [0]
        self._cells = [_Cell()]

    def access(self, access: Access, runs: Runs) -> list[str]:
        """Note an access to ranges of addresses.

        Returns the races that this makes, one for each other operation.
        """
        found = dict[Access, str]()
        for run in runs:
            for cell in self._between(*run):
                for other in (*(cell.reads.values() if access.writes else ()), cell.write):
                    # Neither a stream's order, nor an event, nor the host orders them.
                    if other and access.clock.get(other.actor, 0) < other.clock[other.actor]:
                        told = f"{access} memory that {other}, and nothing orders it behind that"
                        found[other] = told
                if access.writes:
                    # What follows this write follows the accesses before it as well, or their race
                    # has been found.
                    cell.write = access
                    cell.reads.clear()
                else:
                    # The last read of an actor stands for its earlier ones.
                    cell.reads[access.actor] = access
        return list(found.values())

    def _between(self, start: int, end: int) -> list[_Cell]:
        for address in (start, end):
            at = bisect_left(self._starts, address)
            if at == len(self._starts) or self._starts[at] != address:
                former = self._cells[at - 1]
                self._starts.insert(at, address)
                self._cells.insert(at, _Cell(former.write, dict(former.reads)))
        return self._cells[bisect_left(self._starts, start) : bisect_left(self._starts, end)]


# Streams
# ---------------------------------------------------------------------------------


class StreamSimulator:
    """A device whose streams run on the CPU, in the thread that waits for them.

    Operations take effect while the host waits or asks: a wait runs what it has to and nothing
    else, a question some that are drawn from the seed, so that an order that nothing enforces
    sooner or later shows in the bytes. The verdict does not wait for that: `races` has every two
    operations on the same bytes, one of them writing, that neither a stream's order nor an event
    nor a wait of the host puts in order. It depends on what was enqueued, in which order, and not
    on when it ran.

    The host is one actor: calls from several threads have to be ordered by the caller.

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int | str = 0) -> None:
        self.races: list[str] = []
        """Races found so far, in the order of enqueueing: two operations on the same bytes, one of
        which writes, and nothing orders them."""
        self.is_held = False
        """Set to keep copies in flight: nothing runs but what the host waits for."""
        # Reentrant: the garbage collector may settle another engine's copies anywhere.
        self.lock = threading.RLock()
        self.clock: Clock = {HOST: 0}
        """The host's."""
        self._random = Random(seed)
        self._shadow = ShadowMemory()
        self._streams: list[SimulatedStream] = []
        self._kept = dict[int, "torch.Tensor"]()

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def stream(self, name: str, priority: Priority | None = None) -> SimulatedStream:
        with self.lock:
            stream = SimulatedStream(self, name, HOST + 1 + len(self._streams))
            self._streams.append(stream)
        return stream

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        # No zeros: they would hide reads of unwritten memory.
        memory = torch.full((size,), 0xA5, dtype=torch.uint8)
        self.keep([memory])
        return memory

    def page_table(self, pages: int) -> torch.Tensor:
        return torch.empty(2, pages, dtype=torch.int64)

    def row_copy(
        self, destination: RowSide, source: RowSide, table: torch.Tensor
    ) -> tuple[RowSide, RowSide, torch.Tensor]:
        # Also of copies by DMA, which know addresses only.
        self.keep([*destination.views, *source.views])
        for views in zip(destination.views, source.views, strict=True):
            # Refuses what the kernel does not know.
            geometry(*views)
        return destination, source, table

    def host(
        self, what: str, *, reads: Iterable[torch.Tensor] = (), writes: Iterable[torch.Tensor] = ()
    ) -> None:
        """Note that the host touches memory now, by itself or through a call that returns first."""
        reads, writes = list(reads), list(writes)
        self.keep([*reads, *writes])
        with self.lock:
            self.note(what, "host", HOST, self.clock, byte_runs(*reads), byte_runs(*writes))

    def close(self) -> None:
        """Run what is enqueued."""
        for stream in self._streams:
            self.run_until(stream.record())

    # For streams and events
    # ---------------------------------------------------------------------------------

    def note(
        self, what: str, where: str, actor: int, clock: Clock, reads: Runs, writes: Runs
    ) -> None:
        """Judge an operation of an actor that was enqueued just now."""
        clock[actor] += 1
        for runs, is_write in ((reads, False), (writes, True)):
            access = Access(what, where, actor, dict(clock), is_write)
            self.races += self._shadow.access(access, runs)

    def keep(self, tensors: Iterable[torch.Tensor]) -> None:
        """Keep memory as long as the simulator is."""
        # Memory that was given back could come again as another tensor's, and its past would be
        # taken for that one's.
        with self.lock:
            self._kept.update((each.untyped_storage().data_ptr(), each) for each in tensors)

    def run_some(self) -> None:
        """Run a few operations, as a GPU does while the host does something else."""
        with self.lock:
            for _ in range(0 if self.is_held else self._random.choice(QUERY_STEPS)):
                ready = [each for each in self._streams if each.queue and not each.blocked_by()]
                if not ready:
                    break
                self._random.choice(ready).run_next()

    def run_until(self, event: SimulatedEvent) -> None:
        """Run what an event is behind."""
        with self.lock:
            while not event.is_reached():
                stream = event.stream
                while behind := stream.blocked_by():
                    stream = behind.stream
                stream.run_next()


class SimulatedStream:
    """A queue of operations. Made by `StreamSimulator.stream`, whose lock guards it."""

    def __init__(self, simulator: StreamSimulator, name: str, actor: int) -> None:
        self.name = name
        self.queue = deque["Callable[[], object] | SimulatedEvent"]()
        """Operations, and events that the next ones wait for."""
        self.ran = 0
        self.error: BaseException | None = None
        self.failed_at = 0
        """Number of the operation that failed."""
        self.clock: Clock = {actor: 0}
        """What the next operation follows."""
        self._actor = actor
        self.simulator = simulator

    def blocked_by(self) -> SimulatedEvent | None:
        """The event that the first operation waits for."""
        first = self.queue[0]
        return first if isinstance(first, SimulatedEvent) and not first.is_reached() else None

    def record(self) -> SimulatedEvent:
        with self.simulator.lock:
            # What the host has seen complete happened before everything that it enqueues from now
            # on.
            join(self.clock, self.simulator.clock)
            return SimulatedEvent(self, self.ran + len(self.queue), dict(self.clock))

    def wait_event(self, event: SimulatedEvent) -> None:
        with self.simulator.lock:
            join(self.clock, event.clock)
            self.queue.append(event)

    def copy(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        """Enqueue a copy between tensors of one shape, as a model's kernel."""
        self.simulator.keep([destination, source])
        reads, writes = byte_runs(source), byte_runs(destination)
        self._enqueue(what, lambda: destination.copy_(source), reads, writes)

    def upload(self, table: torch.Tensor, numbers: Numbers) -> None:
        to = table[:, : numbers.shape[1]]
        # At once: the next kernel's addresses depend on them.
        to.numpy()[:] = numbers
        self._enqueue("upload of page numbers", int, [], byte_runs(to))

    def copy_rows(
        self, rows: tuple[RowSide, RowSide, torch.Tensor], parts: range, pages: range, what: str
    ) -> None:
        *sides, table = rows
        uploaded = table[:, pages.start : pages.stop]
        numbers: list[list[int]] = [*uploaded.tolist(), [*range(len(pages))]]
        to, origin = (numbers[-1 if side.row is None else side.row] for side in sides)

        def run() -> None:
            for part in parts:
                # As bytes: torch indexes those of every element type.
                written, read = (side.views[part].view(torch.uint8) for side in sides)
                written[to] = read[origin]

        writes, reads = (
            byte_runs(*(side.views[part][page] for part in parts for page in set(used)))
            for side, used in zip(sides, (to, origin), strict=True)
        )
        self._enqueue(what, run, [*reads, *byte_runs(uploaded)], writes)

    def copy_pieces(
        self, destinations: int, sources: int, count: int, size: int, what: str
    ) -> None:
        to, origin = (
            (ctypes.c_int64 * count).from_address(each)[:] for each in (destinations, sources)
        )

        def run() -> None:
            for start, first in zip(to, origin, strict=True):
                ctypes.memmove(start, first, size)

        reads, writes = ([(start, start + size) for start in starts] for starts in (origin, to))
        self._enqueue(what, run, reads, writes)

    def synchronize(self) -> None:
        self.record().synchronize()

    def run_next(self) -> None:
        """Run the first operation."""
        operation = self.queue.popleft()
        try:
            # As on a GPU, a stream that has failed runs nothing more.
            if self.error is None and not isinstance(operation, SimulatedEvent):
                operation()
        except Exception as error:  # noqa: BLE001 - raised in the thread that waits for it
            self.error = error
            self.failed_at = self.ran + 1
        self.ran += 1

    def _enqueue(self, what: str, run: Callable[[], object], reads: Runs, writes: Runs) -> None:
        simulator = self.simulator
        with simulator.lock:
            self.queue.append(run)
            join(self.clock, simulator.clock)
            where = f"stream {self.name}"
            simulator.note(what, where, self._actor, self.clock, reads, writes)


class SimulatedEvent(NamedTuple):
    """A place in a simulated stream: behind so many of its operations."""

    stream: SimulatedStream
    number: int
    clock: Clock
    """What has happened there."""

    def is_reached(self) -> bool:
        return self.stream.ran >= self.number

    def query(self) -> bool:
        self.stream.simulator.run_some()
        if not self.is_reached():
            return False
        # A query that has seen the event orders the host behind it, just as a wait does.
        self.synchronize()
        return True

    def synchronize(self) -> None:
        stream, simulator = self.stream, self.stream.simulator
        simulator.run_until(self)
        if stream.error is not None and self.number >= stream.failed_at:
            raise StreamFailedError(f"an operation failed: {stream.error!r}") from stream.error
        with simulator.lock:
            join(simulator.clock, self.clock)


def byte_runs(*tensors: torch.Tensor) -> list[tuple[int, int]]:
    """The ranges of addresses that the elements of tensors fill, adjacent ones of each joined."""
    runs = list[tuple[int, int]]()
    for tensor in tensors:
        size = length = tensor.element_size()
        starts = [tensor.data_ptr()] if tensor.numel() else []
        # From the innermost axis outwards: an axis that continues the run makes it longer, any
        # other repeats it.
        for stride, count in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
            if stride * size == length:
                length *= count
            elif count > 1:
                starts = [start + step * stride * size for start in starts for step in range(count)]
        runs += [(start, start + length) for start in sorted(starts)]
    return runs
