"""Temporary files, which become bundles by a rename; and the clock of the file server.

The name of a temporary file holds the identity of its process and the length that it may reach.
So it reserves room before its first byte is written, and any process can remove the files of
processes that were killed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import time
from typing import TYPE_CHECKING, NamedTuple

from hicache_backends.file.paths import (
    HEX,
    MAX_USUAL_BYTES,
    PID_SCOPE_PATTERN,
    WRITER_PATTERN,
    ProcessId,
    current_process,
    has_exited,
)
from hicache_backends.posix.files import file_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from hicache_backends.file.paths import StorePaths
    from hicache_backends.posix.files import Descriptors

TOLERANCE_NS = 2_000_000_000
"""Smaller differences are ignored: some file systems keep whole seconds. In nanoseconds."""

ABANDONED_SECONDS = 3600.0
"""Age after which a temporary file or claim of another machine, or of a process that /proc hides,
counts as left by a killed process. The publication of a slower writer fails, with no other effect."""

RESERVATION_SECONDS = 60.0
"""A file that a process of another machine has not written for so long counts with its length."""


class TemporaryName(NamedTuple):
    """The name of a file that is being written.

    It contains the length: that reserves room before the first byte is written.
    """

    process: ProcessId
    writer: str
    number: int
    size: int

    def __str__(self) -> str:
        return f"{self.process}-{self.writer}-{self.number:x}-{self.size:x}.temporary"


_TEMPORARY = re.compile(
    f"({PID_SCOPE_PATTERN})-({HEX})-({HEX})-({WRITER_PATTERN})-({HEX})-({HEX})\\.temporary"
)


def parse_temporary(text: str) -> TemporaryName | None:
    """Parse the name of a temporary file; None for a name that the driver did not make."""
    match = _TEMPORARY.fullmatch(text)
    if match is None:
        return None
    pid_scope, pid, started, writer, number, size = match.groups()
    process = ProcessId(pid_scope, int(pid, 16), int(started, 16))
    return TemporaryName(process, writer, int(number, 16), int(size, 16))


def writers_at_work(paths: StorePaths) -> set[str]:
    """The writers that have temporary files and whose processes have not exited, as far as is known.

    Raises:
        OSError: the files could not be listed.
    """
    names = filter(None, map(parse_temporary, paths.list_names(paths.temporaries)))
    return {name.writer for name in names if not has_exited(name.process)}


class ServerClock:
    """This node's clock, corrected by the times that the file system gives to new files.

    All nodes of a store agree on it, whatever their own clocks say.

    Args:
        source: nanoseconds since 1970 by this node's clock.
    """

    def __init__(self, source: Callable[[], int] = time.time_ns) -> None:
        self.source = source
        self._offset_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds since 1970 by the file server's clock, within some seconds."""
        return self.source() + self._offset_ns

    def age_seconds(self, moment_ns: int) -> float:
        """Seconds since a moment of the file server's clock."""
        return (self.now_ns() - moment_ns) / 1e9

    def adjust(self, ask: Callable[[], int]) -> None:
        """Correct this node's clock by the file server's.

        Args:
            ask: returns the server's time at some moment of this call, which may take long.

        Raises:
            OSError: of `ask`.
        """
        before = self.source()
        moment = ask()
        # The server's moment lies between the two readings of this clock. Only the difference that
        # cannot be explained by the time of the request is corrected.
        offset = min(moment - before, max(self._offset_ns, moment - self.source()))
        self._offset_ns = offset if abs(offset) > TOLERANCE_NS else 0


class TempFiles:
    """The temporary files of one store. Safe for many threads."""

    def __init__(
        self, paths: StorePaths, writer: str, descriptors: Descriptors, clock: ServerClock
    ) -> None:
        self.clock = clock
        self._paths = paths
        self._writer = writer
        self._descriptors = descriptors
        self.process = current_process()
        self._numbers = itertools.count()
        self._max_reserved = MAX_USUAL_BYTES

    def name(self, size: int) -> TemporaryName:
        """A new name for a file of at most `size` bytes."""
        self._max_reserved = max(self._max_reserved, size)
        return TemporaryName(self.process, self._writer, next(self._numbers), size)

    def path(self, name: TemporaryName) -> str:
        return f"{self._paths.temporaries}/{name}"

    def create(self, name: TemporaryName) -> int:
        """Create a file; from now on its length counts as used. The caller closes the descriptor.

        Raises:
            OSError: it cannot be created.
        """
        # O_EXCL: a file of that name would be another writer's, since names are never used twice.
        path, flags = self.path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL
        try:
            return self._descriptors.open(path, flags)
        except FileNotFoundError:
            self._paths.create()
            return self._descriptors.open(path, flags)

    def write(self, path: str, content: bytes) -> None:
        """Write a file, and move it to a path: a reader finds all of the content, or no file.

        Raises:
            OSError: it cannot be written, or not be moved; no temporary file is left.
        """
        name = self.name(len(content))
        try:
            with open(self.create(name), "wb") as file:
                file.write(content)
            os.rename(self.path(name), path)
        except OSError:
            # A file that stays would count as used until this process ends.
            self.discard(name)
            raise

    def ask_time(self) -> int:
        """Read the file server's clock, in nanoseconds since 1970, from the times of a new file.

        Raises:
            OSError: no file can be created.
        """
        name = self.name(0)
        descriptor = self.create(name)
        try:
            return os.fstat(descriptor).st_mtime_ns
        finally:
            os.close(descriptor)
            self.discard(name)

    def discard(self, name: TemporaryName) -> None:
        """Remove a file that will not be published.

        One that cannot be removed now is collected later.
        """
        with contextlib.suppress(OSError):
            os.unlink(self.path(name))

    @contextlib.contextmanager
    def at_work(self) -> Generator[None]:
        """Keep an empty file: what this process has announced as removed is left to it meanwhile."""
        name = self.name(0)
        # A full disk must not keep a removal from making room on it.
        with contextlib.suppress(OSError):
            os.close(self.create(name))
        try:
            yield
        finally:
            self.discard(name)

    def collect(self) -> tuple[int, int]:
        """Remove the files of processes that were killed.

        Returns:
            Bytes that the remaining files take or may come to take, and the number of files
            removed.

        Raises:
            OSError: the files could not be listed.
        """
        texts = self._paths.list_names(self._paths.temporaries)
        sizes = list(map(self._reserved, filter(None, map(parse_temporary, texts))))
        return sum(filter(None, sizes)), sizes.count(None)

    def _reserved(self, name: TemporaryName) -> int | None:
        """Bytes that a file may come to take; None if it was left behind, and has been removed.

        The length in its name, while it is written: its writer has been promised the rest.
        """
        # This process may have several storages open; the files of each count as in use.
        exited = name.process != self.process and has_exited(name.process)
        if exited is False and name.size <= self._max_reserved:
            return name.size
        path, age = self.path(name), math.inf
        with contextlib.suppress(OSError):
            # The server gives the mtime, and its clock is asked for the age.
            age = self.clock.age_seconds(os.lstat(path).st_mtime_ns)
            # A process that cannot be checked from this machine: the age decides.
            if exited or (exited is None and age > ABANDONED_SECONDS):
                os.unlink(path)
                return None
        if exited or age > RESERVATION_SECONDS or name.size > self._max_reserved:
            return file_bytes(path)
        return name.size
