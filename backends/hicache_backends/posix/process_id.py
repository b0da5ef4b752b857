"""Identity of a process across machines and boots, and whether it has exited."""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import os
from typing import NamedTuple

PID_SCOPE_PATTERN = "[a-z2-7]{8}"


class ProcessId(NamedTuple):
    """Identity of a process, unique across machines and boots."""

    pid_scope: str
    """A machine since it was booted, and a PID namespace on it: where `pid` is unique."""
    pid: int
    started: int
    """Clock ticks from boot to the start of the process: a PID is used again, the two together are
    not."""


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
