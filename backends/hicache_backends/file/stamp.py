"""One number that is new after every change of the store: whoever finds it unchanged has missed nothing.

The number is the mtime of an empty directory, set to random bits. A directory's own mtime, kept by the file system,
would not do: two changes within one tick of its clock (4 ms on ext4, whole seconds elsewhere) look like one, and some
file systems do not keep it at all.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from hicache_backends.file.attributes import cached_attributes, server_attributes
from hicache_backends.posix.descriptors import Handle

if TYPE_CHECKING:
    from hicache_backends.file.attributes import Attributes

REVALIDATION_SECONDS = 2.0
"""How long a file system that was mounted over the old one can go unnoticed."""


class Stamp:
    """The stamp of one store. Safe for many threads and processes.

    Args:
        path: the directory; it exists when the stamp is read.
        asks_server: ask the file server each time, past the attribute cache of a network mount (one request).
    """

    def __init__(self, path: str, *, asks_server: bool) -> None:
        self._path = path
        self._attributes = server_attributes if asks_server else cached_attributes
        self._handle: Handle | None = None
        self._opened = 0.0

    def read(self) -> Attributes:
        """The stamp's value: equal to an earlier one if nothing has changed.

        Raises:
            OSError: the store is away; `FileNotFoundError` where it has been deleted.
        """
        handle, now = self._handle, time.monotonic()
        if handle is None or now - self._opened > REVALIDATION_SECONDS:
            handle = self._open(now)
        try:
            found = self._attributes(handle.descriptor)
        except OSError:
            self._handle = None
            raise
        return found if found.links else self._attributes(self._open(now).descriptor)

    def read_cached(self) -> Attributes | None:
        """Read the value without I/O; None where that is not possible. Only on a local file system, whose inodes are in memory."""
        handle = self._handle
        if handle is None or time.monotonic() - self._opened > REVALIDATION_SECONDS:
            return None
        found = self._attributes(handle.descriptor)
        return found if found.links else None

    def renew(self, value: int | None = None) -> None:
        """Give the stamp a new value; what changed is in place and visible.

        Args:
            value: one that `new_value` has drawn; another one if not given.

        Raises:
            OSError: it could not be set; others may not notice the change.
        """
        if value is None:
            value = new_value()
        try:
            os.utime(self._path, ns=(value, value))
        except PermissionError:
            self._replace(value)

    def close(self) -> None:
        """Let go of the descriptor. The stamp can be used again."""
        self._handle = None

    def _open(self, now: float) -> Handle:
        # O_PATH costs no request on a FUSE mount whose directory entries are cached.
        handle = Handle(os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._handle, self._opened = handle, now
        return handle

    def _replace(self, value: int) -> None:
        # Only the owner may set the times of a directory; of one that takes its place, whoever makes it.
        fresh = f"{self._path}.{os.urandom(8).hex()}"
        os.mkdir(fresh)
        try:
            os.utime(fresh, ns=(value, value))
            os.rename(fresh, self._path)
        except OSError:
            os.rmdir(fresh)
            raise


def new_value() -> int:
    """A value for the stamp: a time in nanoseconds since 1970, at random."""
    # Between 1978 and 2038, so that every file system can keep it; 31 bits remain where it keeps whole seconds.
    bits = int.from_bytes(os.urandom(8), "little")
    return ((1 << 28) + bits % ((1 << 31) - (1 << 28))) * 1_000_000_000 + (bits >> 34) % 1_000_000_000


def tag_of(value: int) -> int:
    """24 bits of a value that every file system keeps; never 0."""
    return value // 1_000_000_000 & 0xFFFFFF | 1
