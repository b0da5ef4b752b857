"""Page-locked memory that row numbers are uploaded from.

Used again instead of being locked for each transfer.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from hicache_storage.transfer.streams import Event, Stream

MIN_ROWS: Final = 4096
"""Length of the shortest buffer."""
PREPARED_UPLOADS: Final = 4
"""Buffers that a stream has from the beginning on.

For two transfers in flight with two uploads each.
"""
MAX_PREPARED_ROWS: Final = 1 << 16
"""Length of the longest of those."""


class UploadBuffers:
    """Buffers of one stream in the order of their use.

    Locking memory may wait for the device, so there are no new ones as long as the oldest is free.

    Args:
        allocate: makes page-locked int64 memory of so many rows.
        event: makes an event, not recorded.
    """

    def __init__(self, allocate: Callable[[int], torch.Tensor], event: Callable[[], Event]) -> None:
        self._allocate = allocate
        self._event = event
        self._used = deque[tuple["torch.Tensor", "Event"]]()

    def take(self, rows: int) -> tuple[torch.Tensor, Event]:
        """A buffer of so many rows, and the event to be recorded behind the upload from it."""
        buffer, uploaded = self._oldest(rows)
        self._used.append((buffer, uploaded))
        return buffer[:rows], uploaded

    def _oldest(self, rows: int) -> tuple[torch.Tensor, Event]:
        if self._used and self._used[0][1].query():
            buffer, uploaded = self._used.popleft()
            # A buffer that is too short is dropped, so that longer ones take its place.
            if len(buffer) >= rows:
                return buffer, uploaded
        # A power of two: later transfers of about that length find it long enough.
        return self._allocate(max(MIN_ROWS, 1 << (rows - 1).bit_length())), self._event()


def prepare_uploads(stream: Stream, rows: int) -> None:
    """Let a stream take the memory for uploads now, when nothing waits for it yet."""
    import torch

    # All of them are kept until the last is enqueued, so that none gets the device memory of
    # another.
    _ = [
        stream.upload(torch.zeros(min(rows, MAX_PREPARED_ROWS), dtype=torch.int64))
        for _ in range(PREPARED_UPLOADS)
    ]
