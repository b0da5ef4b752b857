"""Slots by 3FS's USRBIO: rings of requests that the FUSE daemon serves past the kernel, from memory shared with it.

Written against the Python interface that the 3FS repository publishes (`hf3fs_fuse.io`, package `hf3fs-py-usrbio`).
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import mmap
import os
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from hicache_backends.hf3fs.slots.engine import SlotEngine, SlotRead, SlotWrite
from hicache_backends.posix.descriptors import Handle
from hicache_backends.posix.faults import detached
from hicache_storage.objects import ENVELOPE_BYTES, running_checksum

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.objects import Call

ALIGNMENT: Final = 4096
"""Of requests within the shared memory."""
LOOK_SECONDS: Final = 0.1
"""How often who waits looks whether the deadline has passed."""
PATIENCE_SECONDS: Final = 30.0
"""How long a call without a deadline waits for results."""
CLOSE_SECONDS: Final = 2.0

SHARED_MEMORY: Final = "/dev/shm"


class SharedPages:
    """Memory with a name, as `make_iovec` wants it: what `multiprocessing.shared_memory` offers, without the process that it
    starts to look after it."""

    def __init__(self, size: int) -> None:
        self.name = f"hicache-{os.getpid()}-{secrets.token_hex(8)}"
        self.size = size
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Taken now: a page of it that cannot be had later is a SIGBUS.
            os.posix_fallocate(descriptor, 0, size)
            self._map = mmap.mmap(descriptor, size)
        except BaseException:
            self.unlink()
            raise
        finally:
            os.close(descriptor)
        self.buf = memoryview(self._map)

    def unlink(self) -> None:
        """Take the name away: nothing of it outlives those who have it open."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._path)

    def close(self) -> None:
        """Give the memory back."""
        self.buf.release()
        self._map.close()

    @property
    def _path(self) -> str:
        return f"{SHARED_MEMORY}/{self.name}"


class Ring(Protocol):
    """`hf3fs_fuse.io.ioring`."""

    def prepare(self, iov: Any, read: bool, fd: int, off: int, userdata: object = None, /) -> object: ...
    def submit(self) -> Ring: ...
    def wait(self, *, max_results: int, min_results: int, timeout: timedelta) -> list[Any]: ...


class Library(Protocol):
    """`hf3fs_fuse.io`."""

    def extract_mount_point(self, path: str, /) -> str | None: ...
    def register_fd(self, fd: int, /) -> None: ...
    def deregister_fd(self, fd: int, /) -> None: ...
    def make_iovec(self, shm: SharedPages, hf3fs_mount_point: str, /) -> Any: ...
    def make_ioring(self, hf3fs_mount_point: str, entries: int, for_read: bool, /) -> Ring: ...


def load_library() -> Library:
    """The library of 3FS.

    Raises:
        ImportError: it is not installed.
    """
    return cast("Library", importlib.import_module("hf3fs_fuse.io"))


class _RegisteredHandle(Handle):
    """An open file that the daemon knows; it must be told before the descriptor stands for something else."""

    __slots__ = ("_library",)

    def __init__(self, descriptor: int, library: Library) -> None:
        self._library = library
        super().__init__(descriptor)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._library.deregister_fd(self.descriptor)
        super().__del__()


@dataclass(slots=True, eq=False)
class _Request:
    """Bytes of one job, on their way."""

    job: SlotRead | SlotWrite
    handle: Handle
    start: int
    """Where they lie in the shared memory."""
    size: int
    moved: int = 0


class UsrbioEngine(SlotEngine):
    """Several rings for reading, and as many for writing; each serves one call at a time.

    Args:
        library: `hf3fs_fuse.io`.
        mount_point: of 3FS.
        lanes: rings for each direction, made when first needed.
        entries: requests in flight in one ring.
        buffer_bytes: shared memory of one ring.
        verifies: whether checksums are wanted.
    """

    name = "usrbio"
    buffered = True

    def __init__(
        self, library: Library, mount_point: str, *, lanes: int, entries: int, buffer_bytes: int, verifies: bool
    ) -> None:
        self._library, self._verifies = library, verifies
        self._reading = _Lanes(library, mount_point, lanes, entries, buffer_bytes, for_read=True)
        self._writing = _Lanes(library, mount_point, lanes, entries, buffer_bytes, for_read=False)

    def adopt(self, descriptor: int) -> Handle:
        try:
            self._library.register_fd(descriptor)
        except OSError:
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

    def _move(self, lanes: _Lanes, jobs: Sequence[SlotRead] | Sequence[SlotWrite], call: Call) -> None:
        if not jobs:
            return
        try:
            lane = lanes.take(call)
        except OSError as error:
            for job in jobs:
                job.fault = detached(error)
            return
        try:
            _Turn(lane, call, verifies=self._verifies).move(jobs)
        finally:
            lanes.put_back(lane)


class _Lane:
    """A ring and its memory, in the hands of one thread at a time."""

    def __init__(self, library: Library, mount_point: str, entries: int, buffer_bytes: int, *, for_read: bool) -> None:
        self.entries, self.for_read = entries, for_read
        self._memory = SharedPages(buffer_bytes)
        try:
            self._iovec: Any = library.make_iovec(self._memory, mount_point)
            self._ring: Ring | None = library.make_ioring(mount_point, entries, for_read)
        except BaseException:
            self._iovec = None
            self._memory.close()
            raise
        finally:
            # The daemon has it open now.
            self._memory.unlink()
        self.in_flight = 0
        """Requests that were prepared, and whose result has not come."""

    @property
    def size(self) -> int:
        """Bytes of the memory."""
        return self._memory.size

    def part(self, start: int, length: int) -> memoryview:
        """Some of the memory."""
        return self._memory.buf[start : start + length]

    def prepare(self, request: _Request) -> None:
        """Put what is left of a request into the ring; the daemon may begin at once."""
        assert self._ring is not None
        start, end = request.start + request.moved, request.start + request.size
        offset = request.job.file.offset(request.job.slot) + request.moved
        self._ring.prepare(self._iovec[start:end], self.for_read, request.handle.descriptor, offset, request)
        self.in_flight += 1

    def submit(self) -> None:
        """Tell the daemon."""
        assert self._ring is not None
        self._ring.submit()

    def results(self, seconds: float) -> list[Any]:
        """Those that have come, at least one unless that takes too long."""
        assert self._ring is not None
        try:
            found = self._ring.wait(max_results=self.in_flight, min_results=1, timeout=timedelta(seconds=seconds))
        except OSError as error:
            if error.errno not in (errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR):
                raise
            return []
        self.in_flight -= len(found)
        return found

    def is_idle(self) -> bool:
        """Whether the daemon has nothing of it any more; takes what has come of requests that were given up."""
        while self.in_flight:
            try:
                if not self.results(0.0):
                    return False
            except OSError:
                return False
        return True

    def close(self) -> None:
        """Give the memory back."""
        # In this order: the ring uses the vector, and the vector the memory.
        self._ring = None
        self._iovec = None
        self._memory.close()


class _Lanes:
    """A bounded number of lanes. Those with requests that were given up rest until these come back. Safe for many threads."""

    def __init__(
        self, library: Library, mount_point: str, limit: int, entries: int, buffer_bytes: int, *, for_read: bool
    ) -> None:
        self._make = partial(_Lane, library, mount_point, entries, buffer_bytes, for_read=for_read)
        self._limit = limit
        self._changed = threading.Condition()
        self._free = list[_Lane]()
        self._resting = list[_Lane]()
        self._lent = 0

    def take(self, call: Call) -> _Lane:
        """A lane of one's own.

        Raises:
            OSError: none can be made, or none becomes free in time.
        """
        until = time.monotonic() + PATIENCE_SECONDS
        with self._changed:
            while True:
                self._wake()
                if self._free or self._lent + len(self._resting) < self._limit:
                    lane = self._free.pop() if self._free else self._make()
                    self._lent += 1
                    return lane
                if call.expired() or time.monotonic() > until:
                    raise OSError(errno.ETIMEDOUT, "all rings are busy")
                if not self._lent:
                    raise OSError(errno.EBUSY, "the requests in all rings hang")
                self._changed.wait(LOOK_SECONDS)

    def put_back(self, lane: _Lane) -> None:
        """Give a lane to the next."""
        with self._changed:
            self._lent -= 1
            (self._resting if lane.in_flight else self._free).append(lane)
            self._changed.notify()

    def stuck(self) -> int:
        """Requests that were given up and have not come back."""
        with self._changed:
            return sum(lane.in_flight for lane in self._resting)

    def close(self) -> None:
        """Give all back; the memory of requests that still hang stays mapped as long as the process lives."""
        until = time.monotonic() + CLOSE_SECONDS
        with self._changed:
            while self._resting and time.monotonic() < until:
                self._wake()
                self._changed.wait(LOOK_SECONDS if self._resting else 0)
            free, self._free = self._free, []
        for lane in free:
            lane.close()

    def _wake(self) -> None:
        awake = [lane for lane in self._resting if lane.is_idle()]
        self._free += awake
        self._resting = [lane for lane in self._resting if lane not in awake]


class _Turn:
    """The jobs of one call in one lane."""

    def __init__(self, lane: _Lane, call: Call, *, verifies: bool) -> None:
        self._lane, self._call, self._verifies = lane, call, verifies
        left = call.remaining()
        self._until = time.monotonic() + (PATIENCE_SECONDS if left is None else left)

    def move(self, jobs: Sequence[SlotRead] | Sequence[SlotWrite]) -> None:
        """Move all, as many at a time as fit into the ring and its memory."""
        left = deque[SlotRead | SlotWrite](jobs)
        while left:
            requests, at = list[_Request](), 0
            while left and len(requests) < self._lane.entries and at + left[0].size <= self._lane.size:
                job = left.popleft()
                if self._call.expired() or (isinstance(job, SlotWrite) and job.late):
                    job.fault = OSError(errno.ETIMEDOUT, "the deadline or the lease has passed")
                    continue
                try:
                    handle = job.file.borrow()
                except OSError as error:
                    job.fault = detached(error)
                    continue
                request = _Request(job, handle, at, job.size)
                if isinstance(job, SlotWrite):
                    _fill(self._lane.part(at, job.size), job)
                requests.append(request)
                at += -(-job.size // ALIGNMENT) * ALIGNMENT
            if requests:
                self._serve(requests)
            elif left and left[0].size > self._lane.size:
                left.popleft().fault = OSError(
                    errno.EMSGSIZE, f"a page is longer than usrbio_buffer, {self._lane.size} bytes; make that larger"
                )
            if self._lane.in_flight:
                # Its memory is the daemon's until the requests come back.
                for job in left:
                    job.fault = OSError(errno.ETIMEDOUT, "requests hang in the ring")
                return

    def _serve(self, requests: Sequence[_Request]) -> None:
        open_requests = dict.fromkeys(requests)
        try:
            for request in requests:
                self._lane.prepare(request)
            self._lane.submit()
            while self._lane.in_flight:
                seconds = min(LOOK_SECONDS, self._until - time.monotonic())
                if seconds <= 0 or self._call.expired():
                    break
                again = False
                for result in self._lane.results(seconds):
                    request = cast("_Request", result.userdata)
                    if self._settle(request, result.result):
                        del open_requests[request]
                    else:
                        self._lane.prepare(request)
                        again = True
                if again:
                    self._lane.submit()
        except OSError as error:
            _fail(open_requests, detached(error))
            return
        _fail(open_requests, OSError(errno.ETIMEDOUT, "3FS has not answered in time"))

    def _settle(self, request: _Request, result: int) -> bool:
        """Take a result; `False` where a part of the request is left to be done."""
        job = request.job
        if result < 0:
            job.fault = OSError(-result, os.strerror(-result))
            job.file.forget(request.handle)
            return True
        if result == 0 and isinstance(job, SlotWrite):
            job.fault = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return True
        request.moved += result
        if request.moved > request.size:
            job.fault = OSError(errno.EIO, f"3FS has moved {request.moved} bytes of {request.size}")
            return True
        if result and request.moved < request.size:
            return False
        if request.moved < request.size:
            # The file ends too early.
            return True
        if isinstance(job, SlotWrite):
            job.whole = True
        else:
            self._deliver(job, self._lane.part(request.start, request.size))
        return True

    def _deliver(self, job: SlotRead, page: memoryview) -> None:
        """Verify a page in the shared memory, and copy it to where it belongs if it is sound."""
        read, length = job.read, len(page) - ENVELOPE_BYTES
        read.envelope = bytes(page[length:])
        checksum = running_checksum()
        if self._verifies:
            checksum.update(page[:length])
        if read.verify(checksum.intdigest() if self._verifies else None):
            with self._call.shield() as active:
                if not active:
                    job.fault = OSError(errno.ETIMEDOUT, "nobody waits for the answer any more")
                    return
                start = 0
                for target in read.buffers:
                    target[:] = page[start : start + len(target)]
                    start += len(target)
        job.whole = True


def _fill(page: memoryview, job: SlotWrite) -> None:
    """Copy a page and its envelope into the shared memory."""
    start = 0
    for source in job.write.buffers:
        page[start : start + len(source)] = source
        start += len(source)
    checksum = running_checksum()
    checksum.update(page[:start])
    job.write.seal(checksum.intdigest())
    page[start:] = job.write.envelope


def _fail(requests: dict[_Request, None], error: OSError) -> None:
    for request in requests:
        request.job.fault = error
        if isinstance(request.job, SlotWrite):
            request.job.in_doubt = True
