"""Streams and events as CUDA has them, so that the same copies run on a GPU and on the simulator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from hicache_storage.spec import HiCacheError

if TYPE_CHECKING:
    import torch


class StreamFailedError(HiCacheError):
    """An operation on a stream failed; raised by the first call that waits for it. `__cause__` has the reason."""

    code = "stream-failed"


class Event(Protocol):
    """A place in a stream.

    It stands for what the stream held when it was last recorded. One that was never recorded is complete: waiting for
    it waits for nothing.
    """

    def record(self, stream: Stream) -> None:
        """Stand for everything enqueued on `stream` so far; those who wait already go on waiting for the former place."""
        ...

    def query(self) -> bool:
        """Whether that place has been reached; does not block.

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
    """A queue of operations that run one after the other; two streams run at once unless events order them."""

    def wait_event(self, event: Event) -> None:
        """Let what is enqueued from now on wait for the place that `event` stands for now. Does not block the caller."""
        ...

    def copy(self, destination: torch.Tensor, source: torch.Tensor, what: str) -> None:
        """Enqueue a copy between tensors of one shape. Both belong to the copy until it has run.

        Args:
            destination, source: on any device; pinned where in host memory, or CUDA makes the caller wait.
            what: what it is, for messages.
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

    def stream(self, name: str) -> Stream:
        """A new stream; the name is for messages."""
        ...

    def event(self) -> Event:
        """A new event, not recorded."""
        ...


def recorded(device: Device, stream: Stream) -> Event:
    """A new event that stands for everything enqueued on `stream` so far."""
    event = device.event()
    event.record(stream)
    return event
