"""A stand-in for `hf3fs_fuse.io` that checks every argument as the published interface describes them, and moves real bytes.

Written from the interface's description in the 3FS repository (`hf3fs_fuse/io.py`, `usrbio_binding.cc`, `UsrbIo.md`).
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import threading
import time
from datetime import timedelta


class Misuse(AssertionError):
    """What the real library would answer with a crash, or with wrong bytes in somebody else's file."""


class StandIn:
    """The functions of the module. Trouble is set as attributes: `short` cuts results, `hangs` keeps them, `errors` fails them."""

    def __init__(self, mount_point, seed=1):
        self.mount_point = str(mount_point)
        self.random = random.Random(seed)
        self.registered = {}
        self.rings = []
        self.vectors = []
        self.misuse = []
        self.short = 0
        self.errors = []
        self.hangs = threading.Event()

    def check(self, right, message):
        if not right:
            self.misuse.append(message)
            raise Misuse(message)

    def extract_mount_point(self, path):
        return self.mount_point if os.path.realpath(path).startswith(os.path.realpath(self.mount_point)) else None

    def register_fd(self, fd):
        self.check(fd not in self.registered, f"descriptor {fd} is registered twice")
        self.registered[fd] = os.fstat(fd).st_ino

    def deregister_fd(self, fd):
        self.check(fd in self.registered, f"descriptor {fd} is not registered")
        self.check(os.fstat(fd).st_ino == self.registered.pop(fd), f"descriptor {fd} was closed before it was deregistered")

    def make_iovec(self, shm, hf3fs_mount_point, block_size=0, numa=-1):
        self.check(hf3fs_mount_point == self.mount_point, "another mount point")
        # The daemon maps what the name stands for, when it is told of it.
        with open(f"/dev/shm/{shm.name}", "r+b") as file:
            vector = Vector(self, mmap.mmap(file.fileno(), 0))
        self.check(len(vector.memory) == len(shm.buf), "the memory has another length than its file")
        self.vectors.append(vector)
        return vector

    def make_ioring(self, hf3fs_mount_point, entries, for_read=True, io_depth=0, priority=None, timeout=None, numa=-1, flags=0):
        self.check(hf3fs_mount_point == self.mount_point, "another mount point")
        self.check(type(entries) is int and entries > 0, f"{entries} entries")
        ring = Ring(self, entries, for_read)
        self.rings.append(ring)
        return ring


class Vector:
    def __init__(self, library, memory):
        self.library, self.memory = library, memory

    def __getitem__(self, part):
        start, stop, step = part.indices(len(self.memory))
        self.library.check(step == 1, "a slice with steps")
        self.library.check(part.start is None or part.start == start, f"slice {part} reaches beyond the memory")
        self.library.check(part.stop is None or part.stop == stop, f"slice {part} reaches beyond the memory")
        self.library.check(stop > start, f"slice {part} is empty")
        return Part(self, start, stop)


class Part:
    def __init__(self, vector, start, stop):
        self.vector, self.start, self.stop = vector, start, stop
        self.result, self.userdata = 0, None


class Ring:
    def __init__(self, library, entries, for_read):
        self.library, self.entries, self.for_read = library, entries, for_read
        self.prepared, self.submitted = [], []
        self.thread = None

    def prepare(self, iov, read, fd, off, userdata=None):
        library = self.library
        library.check(isinstance(iov, Part), "no slice of a vector")
        library.check(read is self.for_read, "a ring for reading and a request to write, or the other way round")
        library.check(fd in library.registered, f"descriptor {fd} is not registered")
        library.check(os.fstat(fd).st_ino == library.registered[fd], f"descriptor {fd} stands for another file by now")
        library.check(type(off) is int and off >= 0, f"offset {off!r}")
        for other in (*self.prepared, *self.submitted):
            part = other[0]
            apart = part.vector is not iov.vector or part.stop <= iov.start or iov.stop <= part.start
            library.check(apart, "two requests in flight share memory")
        if len(self.prepared) + len(self.submitted) >= self.entries:
            raise OSError(errno.EAGAIN, "the ring is full")
        self.prepared.append((iov, fd, off, userdata))
        return self

    def submit(self):
        self.library.check(bool(self.prepared), "nothing was prepared")
        self.submitted += self.prepared
        self.prepared = []
        return self

    def wait(self, *, max_results=0, min_results=0, timeout=None):
        library = self.library
        library.check(timeout is None or isinstance(timeout, timedelta), f"timeout {timeout!r}")
        library.check(timeout is not None or not library.hangs.is_set(), "waits for ever")
        if library.hangs.is_set():
            time.sleep(timeout.total_seconds())
            raise OSError(errno.ETIMEDOUT, "timed out")
        library.random.shuffle(self.submitted)
        most = min(len(self.submitted), max(max_results, min_results, 1))
        count = library.random.randint(min(min_results, most), most)
        done, self.submitted = self.submitted[:count], self.submitted[count:]
        return [self.do(*request) for request in done]

    def do(self, part, fd, off, userdata):
        library = self.library
        part.userdata = userdata
        length = part.stop - part.start
        if library.errors:
            part.result = -library.errors.pop()
            return part
        if library.short and length > 1:
            library.short -= 1
            length = library.random.randint(1, length - 1)
        memory = memoryview(part.vector.memory)[part.start : part.start + length]
        part.result = os.preadv(fd, [memory], off) if self.for_read else os.pwritev(fd, [memory], off)
        return part
