"""Streams and events as CUDA has them.

The same copies run on a GPU and on the simulator.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hicache_storage.spec import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.transfer.regions.runs import RowRuns


class StreamFailedError(HiCacheError):
    """An operation on a stream failed; raised by the first call that waits for it.

    `__cause__` has the reason.
    """

    code = "stream-failed"


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a tensor that a kernel gathers or scatters: indices of its first axis."""

    host: torch.Tensor
    """int64 on the CPU; not to be changed."""
    device: torch.Tensor
    """The same where kernels read it, once the stream that it was uploaded on has come there."""

    def part(self, start: int, count: int) -> Rows:
        """So many of them from one on."""
        return Rows(self.host[start : start + count], self.device[start : start + count])


class Event(Protocol):
    """A place in a stream.

    It stands for what the stream held when it was last recorded. One that was never recorded is
    complete: waiting for it waits for nothing.
    """

    def record(self, stream: Stream) -> None:
        """Record everything enqueued on `stream` so far.

        Earlier waits keep waiting for the former position.
        """
        ...

    def query(self) -> bool:
        """Return True if the event has been reached; does not block.

        Raises:
            StreamFailedError: an operation before it failed.
        """
        ...

    def synchronize(self) -> None:
        """Block the calling thread until that place has been reached.

        Raises:
            StreamFailedError: an operation before it failed.
        """
        ...


class Stream(Protocol):
    """A queue of operations that run one after the other.

    Two streams run at once unless events order them.
    """

    def wait_event(self, event: Event) -> None:
        """Make later operations wait for the position that `event` has recorded.

        Does not block the caller.
        """
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        """Enqueue a copy between tensors of one shape. Both belong to the copy until it has run.

        Args:
            destination, source: on any device; pinned where in host memory, or CUDA makes the
                caller wait.
            what: description of the copy, for messages.
        """
        ...

    def copy_rows(
        self, destination: torch.Tensor, source: torch.Tensor, rows: RowRuns, what: str
    ) -> None:
        """Enqueue a copy of rows between device and host.

        What that costs hardly depends on how many they are.

        Args:
            destination, source: rows of one shape and element type along their first axes; the rows
                that are copied belong to the copy until it has run. Pinned where in host memory, or
                CUDA makes the caller wait.
            rows: which go where.
            what: description of the copy, for messages.
        """
        ...

    def upload(self, rows: torch.Tensor) -> Rows:
        """Enqueue a copy of row numbers to the device, for kernels on this stream.

        Args:
            rows: int64 on the CPU; the caller may change it afterwards.
        """
        ...

    def gather(
        self, destination: torch.Tensor, source: torch.Tensor, rows: Rows, what: str
    ) -> None:
        """Enqueue a kernel that does `destination[i] = source[rows[i]]` for each i.

        Args:
            destination, source: on the device; both belong to the kernel until it has run.
            rows: as many as the destination has; uploaded on this stream.
            what: what it is, for messages.
        """
        ...

    def scatter(
        self, destination: torch.Tensor, rows: Rows, source: torch.Tensor, what: str
    ) -> None:
        """Enqueue a kernel that does `destination[rows[i]] = source[i]` for each i.

        No row may occur twice.
        """
        ...

    def move_rows(
        self,
        destination: torch.Tensor,
        destination_rows: Rows,
        source: torch.Tensor,
        source_rows: Rows,
        what: str,
    ) -> None:
        """Enqueue a kernel that moves rows, no destination twice.

        It does `destination[destination_rows[i]] = source[source_rows[i]]`.

        Only where the device says `moves_rows`.
        """
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything enqueued so far has run.

        Raises:
            StreamFailedError: one of the operations failed.
        """
        ...


class Device(Protocol):
    """Makes streams and events of one device."""

    @property
    def moves_rows(self) -> bool:
        """True if the streams have `move_rows`.

        That is a kernel that copies rows without intermediate memory.
        """
        ...

    def stream(self, name: str) -> Stream:
        """A new stream; the name is for messages."""
        ...

    def event(self) -> Event:
        """A new event, not recorded."""
        ...

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        """New device memory of `size` bytes (uint8), holding anything.

        Args:
            streams: the only ones that use the memory. Its owner may drop it while they still do.

        Raises:
            InvalidPoolError: there is not that much memory.
        """
        ...

    def is_locked(self, memory: torch.Tensor) -> bool:
        """Return True if copies from and to this memory are asynchronous."""
        ...

    def mapped(self, memory: torch.Tensor) -> torch.Tensor:
        """Host memory as kernels of the device see it.

        A tensor of the same bytes, shape and element type.

        Args:
            memory: contiguous and page-locked; kept alive by what is returned.

        Raises:
            InvalidPoolError: kernels cannot reach it.
        """
        ...


def recorded(device: Device, stream: Stream) -> Event:
    """Record a new event behind everything enqueued on `stream` so far."""
    event = device.event()
    event.record(stream)
    return event
