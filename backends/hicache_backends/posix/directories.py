"""Directories: creation, the file system below, and what the file server knows of them."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import os
import re
import struct
from dataclasses import dataclass, field
from typing import NamedTuple

logger = logging.getLogger(__name__)

_LOCAL = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs", "ramfs", "overlay"}
)
_MEMORY = frozenset({"tmpfs", "ramfs"})
_PREALLOCATES = frozenset({"ext4", "xfs"})

CACHING_DAEMONS = frozenset(
    {"fuse.sshfs", "fuse.rclone", "fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.curlftpfs"}
)
"""Kinds of mounts whose daemons answer from caches of their own, which no system call passes."""

_AT_EMPTY_PATH = 0x1000
_AT_STATX_FORCE_SYNC = 0x2000
_STATX_NLINK, _STATX_MTIME, _STATX_INO = 0x04, 0x40, 0x100
_STATX = struct.Struct("16xI12xQ72xqI")
_STATX_BYTES = 256

_STATX_REFUSED = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})
"""By an old kernel, or a seccomp filter. glibc makes EINVAL of ENOSYS."""

_statx = ctypes.CDLL(None, use_errno=True).statx


def check_path(path: str) -> None:
    """Refuse a path that begins with `~`, which only a shell expands.

    Raises:
        ValueError: it does.
    """
    if path.startswith("~"):
        raise ValueError(
            f"path {path!r} begins with '~', which only a shell expands; write the whole path"
        )


def make_last(path: str) -> None:
    """Make a directory in an existing one.

    Raises:
        FileNotFoundError: its parent does not exist: it may be on a file system that is not
            mounted.
        OSError: it cannot be made.
    """
    above = os.path.dirname(path)
    if not os.path.isdir(above):
        raise FileNotFoundError(
            f"there is no directory {above!r}: mount what belongs there, or make it"
        )
    with contextlib.suppress(FileExistsError):
        os.mkdir(path)


def sync_directory(path: str) -> None:
    """Make the names in a directory survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class Mount:
    """The file system of a path."""

    kind: str
    """The kernel's name for it, empty if unknown."""
    is_local: bool = field(init=False)
    """An unknown one may be across a network."""
    is_memory: bool = field(init=False)
    """No device is below it that could stall."""
    favours_direct_reads: bool = field(init=False)
    """Reading past the page cache is faster.

    FUSE reads 1 MiB a request so, and 128 KiB through the cache, which it drops at every open.
    """
    preallocates: bool = field(init=False)
    """`fallocate` is a system call there, and worth it.

    glibc emulates it elsewhere by writing a byte into every block.
    """

    def __post_init__(self) -> None:
        self.is_local = self.kind in _LOCAL
        self.is_memory = self.kind in _MEMORY
        self.favours_direct_reads = self.kind.startswith("fuse")
        self.preallocates = self.kind in _PREALLOCATES


def mount_of(path: str) -> Mount:
    """The file system that a path lies on, or would lie on."""
    real = os.path.realpath(path)
    best, kind = -1, ""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                mount, _, source = line.partition(" - ")
                point = _unescape(mount.split()[4])
                # The last of equally long ones is mounted on top.
                if len(point) >= best and _is_below(real, point):
                    best, kind = len(point), source.split(maxsplit=1)[0]
    except (OSError, IndexError):
        return Mount("")
    return Mount(kind)


def _is_below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _unescape(text: str) -> str:
    # The kernel writes white space and backslashes of a path in octal.
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


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

    NFS, FUSE and CIFS heed AT_STATX_FORCE_SYNC. Where the call is refused, the cache answers.
    """
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    mask = _STATX_NLINK | _STATX_MTIME | _STATX_INO
    if not _statx(descriptor, b"", _AT_EMPTY_PATH | _AT_STATX_FORCE_SYNC, mask, buffer):
        links, inode, seconds, nanoseconds = _STATX.unpack_from(buffer)
        return Attributes(links, inode, seconds * 1_000_000_000 + nanoseconds)
    error = ctypes.get_errno()
    if error not in _STATX_REFUSED:
        raise OSError(error, os.strerror(error))
    _warn_of_refusal(error)
    return cached_attributes(descriptor)


@functools.cache
def _warn_of_refusal(error: int) -> None:
    logger.warning(
        "statx is refused here (%s), as by a container's seccomp profile: what other nodes change "
        "is noticed once the mount's cached attributes have expired",
        os.strerror(error),
    )


def list_directory(path: str, *, asks_server: bool) -> list[str]:
    """Names of the files in a directory; empty if it is missing.

    A network mount lists from its cache while its cached attributes are valid, so these are
    refreshed first. There a name may also be that of a directory: a request for each would tell.
    """
    with contextlib.suppress(FileNotFoundError):
        if asks_server:
            return _fresh_names(path)
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
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
