"""Attributes and listings of directories as the file server knows them.

The attribute cache of a network mount is passed by.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
from typing import NamedTuple

_AT_EMPTY_PATH = 0x1000
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_NLINK, _STATX_MTIME, _STATX_INO = 0x04, 0x40, 0x100
_STATX = struct.Struct("16xI12xQ72xqI")
_STATX_BYTES = 256

# Missing in glibc before 2.28.
_statx = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)


class Attributes(NamedTuple):
    """The attributes of a directory that the driver uses."""

    links: int
    """0 once it has been removed."""
    inode: int
    mtime_ns: int


def cached_attributes(descriptor: int) -> Attributes:
    """The attributes that the kernel has; exact on a local file system."""
    status = os.fstat(descriptor)
    return Attributes(status.st_nlink, status.st_ino, status.st_mtime_ns)


def server_attributes(descriptor: int) -> Attributes:
    """Ask the server for the attributes, in one request.

    NFS, FUSE and CIFS heed AT_STATX_FORCE_SYNC.
    """
    if _statx is None:
        return cached_attributes(descriptor)
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    mask = _STATX_NLINK | _STATX_MTIME | _STATX_INO
    if _statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC, mask, buffer):
        error = ctypes.get_errno()
        if error == errno.ENOSYS:
            return cached_attributes(descriptor)
        raise OSError(error, os.strerror(error))
    links, inode, seconds, nanoseconds = _STATX.unpack_from(buffer)
    return Attributes(links, inode, seconds * 1_000_000_000 + nanoseconds)


def list_directory(path: str, *, asks_server: bool) -> list[str]:
    """Names in a directory; empty if it is missing.

    A network mount lists from its cache while its cached attributes are valid, so these are
    refreshed first.
    """
    with contextlib.suppress(FileNotFoundError):
        return _fresh_names(path) if asks_server else os.listdir(path)
    if asks_server:
        # NFS caches that a name was missing while the cached attributes of its parent are valid.
        for above in (os.path.dirname(os.path.dirname(path)), os.path.dirname(path)):
            with contextlib.suppress(OSError):
                _refresh(above)
        with contextlib.suppress(FileNotFoundError):
            return _fresh_names(path)
    return []


def _fresh_names(path: str) -> list[str]:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server_attributes(descriptor)
        return os.listdir(descriptor)
    finally:
        os.close(descriptor)


def _refresh(path: str) -> None:
    descriptor = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        server_attributes(descriptor)
    finally:
        os.close(descriptor)
