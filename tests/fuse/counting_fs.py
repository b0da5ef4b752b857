"""A pass-through FUSE file system that counts requests and delays each.

It stands for a network mount: what costs time there is the number of requests, and that can be
counted exactly.

    with CountingMount(backing, point, delay_us=200) as mount:
        before = mount.counts()
        ...
        mount.since(before)     # {"getattr": 1}

Requests that the kernel sends when nobody waits for them (`release`, `releasedir`) are not counted.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import mmap
import os
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

if TYPE_CHECKING:
    from pathlib import Path

OPERATIONS = (
    "getattr",
    "opendir",
    "readdir",
    "open",
    "create",
    "read",
    "write",
    "flush",
    "truncate",
    "unlink",
    "rename",
    "mkdir",
    "rmdir",
    "utimens",
    "fsync",
    "fsyncdir",
    "statfs",
    "link",
)
_COUNTS = struct.Struct(f"<{len(OPERATIONS)}Q")
_STAT_FIELDS = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")


class FileChange(NamedTuple):
    """A request that changes a file, or syncs it."""

    operation: str
    path: str
    offset: int
    """For `truncate` the new length."""
    data: bytes
    """For `rename` the new path."""


def file_changes(journal: Path) -> list[FileChange]:
    """Read the journal of a mount."""
    content, place, found = journal.read_bytes(), 0, list[FileChange]()
    while place < len(content):
        end = place + 4 + int.from_bytes(content[place : place + 4], "little")
        found.append(msgspec.msgpack.decode(content[place + 4 : end], type=FileChange))
        place = end
    return found


class CountingMount:
    """The file system, mounted by a process of its own.

    Args:
        backing: the directory behind it.
        point: where it is mounted; made if it is missing.
        delay_us: how long each request takes at least, in microseconds.
        cache_seconds: how long the kernel believes names and attributes. Long, so that counts do
            not depend on the time.
        max_name_bytes: longer names cannot be made.
        subtype: the mount's kind is `fuse.` and this.
        journal: file to which each change of a file is appended, for `file_changes`.
    """

    def __init__(
        self,
        backing: Path,
        point: Path,
        *,
        delay_us: int = 0,
        cache_seconds: float = 3600.0,
        max_name_bytes: int = 255,
        subtype: str = "",
        journal: Path | None = None,
    ) -> None:
        self.backing, self.point = backing, point
        self._options = [
            f"--delay-us={delay_us}",
            f"--cache-seconds={cache_seconds}",
            f"--max-name-bytes={max_name_bytes}",
            f"--subtype={subtype}",
            *([f"--journal={journal}"] if journal else []),
        ]
        descriptor, self._shared = tempfile.mkstemp(prefix="counting-fs-")
        os.truncate(descriptor, _COUNTS.size)
        self._map = mmap.mmap(descriptor, _COUNTS.size)
        os.close(descriptor)
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.unmount()
        for process in self._processes:
            process.kill()
            process.wait(30)
        self._map.close()
        os.unlink(self._shared)

    def mount(self) -> None:
        """Start the process and wait until it serves."""
        self.point.mkdir(parents=True, exist_ok=True)
        self.backing.mkdir(parents=True, exist_ok=True)
        outside = os.stat(self.point).st_dev
        command = [
            sys.executable,
            __file__,
            str(self.backing),
            str(self.point),
            self._shared,
            *self._options,
        ]
        process = subprocess.Popen(command)
        self._processes.append(process)
        until = time.monotonic() + 120
        while os.stat(self.point).st_dev == outside:
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{self.point} was not mounted: {command}")
            time.sleep(0.01)

    def unmount(self, *, lazily: bool = False) -> None:
        """Take the file system away; `lazily` also while files in it are open."""
        subprocess.run(
            ["fusermount3", "-u", *(["-z"] if lazily else []), str(self.point)], check=True
        )
        if not lazily:
            self._processes[-1].wait(30)

    def kill(self) -> None:
        """Kill the process, so that the mount point answers with an error until it is unmounted."""
        self._processes[-1].kill()
        self._processes[-1].wait(30)

    def counts(self) -> dict[str, int]:
        """Requests so far, by operation."""
        return dict(zip(OPERATIONS, _COUNTS.unpack(self._map[:]), strict=True))

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """Requests since then; operations without any are left out."""
        return {
            name: count - before[name]
            for name, count in self.counts().items()
            if count != before[name]
        }


class _Passthrough:
    """The operations that libfuse calls, through mfusepy: each counts, waits and passes on."""

    use_ns = True

    def __init__(
        self,
        root: str,
        counts: mmap.mmap,
        delay_seconds: float,
        max_name_bytes: int,
        journal: str,
    ) -> None:
        self._journal = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT) if journal else -1
        self._max_name_bytes = max_name_bytes
        self._root = root
        self._counts = (ctypes.c_uint64 * len(OPERATIONS)).from_buffer(counts)
        self._lock = threading.Lock()
        self._delay = delay_seconds

    def _path(self, operation: str, path: str) -> str:
        with self._lock:
            self._counts[OPERATIONS.index(operation)] += 1
        if self._delay:
            time.sleep(self._delay)
        return self._root + path

    def _record(self, operation: str, path: str, offset: int = 0, data: bytes = b"") -> None:
        if self._journal >= 0:
            record = msgspec.msgpack.encode(FileChange(operation, path, offset, data))
            os.write(self._journal, len(record).to_bytes(4, "little") + record)

    def _check_name(self, path: str) -> None:
        if len(os.path.basename(path)) > self._max_name_bytes:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._path("getattr", path))
        attributes = {name: getattr(status, name) for name in _STAT_FIELDS}
        for name in ("st_atime", "st_mtime", "st_ctime"):
            attributes[name] = getattr(status, f"{name}_ns")
        return attributes

    def opendir(self, path: str) -> int:
        os.stat(self._path("opendir", path))
        return 0

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._path("readdir", path))]

    def open(self, path: str, flags: int) -> int:
        return os.open(self._path("open", path), flags & ~os.O_DIRECT)

    def create(self, path: str, mode: int, flags: int) -> int:
        self._check_name(path)
        self._record("create", path)
        return os.open(self._path("create", path), flags & ~os.O_DIRECT | os.O_CREAT, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._path("read", path)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._path("write", path)
        self._record("write", path, offset, data)
        return os.pwrite(fh, data, offset)

    def flush(self, path: str, fh: int) -> int:
        self._path("flush", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self._record("truncate", path, length)
        os.truncate(self._path("truncate", path), length)
        return 0

    def unlink(self, path: str) -> int:
        self._record("unlink", path)
        os.unlink(self._path("unlink", path))
        return 0

    def rename(self, old: str, new: str) -> int:
        self._check_name(new)
        self._record("rename", old, data=new.encode())
        os.rename(self._path("rename", old), self._root + new)
        return 0

    def link(self, target: str, source: str) -> int:
        os.link(self._path("link", source), self._root + target)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self._path("mkdir", path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self._path("rmdir", path))
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        os.utime(self._path("utimens", path), ns=times)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._path("fsync", path)
        self._record("fsync", path)
        os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._path("fsyncdir", path)
        return 0

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._path("statfs", path))
        names = (
            "f_bsize",
            "f_frsize",
            "f_blocks",
            "f_bfree",
            "f_bavail",
            "f_files",
            "f_ffree",
            "f_favail",
            "f_namemax",
        )
        return {name: getattr(status, name) for name in names}


def _serve() -> None:
    from hicache_conformance.injectors.fuse_fs import load_mfusepy

    mfusepy = load_mfusepy()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backing")
    parser.add_argument("point")
    parser.add_argument("counts")
    parser.add_argument("--delay-us", type=int, default=0)
    parser.add_argument("--cache-seconds", type=float, default=3600.0)
    parser.add_argument("--max-name-bytes", type=int, default=255)
    parser.add_argument("--subtype", default="")
    parser.add_argument("--journal", default="")
    options = parser.parse_args()
    # The default slack of 50 us would make a delay of 200 us one of 250 us; threads inherit it.
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    with open(options.counts, "r+b") as shared:
        counts = mmap.mmap(shared.fileno(), _COUNTS.size)
    operations = type("Operations", (_Passthrough, mfusepy.Operations), {})(
        os.path.abspath(options.backing),
        counts,
        options.delay_us / 1e6,
        options.max_name_bytes,
        options.journal,
    )
    mfusepy.log.setLevel("CRITICAL")
    seconds = options.cache_seconds
    try:
        mfusepy.FUSE(
            operations,
            options.point,
            foreground=True,
            attr_timeout=seconds,
            entry_timeout=seconds,
            negative_timeout=0,
            **({"subtype": options.subtype} if options.subtype else {}),
        )
    except RuntimeError as error:
        sys.exit(
            f"cannot mount: {error} ({errno.errorcode.get(error.args[0] if error.args else 0, '')})"
        )


if __name__ == "__main__":
    _serve()
