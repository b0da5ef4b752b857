"""Fences: events of the copies that still use a page."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from hicache_storage.transfer.streams import Event, Stream

KEPT_EVENTS: Final = 256
"""Events of each stream that are kept; a page whose copy is older waits for the oldest of them."""


class _Copies:
    """Copies of one stream, which end in the order of their numbers: the last of each page."""

    def __init__(self, pages: int) -> None:
        import torch

        # 0 is none.
        self._last = torch.zeros(pages, dtype=torch.int64)
        self._events = deque["Event"](maxlen=KEPT_EVENTS)
        self._count = 0

    def note(self, pages: torch.Tensor, until: Event) -> None:
        # The former number may be overwritten: that copy is on the same stream and ends before.
        self._events.append(until)
        self._count += 1
        self._last.index_fill_(0, pages, self._count)

    def wait(self, stream: Stream, pages: torch.Tensor) -> None:
        """Let a stream wait for the last copy of some pages, and so for all before it."""
        # `gather`, `scatter_`: the fastest of torch's ways to find or mark numbered places.
        number = int(self._last.gather(0, pages).max())
        if number:
            stream.wait_event(self._events[max(number - self._count - 1, -len(self._events))])


class PageFences:
    """Fences of a pool: for each page the last copy that reads it, and that writes it.

    Not thread-safe. All copies that read a page are on one stream, and all that write it on one:
    the last of some pages stands for all of them. Pages are given by their numbers, int64 on the
    CPU; no call depends on how many they are but for a few vector operations.

    Args:
        pages: how many the pool has.
    """

    def __init__(self, pages: int) -> None:
        import torch

        self._reads = _Copies(pages)
        self._writes = _Copies(pages)
        self._marks = torch.zeros(pages, dtype=torch.int64)
        self._numbers = torch.arange(pages)

    def has_repeated(self, pages: torch.Tensor) -> bool:
        """Return True if a page occurs twice."""
        if len(pages) > len(self._numbers):
            return True
        # Of two marks on a page one remains.
        numbers = self._numbers[: len(pages)]
        self._marks.scatter_(0, pages, numbers)
        return not self._marks.gather(0, pages).equal(numbers)

    def before_read(self, stream: Stream, pages: torch.Tensor) -> None:
        """Let a stream wait for the copies that write the pages."""
        # Not for reads: two copies may read a page at the same time.
        self._writes.wait(stream, pages)

    def before_write(self, stream: Stream, pages: torch.Tensor) -> None:
        """Let a stream wait for the copies that read or write the pages."""
        self._reads.wait(stream, pages)
        self._writes.wait(stream, pages)

    def reads(self, pages: torch.Tensor, until: Event) -> None:
        """Note a copy that reads the pages."""
        self._reads.note(pages, until)

    def writes(self, pages: torch.Tensor, until: Event) -> None:
        """Note a copy that writes the pages."""
        self._writes.note(pages, until)
