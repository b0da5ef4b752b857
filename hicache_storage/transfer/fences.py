"""Fences: events of the copies that still use a page."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import torch

    from hicache_storage.transfer.streams import Event, Stream

KEPT_EVENTS: Final = 256
"""Events that are kept; a page whose copy is older waits for the oldest of them."""


class PageFences:
    """For each page the last copy of one stream that uses it. Not thread-safe.

    Copies of one stream end in the order in which they were noted, so the last of some pages stands
    for all of them, and the stream's own copies need no fence. Pages are given by their numbers,
    int64 on the CPU, in a row for each of two pools, or one for the first; no call depends on how
    many they are but for a few vector operations.

    Args:
        pages: as many as the larger pool has.
    """

    def __init__(self, pages: int) -> None:
        import torch

        # Of each page the number of its copy, counted from 1 on.
        self._last = torch.zeros(2, pages, dtype=torch.int64)
        self._events = deque["Event"](maxlen=KEPT_EVENTS)
        self._count = 0

    def note(self, pages: torch.Tensor, until: Event) -> None:
        """Note a copy that uses some pages until an event."""
        # The former number may be overwritten: that copy is on the same stream and ends before.
        self._events.append(until)
        self._count += 1
        self._last.scatter_(1, pages, self._count)

    def wait(self, stream: Stream, pages: torch.Tensor) -> None:
        """Let another stream wait for the copies that use some pages."""
        # `gather`, `scatter_`: the fastest of torch's ways to find and mark numbered places.
        number = int(self._last.gather(1, pages).max())
        if number:
            stream.wait_event(self._events[max(number - self._count - 1, -len(self._events))])
