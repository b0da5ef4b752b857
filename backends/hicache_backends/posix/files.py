"""Open files: a bounded cache of descriptors, and complete reads and writes."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
import threading
import time
from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.posix.faults import NO_DESCRIPTOR

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Move = Callable[[int, Sequence[memoryview], int], int]

IDLE_SECONDS = 10.0
"""Seconds after which an unused file is closed: it occupies the room of an evicted bundle."""

_OPENAT2 = 437
_CACHESTAT = 451
"""Numbers of the system calls on all machines, since Linux 5.6 and 6.5."""

_OPEN_HOW = struct.Struct("=QQQ")
"""Flags, mode, how to look up the path."""
_RANGE = struct.Struct("=QQ")
_CACHE_STATISTICS = struct.Struct("=5Q")
"""Pages: cached, dirty, in writeback, evicted, lately evicted."""

_RESOLVE_CACHED = 0x20
"""The open fails where looking up the path would need I/O; since Linux 5.12."""

_AT_FDCWD = -100

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

_libc = ctypes.CDLL(None, use_errno=True)

MAX_BUFFERS = 1024
"""IOV_MAX on Linux."""


class Handle:
    """An open file; closed with the last reference to it, so never while a thread uses it."""

    __slots__ = ("descriptor", "flags", "used")

    def __init__(self, descriptor: int, flags: int = 0) -> None:
        self.descriptor = descriptor
        self.flags = flags
        self.used = 0.0

    def __del__(self) -> None:
        # The close fails on a dead mount; the descriptor is free all the same.
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


class Descriptors:
    """The most recently used files, kept open. Safe for many threads.

    Files are closed outside the lock: on a stalled disk, closing a file that has been removed waits
    for the journal.

    Args:
        limit: unused files kept open.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, int], Handle] = OrderedDict()
        self._flags = set[int]()
        """All that files were ever opened with."""

    def borrow(self, path: str, flags: int = 0) -> Handle:
        """The file of that path, open for reading as long as the handle is referenced.

        Raises:
            OSError: it cannot be opened.
        """
        handle = self._borrow_open(path, flags)
        if handle is not None:
            return handle
        # Outside the lock: opening takes a request or more on a network mount.
        opened = Handle(self.open(path, os.O_RDONLY | flags), flags)
        closing = list[Handle]()
        with self._lock:
            handle = self._keep(path, opened)
            if len(self._open) > self._limit:
                closing.append(self._open.popitem(last=False)[1])
        return handle

    def borrow_cached(self, path: str, flags: int = 0) -> Handle | None:
        """The file of that path if it is open already, or if the kernel opens it from memory; never
        waits for the file system."""
        handle = self._borrow_open(path, flags)
        # Beyond the limit another file would have to be closed, and closing may wait.
        if handle is None and len(self._open) < self._limit:
            descriptor = _open_cached(path, flags)
            if descriptor is not None:
                opened = Handle(descriptor, flags)
                with self._lock:
                    handle = self._keep(path, opened)
        return handle

    def _borrow_open(self, path: str, flags: int) -> Handle | None:
        with self._lock:
            handle = self._open.get((path, flags))
            if handle is not None:
                handle.used = time.monotonic()
                self._open.move_to_end((path, flags))
        return handle

    def _keep(self, path: str, opened: Handle) -> Handle:
        """Keep a file that was just opened, or return the handle of a thread that was faster; the
        lock is held."""
        opened.used = time.monotonic()
        self._flags.add(opened.flags)
        return self._open.setdefault((path, opened.flags), opened)

    def open(self, path: str, flags: int) -> int:
        """Open a file that is not kept; kept ones are closed if the process is out of descriptors.

        Raises:
            OSError: it cannot be opened.
        """
        try:
            return os.open(path, flags | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in NO_DESCRIPTOR:
                raise
            # Those of the files that are kept here may be what is missing.
            self.close()
            return os.open(path, flags | os.O_CLOEXEC, 0o666)

    def forget(self, path: str) -> None:
        """Close a file that is gone or about to be removed."""
        with self._lock:
            closing = [self._open.pop((path, flags), None) for flags in self._flags]
        del closing

    def expire(self) -> None:
        """Close files that have not been used for a while."""
        before = time.monotonic() - IDLE_SECONDS
        closing = list[Handle]()
        with self._lock:
            while self._open and next(iter(self._open.values())).used < before:
                closing.append(self._open.popitem(last=False)[1])

    def close(self) -> None:
        """Close all files that are not in use. They are opened again on demand."""
        with self._lock:
            closing = self._open
            self._open = OrderedDict()
        del closing


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


def file_bytes(path: str) -> int:
    """Length of a regular file; 0 for anything else."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return status.st_size if stat.S_ISREG(status.st_mode) else 0
    return 0


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


def _open_cached(path: str, flags: int) -> int | None:
    """Open a file for reading if the kernel has its path in memory.

    None for any other reason too: the ordinary open meets it again, where it may wait.
    """
    how = _OPEN_HOW.pack(os.O_RDONLY | os.O_CLOEXEC | flags, 0, _RESOLVE_CACHED)
    size = ctypes.c_size_t(_OPEN_HOW.size)
    descriptor = _libc.syscall(_OPENAT2, _AT_FDCWD, os.fsencode(path), how, size)
    return None if descriptor < 0 else int(descriptor)


def is_cached(descriptor: int, offset: int, length: int) -> bool:
    """Return whether a range of a file is entirely in the page cache.

    `False` if the kernel has no `cachestat`.
    """
    found = ctypes.create_string_buffer(_CACHE_STATISTICS.size)
    if _libc.syscall(_CACHESTAT, descriptor, _RANGE.pack(offset, length), found, 0):
        return False
    cached: int = _CACHE_STATISTICS.unpack_from(found)[0]
    return cached > (offset + length - 1) // _PAGE_BYTES - offset // _PAGE_BYTES


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
