"""preadv and pwritev that go on until everything has been moved."""

from __future__ import annotations

import errno
import os
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Move = Callable[[int, Sequence[memoryview], int], int]

MAX_BUFFERS = 1024
"""IOV_MAX on Linux."""


def read_into(descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> bool:
    """Fill buffers with consecutive bytes of a file; `False` where it ends before.

    Args:
        flags: of `os.preadv`.

    Raises:
        OSError: reading failed; some buffers may have been filled.
    """
    move = partial(_read_with, flags) if flags else os.preadv
    return _move_all(move, descriptor, buffers, offset)


def write_from(descriptor: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers one after the other.

    Raises:
        OSError: writing failed, or the file system takes no more bytes.
    """
    if not _move_all(os.pwritev, descriptor, buffers, offset):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def scatter(page: memoryview, targets: Sequence[memoryview]) -> None:
    """Copy the bytes of a page into buffers, one after the other, which have room for all of them."""
    start = 0
    for target in targets:
        target[:] = page[start : start + len(target)]
        start += len(target)


def _read_with(flags: int, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
    return os.preadv(descriptor, buffers, offset, flags)


def _move_all(move: Move, descriptor: int, buffers: Sequence[memoryview], offset: int) -> bool:
    for start in range(0, len(buffers), MAX_BUFFERS):
        some = buffers[start : start + MAX_BUFFERS] if len(buffers) > MAX_BUFFERS else buffers
        wanted = sum(map(len, some))
        moved = move(descriptor, some, offset)
        offset += moved
        while moved < wanted:
            step = move(descriptor, _after(some, moved), offset)
            if not step:
                return False
            moved += step
            offset += step
    return True


def _after(buffers: Sequence[memoryview], moved: int) -> list[memoryview]:
    """What is left of buffers whose first `moved` bytes are done."""
    left = list[memoryview]()
    for buffer in buffers:
        if moved < len(buffer):
            left.append(buffer[moved:])
        moved = max(0, moved - len(buffer))
    return left
