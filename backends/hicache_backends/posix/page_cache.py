"""Reads from the page cache that never wait for the disk."""

from __future__ import annotations

import ctypes
import errno
import os
from typing import TYPE_CHECKING

from hicache_backends.posix.vectored import read_into

if TYPE_CHECKING:
    from collections.abc import Sequence

_CACHESTAT = 451
"""The number of the system call on all machines, since Linux 6.5."""

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)


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
    """Whether all pages of a range of a file are in the page cache; `False` where the kernel does not tell."""
    asked, found = _Range(offset, length), _Statistics()
    if _libc.syscall(_CACHESTAT, descriptor, ctypes.byref(asked), ctypes.byref(found), 0):
        return False
    last = (offset + length - 1) // _PAGE_BYTES
    return bool(found.cached > last - offset // _PAGE_BYTES)


def read_cached_into(descriptor: int, buffers: Sequence[memoryview], offset: int) -> bool | None:
    """Fill buffers as `read_into` does, without waiting for the disk; None where some bytes are not in the page cache.

    Only for a range that `is_cached`, and a file that was opened with O_NOATIME. RWF_NOWAIT alone may wait: the kernel begins
    to read ahead for pages that are missing, which blocks where the queue of a stalled disk is full, and sets the file's
    time of access, which blocks where the journal is stalled.

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
