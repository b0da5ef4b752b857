"""Memory of the driver's own that reads go through where they may hang (`hung_reads=bounce_buffer`)."""

from __future__ import annotations

import errno
import mmap
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage.objects import Call

MAX_BUFFERS = 32
"""Reads that may hang at a time in one storage: no more than the deadline layer lets hang."""

LOOK_SECONDS = 0.1
"""How often who waits for a buffer looks whether those who have them are still waited for."""

_forsaken: Final = list[memoryview]()
"""Kept mapped for as long as the process lives."""


class Buffers:
    """A bounded number of buffers, made when first needed and used again. Safe for many threads.

    A read that hangs keeps its buffer until it comes back, whoever has given it up.

    Args:
        size: bytes of each; they begin on a page, as O_DIRECT wants it.
        limit: most buffers at a time.
    """

    def __init__(self, size: int, limit: int = MAX_BUFFERS) -> None:
        self._size, self._limit = size, limit
        self._changed = threading.Condition()
        self._spare: list[memoryview] = []
        self._lent: dict[int, Call] = {}
        self._forsaken: set[int] = set()

    @contextmanager
    def lend(self, call: Call) -> Generator[memoryview]:
        """A buffer for one read of a call.

        Raises:
            OSError: the deadline has passed, or every buffer is with a read that hangs.
        """
        buffer = self._take(call)
        try:
            yield buffer
        finally:
            self._put_back(buffer)

    def forsake(self, buffer: memoryview) -> None:
        """Never lend a lent buffer again: a read that has been given up may still write to it."""
        with self._changed:
            self._forsaken.add(id(buffer))

    def stuck(self) -> int:
        """Reads that have not come back, though nobody waits for them any more."""
        with self._changed:
            return self._count_stuck()

    def _take(self, call: Call) -> memoryview:
        with self._changed:
            while True:
                if call.expired():
                    raise OSError(errno.ETIMEDOUT, "the deadline has passed")
                if self._spare or len(self._lent) < self._limit:
                    buffer = self._spare.pop() if self._spare else memoryview(mmap.mmap(-1, self._size))
                    self._lent[id(buffer)] = call
                    return buffer
                if self._count_stuck() == self._limit:
                    raise OSError(errno.EBUSY, f"{self._limit} reads hang; no more are begun until some come back")
                self._changed.wait(LOOK_SECONDS)

    def _put_back(self, buffer: memoryview) -> None:
        with self._changed:
            del self._lent[id(buffer)]
            if id(buffer) in self._forsaken:
                self._forsaken.remove(id(buffer))
                _forsaken.append(buffer)
            else:
                self._spare.append(buffer)
            self._changed.notify()

    def _count_stuck(self) -> int:
        return sum(call.expired() for call in self._lent.values())
