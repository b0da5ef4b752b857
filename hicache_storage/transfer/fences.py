"""Fences: events of the copies that still use a page."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    import torch

    from hicache_storage.transfer.streams import Event, Stream

SWEEP_EVENTS: Final = 256
"""With so many events, those that no page has any more are forgotten."""


class PageFences:
    """Fences of a pool: for each page the last copy that reads it, and that writes it.

    Not thread-safe.

    All copies that read a page are on one stream, and all that write it on one, so that the last
    stands for all. Pages are given by their numbers, int64 on the CPU; what a call costs hardly
    depends on how many they are.

    Args:
        pages: how many the pool has.
    """

    def __init__(self, pages: int) -> None:
        import torch

        # Events by number, and the numbers by page; 0 is none.
        self._events: dict[int, Event] = {}
        self._numbers = count(1)
        self._sweep_at = SWEEP_EVENTS
        self._reads = torch.zeros(pages, dtype=torch.int64)
        self._writes = torch.zeros(pages, dtype=torch.int64)

    def before_read(self, stream: Stream, pages: torch.Tensor) -> None:
        """Let a stream wait for the copies that write the pages."""
        # Not for reads: two copies may read a page at the same time.
        self._wait(stream, self._writes[pages])

    def before_write(self, stream: Stream, pages: torch.Tensor) -> None:
        """Let a stream wait for the copies that read or write the pages."""
        self._wait(stream, self._reads[pages])
        self._wait(stream, self._writes[pages])

    def reads(self, pages: torch.Tensor, until: Event) -> None:
        """Note a copy that reads the pages."""
        # The former number may be overwritten: that copy is on the same stream and ends before this
        # one.
        self._reads[pages] = self._number(until)

    def writes(self, pages: torch.Tensor, until: Event) -> None:
        """Note a copy that writes the pages."""
        self._writes[pages] = self._number(until)

    def _wait(self, stream: Stream, numbers: torch.Tensor) -> None:
        for number in _distinct(numbers):
            stream.wait_event(self._events[number])

    def _number(self, event: Event) -> int:
        if len(self._events) >= self._sweep_at:
            self._sweep()
        number = next(self._numbers)
        self._events[number] = event
        return number

    def _sweep(self) -> None:
        used = {*_distinct(self._reads), *_distinct(self._writes)}
        self._events = {number: self._events[number] for number in used}
        # Where every page was copied alone, all are in use, and a sweep for each copy would find
        # nothing.
        self._sweep_at = max(SWEEP_EVENTS, 2 * len(used))


def _distinct(numbers: torch.Tensor) -> list[int]:
    """The numbers other than 0, each once, ascending."""
    ordered = numbers.sort().values
    first = ordered.diff(prepend=ordered.new_zeros(1)) != 0
    return cast("list[int]", ordered[first].tolist())
