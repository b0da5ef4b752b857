"""Slot engine on 3FS's USRBIO: request rings and shared memory that the FUSE daemon serves.

Written against the Python interface that the 3FS repository publishes (`hf3fs_fuse.io`, package
`hf3fs-py-usrbio`).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from datetime import timedelta
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hicache_backends.hf3fs.slots.engine import MAX_BUFFERED_BYTES, SlotEngine, split_buffers
from hicache_backends.posix.buffers import Buffers
from hicache_backends.posix.files import Handle

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import Call

WAIT_SECONDS: Final = 1.0
"""Timeout of one wait for a result; a request that hangs is waited for again."""
ENTRIES: Final = 8
"""Length of a ring, of which one entry is used."""
SHARED_MEMORY: Final = "/dev/shm"


class _RegisteredHandle(Handle):
    """An open file that is registered with the daemon, and deregistered before it is closed."""

    __slots__ = ("_library",)

    def __init__(self, descriptor: int, library: Any) -> None:
        self._library = library
        super().__init__(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._library.deregister_fd(self.descriptor)
        super().__del__()


class _Rings(NamedTuple):
    """The rings of one bounce buffer, for one request at a time."""

    reads: Any
    writes: Any
    memory: Any
    """The buffer as the library's `iovec`."""


class UsrbioEngine(SlotEngine):
    """Engine whose bounce buffers are shared with the daemon, with a ring for each direction.

    A request that hangs keeps its thread and its buffer until it returns, as a system call does.

    Args:
        library: `hf3fs_fuse.io`.
        mount_point: of 3FS.
        threads: maximum for one call.
    """

    name = "usrbio"

    def __init__(self, library: Any, mount_point: str, *, threads: int) -> None:
        self._shared = Buffers(MAX_BUFFERED_BYTES, allocate=self._allocate)
        super().__init__(threads=threads, buffers=self._shared)
        self._library = library
        self._mount_point = mount_point
        self._rings = dict[int, _Rings]()
        """By the identity of the buffer."""

    def adopt(self, descriptor: int) -> Handle:
        try:
            self._library.register_fd(descriptor)
        except OSError:
            # The handle, which would close it, is not made.
            os.close(descriptor)
            raise
        return _RegisteredHandle(descriptor, self._library)

    def close(self) -> None:
        super().close()
        self._rings.clear()

    def _read_buffer(self, buffer: memoryview, length: int, descriptor: int, offset: int) -> bool:
        return self._request(buffer, length, descriptor, offset, for_read=True)

    def _put(self, sources: Sequence[memoryview], descriptor: int, offset: int, call: Call) -> None:
        for some in split_buffers(sources):
            with self._shared.lend(call) as buffer:
                length = 0
                for source in some:
                    buffer[length : length + len(source)] = source
                    length += len(source)
                self._request(buffer, length, descriptor, offset, for_read=False)
                offset += length

    def _request(
        self, buffer: memoryview, length: int, descriptor: int, offset: int, *, for_read: bool
    ) -> bool:
        """Move the beginning of a buffer. False if a read finds the end of the file."""
        rings = self._rings[id(buffer)]
        ring = rings.reads if for_read else rings.writes
        try:
            ring.prepare(rings.memory[0:length], for_read, descriptor, offset)
            ring.submit()
            while not (results := _results(ring)):
                pass
        except BaseException:
            # The daemon may access the memory from `prepare` on, through a mapping of its own.
            self._shared.retire(buffer)
            del self._rings[id(buffer)]
            raise
        moved: int = results[0].result
        if moved < 0:
            raise OSError(-moved, os.strerror(-moved))
        if moved != length and (moved or not for_read):
            raise OSError(errno.EIO, f"3FS has moved {moved} bytes of {length}")
        return moved == length

    def _allocate(self, size: int) -> memoryview:
        """Make a buffer and its rings."""
        # `multiprocessing.shared_memory` would start a resource tracker process. The name goes at
        # the end of the block: the daemon has opened the memory by then.
        with NamedTemporaryFile(prefix=f"hicache-{os.getpid()}-", dir=SHARED_MEMORY) as file:
            # Allocated now: a page that cannot be allocated later is a SIGBUS.
            os.posix_fallocate(file.fileno(), 0, size)
            buffer = memoryview(mmap.mmap(file.fileno(), size))
            shared = SimpleNamespace(name=os.path.basename(file.name), size=size, buf=buffer)
            memory = self._library.make_iovec(shared, self._mount_point)
            reads, writes = (
                self._library.make_ioring(self._mount_point, ENTRIES, for_read)
                for for_read in (True, False)
            )
        self._rings[id(buffer)] = _Rings(reads, writes, memory)
        return buffer


def _results(ring: Any) -> list[Any]:
    """Wait a while for the result of a request; none if it has not arrived."""
    try:
        found: list[Any] = ring.wait(
            max_results=1, min_results=1, timeout=timedelta(seconds=WAIT_SECONDS)
        )
    except OSError as error:
        if error.errno not in (errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR):
            raise
        return []
    return found
