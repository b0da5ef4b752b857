"""Who is writing a temporary file, and whether it is still alive."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
from typing import NamedTuple

PID_SCOPE_PATTERN = "[a-z2-7]{8}"


class ProcessId(NamedTuple):
    """A process, told apart from every other one of any machine at any time."""

    pid_scope: str
    """Stands for a machine since it was booted, and a PID namespace on it: where `pid` means something."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process: a PID is used again, the two together are not."""


def current_process() -> ProcessId:
    """The process that asks."""
    started = 0
    with contextlib.suppress(OSError):
        started = _started(os.getpid()) or 0
    return ProcessId(_pid_scope(), os.getpid(), started)


def has_exited(process: ProcessId) -> bool | None:
    """Whether a process has ended; None where that cannot be told from here, and leftovers go by their age."""
    if process.pid_scope != _pid_scope():
        return None
    try:
        return _started(process.pid) != process.started
    except OSError:
        # A /proc that hides the processes of other users (hidepid) looks as if there were none.
        return None if _exists(process.pid) else True


@functools.cache
def _pid_scope() -> str:
    """Where PIDs and times of start mean what they mean here.

    That is this machine since it was booted, and the namespaces of PIDs and of times of its container.
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
        # Without /proc nobody can tell who lives: a place of its own, and leftovers go by their age.
        parts = os.urandom(8)
    return base64.b32encode(hashlib.blake2b(parts, digest_size=5).digest()).decode().lower()


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, None if it has ended and nobody has asked for its status yet.

    Raises:
        OSError: there is no such process, or it cannot be seen.
    """
    with open(f"/proc/{pid}/stat", "rb") as file:
        # The second field, the command's name in parentheses, may hold anything.
        fields = file.read().rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def _exists(pid: int) -> bool:
    """Whether any process has this PID; it may be another one that has it now."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # Another user's.
    return True
