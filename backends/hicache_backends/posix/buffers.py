"""Buffers of the driver's own, for reads that may hang, and what goes through one at a time."""

from __future__ import annotations

import errno
import mmap
import sys
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator

    from hicache_storage.objects import Call

ItemT = TypeVar("ItemT")

MAX_BUFFERS = 32
"""Limit on hanging reads of one storage, that of the deadline layer."""

LOOK_SECONDS = 0.1
"""Seconds between checks of the lent buffers while a call waits for one."""


class Buffers:
    """A bounded number of buffers, allocated on demand and used again. Safe for many threads.

    A read that hangs keeps its buffer until it returns, also after its caller has left.

    Args:
        size: bytes of each; they begin on a page, as O_DIRECT requires.
        limit: buffers at a time.
        on_new: called with each new buffer, once.
        allocate: makes a buffer of so many bytes.
    """

    def __init__(
        self,
        size: int,
        limit: int = MAX_BUFFERS,
        on_new: Callable[[memoryview], None] = lambda buffer: None,
        allocate: Callable[[int], memoryview] = lambda size: memoryview(mmap.mmap(-1, size)),
    ) -> None:
        self.size = size
        self._allocate = allocate
        self._on_new = on_new
        self._limit = limit
        self._changed = threading.Condition()
        self._spare: list[memoryview] = []
        self._lent: dict[int, Call] = {}
        self._retired: set[int] = set()

    @contextmanager
    def lend(self, call: Call) -> Generator[memoryview]:
        """Lend a buffer for one read of a call.

        Raises:
            OSError: the deadline has passed, or every buffer is in use by a read that hangs.
        """
        buffer, is_new = self._take(call)
        try:
            if is_new:
                self._on_new(buffer)
            yield buffer
        finally:
            self._put_back(buffer)

    def retire(self, buffer: memoryview) -> None:
        """Never lend a lent buffer again: an abandoned request may still use it."""
        with self._changed:
            self._retired.add(id(buffer))

    def stuck(self) -> int:
        """Number of reads that have not returned after their callers left."""
        with self._changed:
            return sum(call.expired() for call in self._lent.values())

    def _take(self, call: Call) -> tuple[memoryview, bool]:
        with self._changed:
            while True:
                if call.expired():
                    raise OSError(errno.ETIMEDOUT, "the deadline has passed")
                if self._spare or len(self._lent) < self._limit:
                    is_new = not self._spare
                    buffer = self._allocate(self.size) if is_new else self._spare.pop()
                    # By identity: a writable memoryview has no hash.
                    self._lent[id(buffer)] = call
                    return buffer, is_new
                if self.stuck() == self._limit:
                    raise OSError(
                        errno.EBUSY,
                        f"{self._limit} requests hang; no more are begun until some come back",
                    )
                # With a time limit, because a deadline that passes notifies nobody.
                self._changed.wait(LOOK_SECONDS)

    def _put_back(self, buffer: memoryview) -> None:
        with self._changed:
            del self._lent[id(buffer)]
            if id(buffer) in self._retired:
                self._retired.remove(id(buffer))
            else:
                self._spare.append(buffer)
            self._changed.notify()


def split(
    items: Iterable[ItemT],
    size_of: Callable[[ItemT], int],
    max_bytes: int,
    max_items: int = sys.maxsize,
) -> Iterator[list[ItemT]]:
    """Split objects into lists of at most so many bytes and objects, or of one object."""
    some, size = list[ItemT](), 0
    for item in items:
        length = size_of(item)
        if some and (len(some) == max_items or size + length > max_bytes):
            yield some
            some, size = [], 0
        some.append(item)
        size += length
    if some:
        yield some
