"""Checks of the endpoints that a driver's options name: directories and servers."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
import time
from typing import TYPE_CHECKING, Final

from hicache_storage.plugins import registry
from hicache_storage.spec import parse_bytes
from hicache_storage.tools.doctor.finding import Finding, fail, ok, warn
from hicache_storage.tools.doctor.round_trip import usable_options
from hicache_storage.tools.options import directories, nearest_directory, servers, size_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from hicache_storage.tools.doctor.finding import DoctorTarget

LITTLE_SPACE_BYTES: Final = 1 << 30
"""Free space below which the check warns."""


def check_directories(target: DoctorTarget) -> Iterator[Finding]:
    """Check that each directory exists and is writable, its free space, and its file system."""
    if isinstance(options := usable_options(target), Finding):
        return
    for option, path in directories(options).items():
        check = f"{target.driver}: {option}"
        place = nearest_directory(path)
        if not path.is_dir() and path.exists():
            yield fail(check, f"{path} is no directory", f"choose another {option}")
        elif not path.parent.is_dir():
            # Drivers do not create it either: a missing mount must not be replaced by an empty
            # directory.
            fix = "mount the file system that belongs there, or make the directory"
            yield fail(check, f"{path.parent} does not exist", fix)
        elif not os.access(place, os.W_OK | os.X_OK):
            yield fail(check, f"{place} is not writable for this user", f"chown or chmod {place}")
        else:
            yield from _space(check, place, _capacity(target, options))
            yield from _file_system(check, place)


def check_servers(target: DoctorTarget) -> Iterator[Finding]:
    """Check that each server named by an option, as URL or `host:port`, accepts connections."""
    if isinstance(options := usable_options(target), Finding):
        return
    for option, addresses in servers(options).items():
        for host, port in addresses:
            check = f"{target.driver}: {option}"
            started = time.perf_counter()
            try:
                socket.create_connection((host, port), timeout=target.deadline_seconds).close()
            except OSError as error:
                detail = f"{host}:{port} cannot be reached: {error.strerror or error}"
                fix = f"start the server, open the firewall, or correct {option}"
                yield fail(check, detail, fix)
            else:
                milliseconds = (time.perf_counter() - started) * 1e3
                yield ok(check, f"{host}:{port} accepts connections ({milliseconds:.1f} ms)")


def _space(check: str, place: Path, capacity: int | None) -> Iterator[Finding]:
    usage, inodes = shutil.disk_usage(place), os.statvfs(place)
    # Some file systems have no fixed number of inodes and report 0.
    if inodes.f_files and not inodes.f_favail:
        yield fail(
            check, f"{place}: no inode is free", "remove files, or choose another file system"
        )
    if capacity is not None and capacity > usage.total:
        fix = "a smaller capacity, or a larger file system"
        yield fail(
            check,
            f"capacity {size_text(capacity)} on a file system of {size_text(usage.total)}",
            fix,
        )
    elif usage.free < LITTLE_SPACE_BYTES:
        yield warn(
            check,
            f"{place}: {size_text(usage.free)} free of {size_text(usage.total)}",
            "free some space, or choose another directory",
        )
    else:
        yield ok(check, f"{place}: {size_text(usage.free)} free of {size_text(usage.total)}")


def _file_system(check: str, place: Path) -> Iterator[Finding]:
    try:
        # Without a name, where the file system can make such a file.
        with tempfile.TemporaryFile(prefix=".hicache-doctor-", dir=place) as file:
            file.write(b"\0")
            file.flush()
            direct = _takes_direct_io(file.fileno())
    except OSError as error:
        detail = f"cannot write in {place}: {error.strerror or error}"
        yield fail(check, detail, "mount it writable, or choose another directory")
        return
    if direct:
        yield ok(check, "takes O_DIRECT")
    else:
        fix = "use a local file system such as ext4 or xfs where cold reads matter"
        yield warn(check, "refuses O_DIRECT: reads go through the page cache", fix)


def _takes_direct_io(descriptor: int) -> bool:
    try:
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True


def _capacity(target: DoctorTarget, options: Mapping[str, object]) -> int | None:
    spec = registry().get(target.driver or "")
    value = options.get(spec.capacity_option) if spec.capacity_option else None
    return parse_bytes(value) if isinstance(value, (int, str)) else None
