"""Temporary files: what is being written, and what those who were killed have left."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import TYPE_CHECKING

from hicache_backends.file.attributes import list_directory
from hicache_backends.file.names import TemporaryName, parse_temporary
from hicache_backends.file.owner import is_dead, this_process

if TYPE_CHECKING:
    from hicache_backends.file.clock import Clock
    from hicache_backends.file.tree import Tree
    from hicache_backends.posix.descriptors import Descriptors


class Drafts:
    """The temporary files of one store. Safe for many threads.

    Args:
        abandoned_seconds: a temporary file of another machine, of which nobody here can tell whether its writer lives, is
            collected so long after its last byte was written. A writer that is slower fails to publish, and nothing worse.
    """

    def __init__(
        self, tree: Tree, writer: str, descriptors: Descriptors, clock: Clock, *, asks_server: bool, abandoned_seconds: float
    ) -> None:
        self._clock = clock
        self._tree, self._writer, self._asks_server = tree, writer, asks_server
        self._descriptors, self._abandoned_seconds = descriptors, abandoned_seconds
        self._owner = this_process()
        self._numbers = itertools.count()

    def name(self, size: int) -> TemporaryName:
        """A new name for a file of at most `size` bytes."""
        return TemporaryName(self._owner, self._writer, next(self._numbers), size)

    def create(self, name: TemporaryName) -> int:
        """Make a file; from now on its length counts as used. The descriptor is the caller's.

        Raises:
            OSError: it cannot be made.
        """
        path, flags = self._tree.temporary(name), os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            return self._descriptors.open(path, flags)
        except FileNotFoundError:
            self._tree.create()
            return self._descriptors.open(path, flags)

    def ask_time(self) -> int:
        """What the file server's clock says, in nanoseconds since 1970: it gives new files their times.

        Raises:
            OSError: no file can be made.
        """
        name = self.name(0)
        descriptor = self.create(name)
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)
            self.discard(name)

    def discard(self, name: TemporaryName) -> None:
        """Remove a file that will not be published; what cannot be removed now is collected later."""
        with contextlib.suppress(OSError):
            os.unlink(self._tree.temporary(name))

    def collect(self) -> tuple[int, int]:
        """Remove what killed writers have left.

        Returns:
            Bytes that the files of the living take or may come to take, and how many files have been removed.

        Raises:
            OSError: the files could not be listed.
        """
        reserved = collected = 0
        for text in list_directory(self._tree.temporaries, asks_server=self._asks_server):
            name = parse_temporary(text)
            if name is None:
                continue
            if self._is_leftover(name) and self._remove(name):
                collected += 1
            else:
                reserved += name.size
        return reserved, collected

    def _is_leftover(self, name: TemporaryName) -> bool:
        if name.owner == self._owner:
            return False
        dead = is_dead(name.owner)
        if dead is not None:
            return dead
        try:
            written = os.stat(self._tree.temporary(name)).st_mtime_ns
            return self._clock.age_seconds(written) > self._abandoned_seconds
        except OSError:
            return False

    def _remove(self, name: TemporaryName) -> bool:
        try:
            os.unlink(self._tree.temporary(name))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True
