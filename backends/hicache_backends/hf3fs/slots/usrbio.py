"""Slot engine on 3FS's USRBIO: request rings and shared memory that the FUSE daemon serves.

Written against the Python interface that the 3FS repository publishes (`hf3fs_fuse.io`, package
`hf3fs-py-usrbio`).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import threading
import time
from datetime import timedelta
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from hicache_backends.hf3fs.slots.engine import SlotEngine, SlotRead, SlotWrite
from hicache_backends.posix.buffers import split
from hicache_backends.posix.faults import detached
from hicache_backends.posix.files import Handle, scatter
from hicache_storage.objects import ENVELOPE_BYTES
from hicache_storage.objects.namespace import checksum

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_storage.objects import Call

ALIGNMENT: Final = 4096
"""Alignment of requests within the shared memory, in bytes."""
POLL_SECONDS: Final = 0.1
"""Interval in which a waiting thread checks its deadline."""
DEFAULT_TIMEOUT_SECONDS: Final = 30.0
"""Timeout of calls without a deadline."""
CLOSE_SECONDS: Final = 2.0

ENTRIES: Final = 256
"""Requests in flight in one ring."""
RING_BYTES: Final = 64 << 20
"""Shared memory of one ring."""
SHARED_MEMORY: Final = "/dev/shm"


def load_library() -> Any:
    """Import the library of 3FS.

    Raises:
        ImportError: the library is not installed.
    """
    return importlib.import_module("hf3fs_fuse.io")


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


class _Request(NamedTuple):
    """The I/O request of one job."""

    job: SlotRead | SlotWrite
    handle: Handle
    """Open until the result has arrived, also after the call has left."""
    start: int
    """Offset in the shared memory."""


class UsrbioEngine(SlotEngine):
    """Engine with a ring for reads, and one for writes; each serves one call at a time.

    Args:
        library: `hf3fs_fuse.io`.
        mount_point: of 3FS.
    """

    name = "usrbio"
    buffered = True

    def __init__(self, library: Any, mount_point: str) -> None:
        self._library = library
        self._reading = _Ring(library, mount_point, for_read=True)
        self._writing = _Ring(library, mount_point, for_read=False)

    def adopt(self, descriptor: int) -> Handle:
        try:
            self._library.register_fd(descriptor)
        except OSError:
            # The handle, which would close it, is not made.
            os.close(descriptor)
            raise
        return _RegisteredHandle(descriptor, self._library)

    def read(self, jobs: Sequence[SlotRead], call: Call) -> None:
        self._move(self._reading, jobs, call)

    def write(self, jobs: Sequence[SlotWrite], call: Call) -> None:
        self._move(self._writing, jobs, call)

    def stuck(self) -> int:
        return self._reading.stuck()

    def close(self) -> None:
        self._reading.close()
        self._writing.close()

    def _move(
        self, ring: _Ring, jobs: Sequence[SlotRead] | Sequence[SlotWrite], call: Call
    ) -> None:
        """Move all jobs, as many at a time as fit into a ring and its memory."""
        left = call.remaining()
        until = time.monotonic() + (DEFAULT_TIMEOUT_SECONDS if left is None else left)
        every: list[SlotRead | SlotWrite] = [*jobs]
        try:
            with ring.lend(call, until):
                for some in split(every, _aligned_size, ring.size, ENTRIES):
                    self._serve(ring, some, call, until)
        except OSError as error:
            for job in every:
                job.fault = detached(error)

    def _serve(
        self, ring: _Ring, jobs: Sequence[SlotRead | SlotWrite], call: Call, until: float
    ) -> None:
        requests, start = list[_Request](), 0
        for job in jobs:
            try:
                requests.append(_Request(job, _prepared(ring, job, start, call), start))
            except OSError as error:
                job.fault = detached(error)
            start += _aligned_size(job)
        if not requests:
            return
        left, fault = set(requests), OSError(errno.ETIMEDOUT, "3FS has not answered in time")
        try:
            ring.submit(requests)
            while left:
                seconds = min(POLL_SECONDS, until - time.monotonic())
                if seconds <= 0 or call.expired():
                    break
                for result in ring.results(seconds):
                    left.discard(result.userdata)
                    _settle(ring, result.userdata, result.result, call)
        except OSError as error:
            fault = detached(error)
        for job, *_ in left:
            job.fault = fault
            if isinstance(job, SlotWrite):
                job.in_doubt = True


def _settle(ring: _Ring, request: _Request, result: int, call: Call) -> None:
    """Take the result of a request: bytes moved, or an error number below 0."""
    job = request.job
    if result < 0:
        job.fault = OSError(-result, os.strerror(-result))
        # The descriptor may belong to a dead mount.
        job.file.forget(request.handle)
    elif result == 0 and isinstance(job, SlotRead):
        # End of file: neither whole nor a fault.
        return
    elif result != job.size:
        job.fault = OSError(errno.EIO, f"3FS has moved {result} bytes of {job.size}")
    elif isinstance(job, SlotWrite):
        job.whole = True
    else:
        _deliver(job, ring.part(request.start, job.size), call)


def _deliver(job: SlotRead, page: memoryview, call: Call) -> None:
    """Verify a page in the shared memory, and copy it to host memory if it is valid."""
    job.read.envelope = bytes(page[-ENVELOPE_BYTES:])
    computed = checksum([page[:-ENVELOPE_BYTES]]) if job.read.verifies_checksum else None
    if job.read.verify(computed):
        with call.shield() as active:
            if not active:
                job.fault = OSError(errno.ETIMEDOUT, "the caller has returned")
                return
            scatter(page, job.read.buffers)
    # Also if it is not valid: the reader decides whether that is damage or a slot with a new
    # page.
    job.whole = True


def _prepared(ring: _Ring, job: SlotRead | SlotWrite, start: int, call: Call) -> Handle:
    """Return the open file of a job; the page of a write is in the shared memory then."""
    if ring.in_flight:
        # The daemon may access the memory until the requests return.
        raise OSError(errno.ETIMEDOUT, "requests hang in the ring")
    if call.expired() or (isinstance(job, SlotWrite) and job.late):
        raise OSError(errno.ETIMEDOUT, "the deadline or the lease has passed")
    if job.size > ring.size:
        raise OSError(
            errno.EMSGSIZE,
            f"a page is longer than the shared memory, {ring.size} bytes; use the engine 'posix'",
        )
    handle = job.file.borrow(writes=isinstance(job, SlotWrite))
    if isinstance(job, SlotWrite):
        page, at = ring.part(start, job.size), 0
        for source in job.write.buffers:
            page[at : at + len(source)] = source
            at += len(source)
        # Of the copy: the caller's memory may change after its deadline.
        job.write.seal(checksum([page[:at]]))
        page[at:] = job.write.envelope
    return handle


class _Ring:
    """A ring and its shared memory, for one call at a time; made for the first one.

    A ring with abandoned requests is not used again before these have returned.
    """

    def __init__(self, library: Any, mount_point: str, *, for_read: bool) -> None:
        self.size = RING_BYTES
        self.in_flight = 0
        """Number of prepared requests without a result."""
        self._library = library
        self._mount_point = mount_point
        self._for_read = for_read
        self._lock = threading.Lock()
        self._memory = memoryview(b"")
        self._iovec: Any = None
        self._ring: Any = None

    @contextlib.contextmanager
    def lend(self, call: Call, until: float) -> Generator[None]:
        """Lend the ring to a call.

        Raises:
            OSError: it cannot be made, is not free in time, or requests in it hang.
        """
        while not self._lock.acquire(timeout=POLL_SECONDS):
            if call.expired() or time.monotonic() > until:
                raise OSError(errno.ETIMEDOUT, "the ring is busy")
        try:
            if self._ring is None:
                self._make()
            if not self._is_idle():
                raise OSError(errno.EBUSY, "requests hang in the ring")
            yield
        finally:
            self._lock.release()

    def part(self, start: int, length: int) -> memoryview:
        """A slice of the memory."""
        return self._memory[start : start + length]

    def submit(self, requests: Sequence[_Request]) -> None:
        """Submit requests to the daemon."""
        for request in requests:
            job = request.job
            memory = self._iovec[request.start : request.start + job.size]
            offset = job.file.offset(job.slot)
            self._ring.prepare(memory, self._for_read, request.handle.descriptor, offset, request)
            # Not only at `submit`: the daemon may use the memory from now on.
            self.in_flight += 1
        self._ring.submit()

    def results(self, seconds: float) -> list[Any]:
        """Wait up to `seconds` for results, and return those that have arrived."""
        try:
            found: list[Any] = self._ring.wait(
                max_results=self.in_flight, min_results=1, timeout=timedelta(seconds=seconds)
            )
        except OSError as error:
            if error.errno not in (errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR):
                raise
            return []
        self.in_flight -= len(found)
        return found

    def stuck(self) -> int:
        """Count the abandoned requests that have not returned."""
        # While a call has the ring, the requests in it are not abandoned.
        return 0 if self._lock.locked() else self.in_flight

    def close(self) -> None:
        """Release the ring and its memory.

        Memory of requests that still hang stays mapped until the process ends.
        """
        until = time.monotonic() + CLOSE_SECONDS
        # Kept: no later call may have it.
        if not self._lock.acquire(timeout=CLOSE_SECONDS):
            return
        while not self._is_idle() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
        if not self.in_flight:
            # In this order: the ring uses the vector, and the vector the memory.
            self._ring = None
            self._iovec = None
            self._memory.release()

    def _make(self) -> None:
        # `multiprocessing.shared_memory` would start a resource tracker process. The name goes at
        # the end of the block: the daemon has opened the memory by then.
        with NamedTemporaryFile(prefix=f"hicache-{os.getpid()}-", dir=SHARED_MEMORY) as file:
            # Allocated now: a page that cannot be allocated later is a SIGBUS.
            os.posix_fallocate(file.fileno(), 0, self.size)
            self._memory = memoryview(mmap.mmap(file.fileno(), self.size))
            shared = SimpleNamespace(
                name=os.path.basename(file.name), size=self.size, buf=self._memory
            )
            self._iovec = self._library.make_iovec(shared, self._mount_point)
            self._ring = self._library.make_ioring(self._mount_point, ENTRIES, self._for_read)

    def _is_idle(self) -> bool:
        """Collect results of abandoned requests. True if no request is in flight any more."""
        with contextlib.suppress(OSError):
            while self.in_flight and self.results(0.0):
                pass
        return not self.in_flight


def _aligned_size(job: SlotRead | SlotWrite) -> int:
    return -(-job.size // ALIGNMENT) * ALIGNMENT
