"""Names and paths in a store, and the identities of writers and processes in these names.

```
<path>/hicache-file-1/
    stamp/                        the change counter: an empty directory, its mtime is the value
    writers/                      a cursor for each writer and namespace: an empty file, whose name
                                  holds its last events; and the birth mark of the store
    retired/                      cursors of idle writers whose bundles are still there
    temporary/                    files being written
    <namespace>/namespace.json    a description of the pages, for people
    <namespace>/bundles/          the pages; a claimed bundle has a name that ends in .claimed
    <namespace>/events/           the event logs of its writers, a cache (`events.py`)
    <namespace>/removals/         what they remember of removed pages (`removal_history.py`)
```

A name that does not match a pattern exactly is not the driver's, and its file is left alone.
Numbers are hexadecimal without leading zeros, so that every name has one spelling.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

from hicache_backends.posix.directories import list_directory, make_last

FORMAT = "hicache-file-1"
"""The layout's version is a directory, so that two versions can share a path without seeing each
other."""

PID_SCOPE_PATTERN = "[a-z2-7]{8}"
WRITER_PATTERN = "[a-z2-7]{10}"
NAMESPACE_PATTERN = "[0-9a-f]{32}"
HEX = "(?:0|[1-9a-f][0-9a-f]{0,15})"

MAX_FILE_BYTES = 1 << 44
"""Names with a larger length are ignored: system calls refuse such offsets. In bytes."""

MAX_USUAL_BYTES = 128 << 20
"""Greater lengths in names are compared with the files: only of larger pages does a writer make
larger bundles. In bytes."""

MAX_CREATED_US = 1 << 53
"""Names with a later time (the year 2255) are ignored: system calls take nanoseconds."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def random_writer() -> str:
    """A new name for a writer: 50 random bits."""
    return "".join(_ALPHABET[byte % 32] for byte in os.urandom(10))


BIRTH_NAME = re.compile(f"{WRITER_PATTERN}\\.birth")
"""Name of a birth mark, which tells a store from one made again in its place."""

NAMESPACE_NAME = re.compile(NAMESPACE_PATTERN)


class StorePaths:
    """Paths below a store's directory.

    Args:
        asks_server: directories are listed past the caches of a network mount.
    """

    def __init__(self, path: str, *, asks_server: bool = False) -> None:
        self._path = path
        self.asks_server = asks_server
        self.root = str(Path(path) / FORMAT)
        self.counter = f"{self.root}/stamp"
        self.writers = f"{self.root}/writers"
        self.retired = f"{self.root}/retired"
        self.temporaries = f"{self.root}/temporary"

    def create(self) -> None:
        """Make the directories that are missing; several processes may do so at once."""
        fresh = not os.path.exists(self.writers)
        make_last(self._path)
        for path in (self.writers, self.temporaries, self.counter):
            os.makedirs(path, exist_ok=True)
        if fresh:
            self.mark_birth()

    def mark_birth(self) -> None:
        """Give the store a birth mark. Several marks made at once do no harm."""
        path = f"{self.writers}/{random_writer()}.birth"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))

    def list_names(self, path: str) -> list[str]:
        """Names of the files in a directory of the store; empty if it is missing.

        Raises:
            OSError: it cannot be listed.
        """
        return list_directory(path, asks_server=self.asks_server)

    def bundles(self, namespace: str) -> str:
        return f"{self.root}/{namespace}/bundles"

    def events(self, namespace: str) -> str:
        return f"{self.root}/{namespace}/events"

    def removals(self, namespace: str) -> str:
        return f"{self.root}/{namespace}/removals"

    def description(self, namespace: str) -> str:
        return f"{self.root}/{namespace}/namespace.json"

    def namespaces(self) -> list[str]:
        """The namespaces that exist."""
        with contextlib.suppress(FileNotFoundError):
            return [name for name in os.listdir(self.root) if NAMESPACE_NAME.fullmatch(name)]
        return []


class ProcessId(NamedTuple):
    """Identity of a process, unique across machines and boots."""

    pid_scope: str
    """A machine since it was booted, and a PID namespace on it: where `pid` is unique."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process: a PID is used again, the two together are
    not."""

    def __str__(self) -> str:
        return f"{self.pid_scope}-{self.pid:x}-{self.started:x}"


def current_process() -> ProcessId:
    """The identity of this process."""
    started = 0
    # Without /proc it stays 0: the scope is random then, and nobody compares the number.
    with contextlib.suppress(OSError):
        started = _started(os.getpid()) or 0
    return ProcessId(_pid_scope(), os.getpid(), started)


def has_exited(process: ProcessId) -> bool | None:
    """Return whether a process has exited; None if that cannot be determined from here."""
    if process.pid_scope != _pid_scope():
        return None
    try:
        return _started(process.pid) != process.started
    except OSError:
        # A /proc that hides the processes of other users (hidepid) looks as if there were none.
        return None if _exists(process.pid) else True


@functools.cache
def _pid_scope() -> str:
    """The scope in which a PID and a start time identify a process.

    That is this machine since it was booted, and the namespaces of PIDs and of times of its
    container.
    """
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            raise OSError("this /proc is about another namespace of PIDs")
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            parts = file.read()
        parts += str(os.stat("/proc/self/ns/pid").st_ino).encode()
        with contextlib.suppress(FileNotFoundError):
            parts += b"/%d" % os.stat("/proc/self/ns/time").st_ino
    except OSError:
        # Without /proc no process can be checked: a scope of its own, so that age decides.
        parts = os.urandom(8)
    return base64.b32encode(hashlib.blake2b(parts, digest_size=5).digest()).decode().lower()


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process; None for a zombie.

    Raises:
        OSError: there is no such process, or it cannot be seen.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The second field, the command's name in parentheses, may hold anything.
        fields = file.read().rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _exists(pid: int) -> bool:
    """Return whether any process has this PID; it may have been used again."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # Another user's.
    return True
