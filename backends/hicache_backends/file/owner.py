"""Who is writing a temporary file, and whether it is still alive."""

from __future__ import annotations

import base64
import functools
import hashlib
import os

from hicache_backends.file.names import Owner


def this_process() -> Owner:
    """The process that asks."""
    return Owner(_place(), os.getpid(), _started(os.getpid()) or 0)


def is_dead(owner: Owner) -> bool:
    """Whether a process is known to have ended; `False` where that cannot be told from here."""
    return owner.place == _place() and _started(owner.pid) != owner.started


@functools.cache
def _place() -> str:
    """Where PIDs mean what they mean here: this machine since it was booted, and the PID namespace of its container."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        parts = boot + str(os.stat("/proc/self/ns/pid").st_ino).encode()
    except OSError:
        # Without /proc nobody can tell who lives: a place of its own, and leftovers go by their age.
        parts = os.urandom(8)
    return base64.b32encode(hashlib.blake2b(parts, digest_size=5).digest()).decode().lower()


def _started(pid: int) -> int | None:
    """Clock ticks from boot to the start of a process, None if there is no such process or no way to tell."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The second field, the command's name in parentheses, may hold anything.
            fields = file.read().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
