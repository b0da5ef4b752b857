"""Complete preadv and pwritev, and reads from the page cache that never wait."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Move = Callable[[int, Sequence[memoryview], int], int]

_CACHESTAT = 451
"""The number of the system call on all machines, since Linux 6.5."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)

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
    """Copy a page into buffers, one after the other, with room for all of it."""
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
        # The system moves less at the end of a file, at its limit of 2 GiB, and after a signal.
        while moved < wanted:
            step = move(descriptor, _after(some, moved), offset)
            if not step:
                return False
            moved += step
            offset += step
    return True


def _after(buffers: Sequence[memoryview], moved: int) -> list[memoryview]:
    """The rest of buffers whose first `moved` bytes are done."""
    left = list[memoryview]()
    for buffer in buffers:
        if moved < len(buffer):
            left.append(buffer[moved:])
        moved = max(0, moved - len(buffer))
    return left


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Statistics(ctypes.Structure):
    _fields_ = (
        ("cached", ctypes.c_uint64),
        ("dirty", ctypes.c_uint64),
        ("writeback", ctypes.c_uint64),
        ("evicted", ctypes.c_uint64),
        ("recently_evicted", ctypes.c_uint64),
    )


def is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Return whether a range of a file is entirely in the page cache.

    `False` if the kernel has no `cachestat`.
    """
    asked, found = _Range(offset, length), _Statistics()
    if _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(asked), ctypes.byref(found), 0):
        return False
    last = (offset + length - 1) // _PAGE_BYTES
    return bool(found.cached > last - offset // _PAGE_BYTES)


def read_cached_into(descriptor: int, buffers: Sequence[memoryview], offset: int) -> bool | None:
    """Fill buffers as `read_into` does, without waiting for the disk.

    Only for a range that `is_cached`, and a file that was opened with O_NOATIME. RWF_NOWAIT alone
    may wait: the kernel begins to read ahead for pages that are missing, which blocks where the
    queue of a stalled disk is full, and sets the file's time of access, which blocks where the
    journal is stalled.

    Returns:
        None where some bytes are not in the page cache.

    Raises:
        OSError: reading failed; some buffers may have been filled.
    """
    try:
        return read_into(descriptor, buffers, offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return None
        raise
