"""A stand-in for `hf3fs_fuse.io` that checks every argument as the published interface describes
them, and moves real bytes.

Written from the interface's description in the 3FS repository (`hf3fs_fuse/io.py`,
`usrbio_binding.cc`, `UsrbIo.md`).
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import uuid
from datetime import timedelta

SECTOR = 512
"""Storage targets are read past their page cache, in sectors: bytes that lie differently in a
sector are copied once more."""


class Misuse(AssertionError):
    """What the real library would answer with a crash, or with wrong bytes in somebody else's
    file."""


class StandIn:
    """The functions of the module.

    Trouble is set as attributes: `short` cuts so many results, `errors` fails so many; `hangs`
    keeps all results; `idle` lets so many waits come back with nothing; `refusals` are what the
    next submissions fail with.
    """

    def __init__(self, mount_point):
        self.mount_point = str(mount_point)
        self.registered = {}
        self.rings = []
        self.misuse = []
        self.in_flight = set[Vector]()
        self.short = 0
        self.errors = []
        self.idle = 0
        self.refusals = []
        self.links = os.path.join(self.mount_point, "3fs-virt", "iovs")
        os.makedirs(self.links, exist_ok=True)
        self.hangs = threading.Event()

    def check(self, right, message):
        if not right:
            self.misuse.append(message)
            raise Misuse(message)

    def extract_mount_point(self, path):
        return (
            self.mount_point
            if os.path.realpath(path).startswith(os.path.realpath(self.mount_point))
            else None
        )

    def register_fd(self, fd):
        self.check(fd not in self.registered, f"descriptor {fd} is registered twice")
        self.registered[fd] = os.fstat(fd).st_ino

    def deregister_fd(self, fd):
        self.check(fd in self.registered, f"descriptor {fd} is not registered")
        self.check(
            os.fstat(fd).st_ino == self.registered.pop(fd),
            f"descriptor {fd} was closed before it was deregistered",
        )

    def make_iovec(self, shm, hf3fs_mount_point):
        self.check(hf3fs_mount_point == self.mount_point, "another mount point")
        # The daemon maps what the name stands for, when it is told of it.
        with open(f"/dev/shm/{shm.name}", "r+b") as file:
            vector = Vector(self, mmap.mmap(file.fileno(), 0))
        self.check(
            len(vector.memory) == len(shm.buf), "the memory has another length than its file"
        )
        return vector

    def make_ioring(self, hf3fs_mount_point, entries, for_read=True):
        self.check(hf3fs_mount_point == self.mount_point, "another mount point")
        self.check(type(entries) is int and entries > 0, f"{entries} entries")
        ring = Ring(self, entries, for_read)
        self.rings.append(ring)
        return ring


class Vector:
    """`iovec`: its link in the mount tells the daemon of it, and goes with it."""

    def __init__(self, library, memory):
        self.library, self.memory = library, memory
        self.link = os.path.join(library.links, uuid.uuid4().hex)
        os.symlink("/dev/shm/somewhere", self.link)

    def __del__(self):
        os.unlink(self.link)

    def __getitem__(self, part):
        start, stop, step = part.indices(len(self.memory))
        is_inside = (part.start, part.stop, step) == (start, stop, 1) and start < stop
        self.library.check(is_inside, f"slice {part} of {len(self.memory)} bytes")
        return Part(self, start, stop)


class Part:
    def __init__(self, vector, start, stop):
        self.vector, self.start, self.stop = vector, start, stop
        self.result = 0


class Ring:
    def __init__(self, library, entries, for_read):
        self.library, self.entries, self.for_read = library, entries, for_read
        self.prepared = None

    def prepare(self, iov, read, fd, off):
        library = self.library
        library.check(isinstance(iov, Part), "no slice of a vector")
        library.check(
            read is self.for_read,
            "a ring for reading and a request to write, or the other way round",
        )
        library.check(fd in library.registered, f"descriptor {fd} is not registered")
        library.check(
            os.fstat(fd).st_ino == library.registered[fd],
            f"descriptor {fd} stands for another file by now",
        )
        library.check(type(off) is int and off >= 0, f"offset {off!r}")
        library.check(
            (iov.start - off) % SECTOR == 0,
            f"memory at {iov.start} and file at {off} are aligned differently",
        )
        library.check(iov.vector not in library.in_flight, "two requests in flight share memory")
        library.in_flight.add(iov.vector)
        self.prepared = (iov, fd, off)
        return self

    def submit(self):
        self.library.check(self.prepared is not None, "nothing was prepared")
        if self.library.refusals:
            # What was prepared may be begun at any time, submitted or not.
            raise OSError(self.library.refusals.pop(), "not submitted")
        return self

    def wait(self, *, max_results=0, min_results=0, timeout=None):
        library = self.library
        library.check(isinstance(timeout, timedelta), f"timeout {timeout!r}")
        library.check((max_results, min_results) == (1, 1), "there is one request")
        if library.idle:
            library.idle -= 1
            return []
        if library.hangs.is_set():
            time.sleep(timeout.total_seconds())
            raise OSError(errno.ETIMEDOUT, "timed out")
        (part, fd, off), self.prepared = self.prepared, None
        library.in_flight.remove(part.vector)
        part.result = self.do(part, fd, off)
        return [part]

    def do(self, part, fd, off):
        library = self.library
        if library.errors:
            return -library.errors.pop()
        memory = memoryview(part.vector.memory)[part.start : part.stop]
        if library.short:
            library.short -= 1
            memory = memory[: len(memory) // 2]
        return os.preadv(fd, [memory], off) if self.for_read else os.pwritev(fd, [memory], off)
