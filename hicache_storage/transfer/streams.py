"""Streams and events as CUDA has them.

The same copies run on a GPU and on the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from hicache_storage.spec import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch

    from hicache_storage.pools.pages import Numbers

Priority = Literal["highest", "lowest"]
"""Which kernels' blocks go first where multiprocessors are short."""


class StreamFailedError(HiCacheError):
    """An operation on a stream failed; raised by the first call that waits for it.

    `__cause__` has the reason.
    """


class RowSide(NamedTuple):
    """Where a kernel reads or writes pages: memory of several parts, all of one geometry."""

    views: Sequence[torch.Tensor]
    """For each part a view (pages, rows per page, ...)."""
    row: int | None
    """Row of the uploaded page numbers that has this side's; None: 0, 1, 2, ..."""


class Completion(Protocol):
    """Something that ends: an event, or whatever else uses a page."""

    def query(self) -> bool:
        """Return True if it has ended; does not block.

        Raises:
            StreamFailedError: an operation before an event failed.
        """
        ...


class Event(Completion, Protocol):
    """A place in a stream: behind everything that it held when the event was recorded."""

    def synchronize(self) -> None:
        """Block the calling thread until that place has been reached.

        Raises:
            StreamFailedError: an operation before it failed.
        """
        ...


class Stream(Protocol):
    """A queue of operations that run one after the other.

    Two streams run at once unless events order them. Memory belongs to an operation until it has
    run; `what` describes it in messages.
    """

    def record(self) -> Event:
        """Record a new event behind everything enqueued so far."""
        ...

    def wait_event(self, event: Any) -> None:
        """Make later operations wait for an event of the same device; does not block."""
        ...

    def upload(self, table: Any, numbers: Numbers) -> None:
        """Enqueue a copy of page numbers to a `Device.page_table`.

        Args:
            numbers: (2, pages); they may be changed afterwards.
        """
        ...

    def copy_rows(self, rows: Any, parts: range, pages: range, what: str) -> None:
        """Enqueue a kernel that copies some pages of some parts.

        Args:
            rows: a `Device.row_copy`, whose table was uploaded on a stream that this one is behind.
            parts: adjacent ones of the two sides.
            pages: adjacent ones of the table. No destination may occur twice.
        """
        ...

    def copy_pieces(
        self, destinations: int, sources: int, count: int, size: int, what: str
    ) -> None:
        """Enqueue copies of contiguous pieces by DMA, between page-locked memory and the device.

        Args:
            destinations, sources: where `count` addresses (int64) lie, which may be changed
                afterwards.
            size: length of each piece in bytes.
        """
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything enqueued so far has run.

        Raises:
            StreamFailedError: one of the operations failed.
        """
        ...


class Device(Protocol):
    """Makes streams and memory of one device."""

    def current(self) -> AbstractContextManager[object]:
        """Make it the calling thread's current device, in which kernels are launched."""
        ...

    def stream(self, name: str, priority: Priority | None = None) -> Stream:
        """A new stream.

        Args:
            name: for messages.
            priority: of a stream of copies, which no graph captures; None for any other.
        """
        ...

    def scratch(self, size: int, streams: Sequence[Stream]) -> torch.Tensor:
        """New device memory of `size` bytes (uint8), holding anything.

        Args:
            streams: the only ones that use the memory. Its owner may drop it while they still do.

        Raises:
            InvalidPoolError: there is not that much memory.
        """
        ...

    def page_table(self, pages: int) -> object:
        """Room for the numbers of so many pages on both sides.

        It belongs to one stream: the next upload is enqueued behind the kernels that read the last.
        """
        ...

    def row_copy(self, destination: RowSide, source: RowSide, table: Any) -> object:
        """Prepare a kernel that copies pages.

        Args:
            destination, source: as many parts each, of rows of one shape and element type.
            table: has the page numbers.

        Raises:
            InvalidPoolError: the device cannot reach host memory that is not page-locked, or the
                pages have gaps along more than two axes, or are too long.
            ConfigError: the kernel cannot be compiled; the message names what is missing.
        """
        ...
