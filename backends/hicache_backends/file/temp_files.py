"""Temporary files: what is being written, and what those who were killed have left."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from typing import TYPE_CHECKING

from hicache_backends.file.paths import TemporaryName, parse_temporary
from hicache_backends.posix.process_id import current_process, has_exited
from hicache_backends.posix.statx import list_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.file.paths import StorePaths
    from hicache_backends.posix.descriptors import Descriptors

TOLERANCE_NS = 2_000_000_000
"""A smaller difference is no difference: some file systems keep whole seconds."""


class ServerClock:
    """This node's clock, put right by the times that the file system gives to new files.

    Args:
        source: nanoseconds since 1970 by this node's clock.
    """

    def __init__(self, source: Callable[[], int] = time.time_ns) -> None:
        self._source = source
        self._offset_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds since 1970 by the file server's clock, within some seconds."""
        return self._source() + self._offset_ns

    def age_seconds(self, moment_ns: int) -> float:
        """How long ago the file server's clock said something."""
        return (self.now_ns() - moment_ns) / 1e9

    def adjust(self, ask: Callable[[], int]) -> None:
        """Take in what the file server's clock says.

        Args:
            ask: what it says at some moment of this call, which may take long.

        Raises:
            OSError: of `ask`.
        """
        before = self._source()
        moment = ask()
        # How long the answer was on its way is not known: no more is put right than must be wrong.
        offset = min(moment - before, max(self._offset_ns, moment - self._source()))
        self._offset_ns = offset if abs(offset) > TOLERANCE_NS else 0


class TempFiles:
    """The temporary files of one store. Safe for many threads.

    Args:
        abandoned_seconds: a temporary file of another machine, of which nobody here can tell whether its writer lives, is
            collected so long after its last byte was written. A writer that is slower fails to publish, and nothing worse.
    """

    def __init__(
        self,
        paths: StorePaths,
        writer: str,
        descriptors: Descriptors,
        clock: ServerClock,
        *,
        asks_server: bool,
        abandoned_seconds: float,
    ) -> None:
        self._clock = clock
        self._paths, self._writer, self._asks_server = paths, writer, asks_server
        self._descriptors, self._abandoned_seconds = descriptors, abandoned_seconds
        self._process = current_process()
        self._numbers = itertools.count()

    def name(self, size: int) -> TemporaryName:
        """A new name for a file of at most `size` bytes."""
        return TemporaryName(self._process, self._writer, next(self._numbers), size)

    def create(self, name: TemporaryName) -> int:
        """Make a file; from now on its length counts as used. The descriptor is the caller's.

        Raises:
            OSError: it cannot be made.
        """
        path, flags = self._paths.temporary(name), os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            return self._descriptors.open(path, flags)
        except FileNotFoundError:
            self._paths.create()
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
            os.unlink(self._paths.temporary(name))

    def collect(self) -> tuple[int, int]:
        """Remove what killed writers have left.

        Returns:
            Bytes that the files of the living take or may come to take, and how many files have been removed.

        Raises:
            OSError: the files could not be listed.
        """
        reserved = collected = 0
        for text in list_directory(self._paths.temporaries, asks_server=self._asks_server):
            name = parse_temporary(text)
            if name is None:
                continue
            if self._is_leftover(name) and self._remove(name):
                collected += 1
            else:
                reserved += name.size
        return reserved, collected

    def _is_leftover(self, name: TemporaryName) -> bool:
        if name.process == self._process:
            return False
        dead = has_exited(name.process)
        if dead is not None:
            return dead
        try:
            written = os.stat(self._paths.temporary(name)).st_mtime_ns
            return self._clock.age_seconds(written) > self._abandoned_seconds
        except OSError:
            return False

    def _remove(self, name: TemporaryName) -> bool:
        try:
            os.unlink(self._paths.temporary(name))
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True
