"""Which copies still use a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.transfer.streams import Event, Stream


class PageFences:
    """For each page of a pool the last copy that reads it and the last that writes it.

    All copies that read a page are on one stream, and all that write it on one, so that the last stands for all.
    """

    def __init__(self) -> None:
        self._reads: dict[int, Event] = {}
        self._writes: dict[int, Event] = {}

    def before_read(self, stream: Stream, pages: Iterable[int]) -> None:
        """Let a stream wait for the copies that write the pages."""
        _wait(stream, (self._writes.get(page) for page in pages))

    def before_write(self, stream: Stream, pages: Iterable[int]) -> None:
        """Let a stream wait for the copies that read or write the pages."""
        _wait(stream, (events.get(page) for page in pages for events in (self._reads, self._writes)))

    def reads(self, pages: Iterable[int], until: Event) -> None:
        """Note a copy that reads the pages."""
        self._reads.update(dict.fromkeys(pages, until))

    def writes(self, pages: Iterable[int], until: Event) -> None:
        """Note a copy that writes the pages."""
        self._writes.update(dict.fromkeys(pages, until))


def _wait(stream: Stream, events: Iterable[Event | None]) -> None:
    for event in dict.fromkeys(events):
        if event is not None:
            stream.wait_event(event)
