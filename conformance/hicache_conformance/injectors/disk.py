"""The injector `disk`: a directory on a FUSE pass-through file system that injects faults."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import importlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from ctypes.util import find_library
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

from hicache_conformance.injectors.injector import (
    PATIENCE_SECONDS,
    ActiveFaults,
    ProcessInjector,
    failure,
    find_fault,
    flipped,
    obey,
)
from hicache_conformance.model.case import Inconclusive
from hicache_conformance.model.fault_plan import Fault, FaultKind, FaultPlan

if TYPE_CHECKING:
    from collections.abc import Generator
    from multiprocessing.connection import Connection


def missing_for_disk() -> str:
    """Name the requirement of the injector `disk` that this machine lacks; empty if none."""
    if not os.path.exists("/dev/fuse"):
        return "/dev/fuse"
    if shutil.which("fusermount3") is None:
        return "fusermount3 (package fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "the module mfusepy (pip install 'hicache-storage[conformance]')"
    return ""


class DiskInjector(ProcessInjector):
    """A directory on a FUSE file system, mounted by a process of its own.

    Raises:
        Inconclusive: FUSE does not work here; the message says what is missing.
    """

    name: ClassVar[str] = "disk"

    def __init__(self) -> None:
        missing = missing_for_disk()
        if missing:
            raise Inconclusive(f"the injector 'disk' needs {missing}")
        # Not below pytest's directories: whoever removes those must not meet a mount that hangs.
        self._home = Path(tempfile.mkdtemp(prefix="hicache-injector-"))
        super().__init__(serve, self._home)
        try:
            self._wait_until_mounted()
        except BaseException:
            self.close()
            raise
        self._stores = 0
        self.renew()

    @property
    def tmp(self) -> Path:
        return self._home / "disk" / f"tmp{self._stores}"

    @property
    def backing(self) -> Path:
        """Directory behind `tmp`: the same files, without faults."""
        return self._home / "backing" / f"tmp{self._stores}"

    def apply(self, plan: FaultPlan) -> None:
        # Before the fault is injected: a page that the kernel has cached is read without asking
        # FUSE, and the lost handle would not show.
        if find_fault(plan.faults, FaultKind.LOST_DESCRIPTOR):
            for path in self.ask("paths"):
                # Opened anew, it is dropped from the kernel's cache.
                with contextlib.suppress(OSError):
                    os.close(os.open(f"{self._home}/disk{path}", os.O_RDONLY))
        super().apply(plan)

    def renew(self) -> None:
        # Another one, as servers and threads of the driver may use that of the case.
        self._stores += 1
        self.tmp.mkdir()

    def close(self) -> None:
        """Unmount, whatever hangs there."""
        # The process unmounts when its connection ends, and does so even if requests hang there.
        super().close()
        # Once more from here, where the process was killed before it had unmounted.
        unmount(self._home / "disk")
        shutil.rmtree(self._home, ignore_errors=True)

    def _wait_until_mounted(self) -> None:
        outside, until = self._home.stat().st_dev, time.monotonic() + PATIENCE_SECONDS
        point = self._home / "disk"
        # A mount point has another device than its parent; the process only says that it will
        # mount.
        while not point.exists() or point.stat().st_dev == outside:
            if not self.alive or time.monotonic() > until:
                log = self._home / "log"
                said = log.read_text("utf-8", "replace").strip() if log.exists() else ""
                raise Inconclusive(
                    f"the injector 'disk' cannot mount a FUSE file system here: "
                    f"{said[-200:] or 'no reason given'}"
                )
            time.sleep(0.005)


LAST_FILES_SECONDS: Final = 2.0
STAT_FIELDS: Final = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")


class Control:
    """State shared by the file system's threads and the one that obeys the injector."""

    def __init__(self) -> None:
        self.active = ActiveFaults()
        self.lost = frozenset[int]()
        """Handles that answer ESTALE for good."""
        self.open = dict[int, str]()
        """Paths by handle."""

    def apply(self, plan: FaultPlan) -> None:
        """Activate a plan."""
        if find_fault(plan.faults, FaultKind.LOST_DESCRIPTOR):
            self.lost |= frozenset(self.open)
        self.active = ActiveFaults(plan.faults)

    def heal(self) -> None:
        """End all faults, and release what hangs."""
        self.active.heal()

    def paths(self) -> list[str]:
        """Paths of the files that are open."""
        return list(set(self.open.values()))

    def count_injected(self) -> int:
        """Count the requests that a fault of the present plan has hit."""
        return self.active.injected_count

    def begin(self, operation: str, handle: int | None = None) -> list[Fault]:
        """Apply delays and errors to a request.

        Return the faults, for those that the operation itself has to apply.
        """
        # Read once: `inject` may replace it in the other thread while this operation is delayed.
        active = self.active
        faults = active.at(operation)
        active.apply(faults)
        if handle is not None and find_fault(faults, FaultKind.LOST_DESCRIPTOR):
            self.lost |= {handle}
        if handle in self.lost:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return faults

    @contextlib.contextmanager
    def change(
        self, operation: str, handle: int | None = None, *, retransmitted: str = "EIO"
    ) -> Generator[list[Fault]]:
        """Wrap a request that changes something.

        As `begin`, and afterwards the error of one that took effect.

        Args:
            retransmitted: error of a second request like it, after the first one took effect and
                its reply was lost.
        """
        faults = self.begin(operation, handle)
        yield faults
        applied = find_fault(faults, FaultKind.APPLIED)
        if applied is not None:
            raise failure(applied.error or retransmitted)


class Passthrough:
    """Operations that libfuse calls through mfusepy.

    `look`, `open`, `create`, `modify` (a file is opened for writing), `read`, `write`, `sync`,
    `name` and `remove`.
    """

    use_ns = True

    def __init__(self, root: str, control: Control) -> None:
        self._root = root
        self._control = control
        self._lately: deque[str] = deque(maxlen=64)
        """Files that were opened or got their names, the last one last."""

    def _at(self, operation: str, path: str) -> str:
        self._control.begin(operation)
        return self._root + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self._at("look", path))
        attributes = {name: getattr(status, name) for name in STAT_FIELDS}
        for name in ("st_atime", "st_mtime", "st_ctime"):
            attributes[name] = getattr(status, f"{name}_ns")
        return attributes

    def access(self, path: str, mode: int) -> int:
        if not os.access(self._at("look", path), mode):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))
        return 0

    def readlink(self, path: str) -> str:
        return os.readlink(self._at("look", path))

    def opendir(self, path: str) -> int:
        os.stat(self._at("look", path))
        return 0

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at("look", path))]

    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(self._at("look", path))
        return {name: getattr(status, name) for name in dir(status) if name.startswith("f_")}

    def open(self, path: str, flags: int) -> int:
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC)
        return self._opened(
            # Without O_DIRECT: libfuse's buffers are not aligned as the backing file system would
            # require.
            os.open(self._at("modify" if writes else "open", path), flags & ~os.O_DIRECT),
            path,
        )

    def create(self, path: str, mode: int, flags: int) -> int:
        with self._control.change("create") as faults:
            handle = os.open(self._root + path, flags & ~os.O_DIRECT | os.O_CREAT, mode)
            if find_fault(faults, FaultKind.APPLIED):
                # Nobody is told of the handle, so nobody would release it.
                os.close(handle)
        return self._opened(handle, path)

    def _opened(self, handle: int, path: str) -> int:
        self._control.open[handle] = path
        self._lately.append(path)
        # A number that was lost may be given out again.
        self._control.lost -= {handle}
        return handle

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        faults = self._control.begin("read", fh)
        content = os.pread(fh, size, offset)
        if find_fault(faults, FaultKind.WRONG_KEY):
            content = self._neighbours_bytes(path, content, offset)
        if find_fault(faults, FaultKind.SHORT_READ):
            content = content[: len(content) // 2]
        flip = find_fault(faults, FaultKind.BIT_FLIP)
        return flipped(content, flip.place) if flip else content

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        with self._control.change("write", fh) as faults:
            flip = find_fault(faults, FaultKind.BIT_FLIP)
            if flip:
                data = flipped(data, flip.place)
            if find_fault(faults, FaultKind.TORN_WRITE):
                os.pwrite(fh, data[: len(data) // 2], offset)
                # All of them are acknowledged although half was written, as by a disk that lost
                # power.
                return len(data)
            if find_fault(faults, FaultKind.SHORT_WRITE) and len(data) > 1:
                data = data[: len(data) // 2]
            return os.pwrite(fh, data, offset)

    def flush(self, path: str, fh: int) -> int:
        # A close() of the driver arrives as flush; network file systems report failed writes there.
        self._control.begin("sync", fh)
        return 0

    def release(self, path: str, fh: int) -> int:
        # Nobody waits for it, so it is neither counted nor struck.
        self._control.open.pop(fh, None)
        os.close(fh)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        with self._control.change("sync", fh):
            os.fsync(fh)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._control.begin("sync")
        return 0

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        with self._control.change("write"):
            os.truncate(self._root + path, length)
        return 0

    def unlink(self, path: str) -> int:
        with self._control.change("remove", retransmitted="ENOENT"):
            os.unlink(self._root + path)
        return 0

    def rmdir(self, path: str) -> int:
        with self._control.change("remove", retransmitted="ENOENT"):
            os.rmdir(self._root + path)
        return 0

    def rename(self, old: str, new: str) -> int:
        with self._control.change("name", retransmitted="ENOENT"):
            os.rename(self._root + old, self._root + new)
            self._lately.append(new)
        return 0

    def link(self, target: str, source: str) -> int:
        with self._control.change("name", retransmitted="EEXIST"):
            os.link(self._root + source, self._root + target)
        return 0

    def symlink(self, target: str, source: str) -> int:
        with self._control.change("name", retransmitted="EEXIST"):
            os.symlink(source, self._root + target)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        with self._control.change("name", retransmitted="EEXIST"):
            os.mkdir(self._root + path, mode)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at("name", path), mode)
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        os.chown(self._at("name", path), uid, gid)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        place = self._at("name", path)
        if times is None:
            os.utime(place)
        else:
            os.utime(place, ns=times)
        return 0

    def _neighbours_bytes(self, path: str, content: bytes, offset: int) -> bytes:
        """As many bytes of another file of the same length, if one was open lately."""
        size = os.stat(self._root + path).st_size
        for other in reversed(tuple(self._lately)):
            if other != path:
                with contextlib.suppress(OSError), Path(self._root + other).open("rb") as file:
                    if os.fstat(file.fileno()).st_size == size:
                        file.seek(offset)
                        return file.read(len(content))
        return content


def _listen(control: Control, pipe: Connection, home: Path, unmounted: threading.Event) -> None:
    """Obey until the connection ends, then take everything away and end the process."""
    try:
        obey(pipe, control)
    finally:
        control.active.heal()
        unmount(home / "disk")
        # Where somebody still has a file open, libfuse goes on serving it.
        unmounted.wait(LAST_FILES_SECONDS)
        shutil.rmtree(home, ignore_errors=True)
        os._exit(0)


def unmount(point: Path) -> None:
    """Take a mount away, also while files in it are open; harmless where there is none."""
    subprocess.run(
        ["fusermount3", "-u", "-z", "-q", str(point)], capture_output=True, check=False, timeout=30
    )


def load_mfusepy() -> Any:
    """Import mfusepy with libfuse 3; it would take libfuse 2 first, whose requests have 4 KiB.

    Raises:
        OSError: it has another version, or none.
    """
    if not os.environ.get("FUSE_LIBRARY_PATH"):
        os.environ["FUSE_LIBRARY_PATH"] = find_library("fuse3") or ""
    mfusepy: Any = importlib.import_module("mfusepy")
    if mfusepy.fuse_version_major != 3:
        found = f"{mfusepy.fuse_version_major}.{mfusepy.fuse_version_minor}"
        library = os.environ["FUSE_LIBRARY_PATH"]
        raise OSError(f"libfuse 3 is needed, and mfusepy has version {found}: {library!r}")
    return mfusepy


def serve(pipe: Connection, home: Path) -> None:
    """Mount the file system, and serve it until the connection ends."""
    # What libfuse says of a mount that fails.
    with (home / "log").open("w") as log:
        os.dup2(log.fileno(), 2)
    backing, point = home / "backing", home / "disk"
    for directory in (backing, point):
        directory.mkdir(parents=True, exist_ok=True)
    mfusepy = load_mfusepy()
    mfusepy.log.setLevel("CRITICAL")
    # As little slack as possible, because delays of a millisecond have to be that.
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    control = Control()
    operations: Any = type("Operations", (Passthrough, mfusepy.Operations), {})(
        str(backing), control
    )
    unmounted = threading.Event()
    listener = threading.Thread(target=_listen, args=(control, pipe, home, unmounted), daemon=True)
    listener.start()
    # Nothing is remembered by the kernel but file contents while a file is open: faults must be
    # seen by who asks next.
    mfusepy.FUSE(
        operations,
        str(point),
        foreground=True,
        attr_timeout=0,
        entry_timeout=0,
        negative_timeout=0,
        fsname="hicache-injector",
    )
    # The listener takes the directory away, and ends the process.
    unmounted.set()
    listener.join()
