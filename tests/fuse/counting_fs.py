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

import ctypes
import errno
import functools
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_conformance.injectors.disk import Passthrough

UNUSED = ("access", "readlink", "symlink", "chmod", "chown", "use_ns")
"""Operations of the pass-through file system that this one has not: each would be a request."""


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


class CountingMount(msgspec.Struct, dict=True):
    """The file system, mounted by a process of its own, which gets these fields."""

    backing: Path
    """The directory behind it."""
    point: Path
    """Where it is mounted; made if it is missing."""
    delay_us: int = 0
    """How long each request takes at least, in microseconds."""
    cache_seconds: float = 3600.0
    """How long the kernel believes names and attributes. Long, so that counts do not depend on the
    time."""
    max_name_bytes: int = 255
    """Longer names cannot be made."""
    subtype: str = ""
    """The mount's kind is `fuse.` and this."""
    journal: Path | None = None
    """File to which each change of a file is appended, for `file_changes`."""

    def __post_init__(self) -> None:
        self.requests = Path(f"{self.point}.requests")
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Self:
        self.mount()
        return self

    def __exit__(self, *_: object) -> None:
        self.unmount()
        for process in self._processes:
            process.kill()
            process.wait(120)
        self.requests.unlink()

    def mount(self) -> None:
        """Start the process and wait until it serves."""
        self.point.mkdir(parents=True, exist_ok=True)
        self.backing.mkdir(parents=True, exist_ok=True)
        outside = os.stat(self.point).st_dev
        command = [sys.executable, __file__, msgspec.json.encode(self, enc_hook=str)]
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
            self._processes[-1].wait(120)

    def kill(self) -> None:
        """Kill the process, so that the mount point answers with an error until it is unmounted."""
        self._processes[-1].kill()
        self._processes[-1].wait(120)

    def counts(self) -> dict[str, int]:
        """Requests so far, by operation."""
        return Counter(self.requests.read_text().split())

    def since(self, before: dict[str, int]) -> dict[str, int]:
        """Requests since then; operations without any are left out."""
        return Counter(self.counts()) - Counter(before)


class _Counting:
    """Records and delays the requests of a pass-through file system."""

    def __init__(self, inner: Passthrough, mount: CountingMount) -> None:
        self._inner, self._mount = inner, mount
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._journal = os.open(mount.journal, flags) if mount.journal else -1
        self._requests = os.open(mount.requests, flags)

    def operation(self, name: str) -> Callable[..., Any]:
        """The operation that libfuse calls, as a method of the class that mfusepy wants."""

        # With its signature, from which mfusepy tells what to hand over.
        @functools.wraps(getattr(type(self._inner), name))
        def counted(_: object, path: str, *args: Any) -> Any:
            self._check_names(name, path, *args)
            if self._journal >= 0 and name in CHANGES:
                record = msgspec.msgpack.encode(FileChange(name, path, *CHANGES[name](*args)))
                os.write(self._journal, len(record).to_bytes(4, "little") + record)
            os.write(self._requests, f"{name}\n".encode())
            if self._mount.delay_us:
                time.sleep(self._mount.delay_us / 1e6)
            return getattr(self._inner, name)(path, *args)

        return counted

    def _check_names(self, name: str, path: str, *args: Any) -> None:
        made = {"create": path, "rename": args[0] if args else ""}.get(name, "")
        if len(os.path.basename(str(made))) > self._mount.max_name_bytes:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG))


CHANGES: dict[str, Callable[..., tuple[int, bytes]]] = {
    "create": lambda *_: (0, b""),
    "write": lambda data, offset, *_: (offset, data),
    "truncate": lambda length, *_: (length, b""),
    "unlink": lambda: (0, b""),
    "rename": lambda new: (0, new.encode()),
    "fsync": lambda *_: (0, b""),
}
"""The requests that are recorded: offset and data of each, from its arguments."""


def _serve() -> None:
    from hicache_conformance.injectors.disk import Control, Passthrough, load_mfusepy

    mfusepy = load_mfusepy()
    mount = msgspec.json.decode(
        sys.argv[1], type=CountingMount, dec_hook=lambda kind, text: kind(text)
    )
    # The default slack of 50 us would make a delay of 200 us one of 250 us; threads inherit it.
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)
    inner = Passthrough(str(mount.backing), Control())
    counting = _Counting(inner, mount)
    # No other operations: the kernel asks for none that the file system has not.
    names = [name for name in vars(Passthrough) if not name.startswith("_") and name not in UNUSED]
    methods: dict[str, Any] = {name: counting.operation(name) for name in names}
    methods |= {"use_ns": True, "release": lambda _, path, handle: inner.release(path, handle)}
    operations = type("Operations", (mfusepy.Operations,), methods)()
    mfusepy.log.setLevel("CRITICAL")
    try:
        mfusepy.FUSE(
            operations,
            str(mount.point),
            foreground=True,
            attr_timeout=mount.cache_seconds,
            entry_timeout=mount.cache_seconds,
            negative_timeout=0,
            **({"subtype": mount.subtype} if mount.subtype else {}),
        )
    except RuntimeError as error:
        sys.exit(
            f"cannot mount: {error} ({errno.errorcode.get(error.args[0] if error.args else 0, '')})"
        )


if __name__ == "__main__":
    _serve()
