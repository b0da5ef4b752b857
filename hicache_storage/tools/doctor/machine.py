"""Checks of the machine and its limits, for all drivers."""

from __future__ import annotations

import ctypes
import platform
import resource
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.doctor.finding import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

ENOUGH_FILES: Final = 4096
"""Open files that an engine and its connections do not use up."""
CAP_IPC_LOCK: Final = 14
TIME_ERROR: Final = 5
"""Result of adjtimex(2) while the clock is not synchronised."""

_THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def check_python(target: DoctorTarget) -> Iterator[Finding]:
    """Report the versions of Python and the SDK."""
    yield ok(
        "python",
        f"{platform.python_version()}, hicache-storage {version('hicache-storage')}, contract "
        "HiCacheStorage v2",
    )


def check_torch(target: DoctorTarget) -> Iterator[Finding]:
    """Check torch, and its access to the GPUs."""
    try:
        import torch
    except ImportError as error:
        yield fail("torch", f"cannot be imported: {error}", "pip install torch")
        return
    yield ok("torch", str(torch.__version__))
    # Some drivers of the device exist without a device; the nodes do not.
    devices = sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*"))
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        yield ok("gpu", ", ".join(names))
    elif devices:
        fix = "install a torch built for CUDA, and a driver that it supports; `python -m torch.utils.collect_env` says which"
        yield warn(
            "gpu",
            f"{', '.join(devices)} present, and this torch cannot use it: host pools are not locked",
            fix,
        )
    else:
        yield ok("gpu", "none; storing and loading pages needs none")


def check_locked_memory(target: DoctorTarget) -> Iterator[Finding]:
    """Check RLIMIT_MEMLOCK against the memory that an engine locks.

    It limits RDMA registration and mlock(2), not memory that CUDA locks.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fix = "ulimit -l unlimited (containers: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
    if soft == resource.RLIM_INFINITY:
        yield ok("locked memory", "no limit")
    # Before the comparison: the kernel does not apply the limit to such a process.
    elif _has_capability(CAP_IPC_LOCK):
        yield ok(
            "locked memory",
            f"limit {size(soft)}, which does not apply to this process (CAP_IPC_LOCK)",
        )
    elif target.pinned_bytes is not None and soft < target.pinned_bytes:
        yield fail(
            "locked memory",
            f"limit {size(soft)}; {size(target.pinned_bytes)} of host pools do not fit",
            fix,
        )
    elif target.pinned_bytes is not None:
        yield ok(
            "locked memory", f"limit {size(soft)}; {size(target.pinned_bytes)} of host pools fit"
        )
    else:
        yield warn(
            "locked memory",
            f"limit {size(soft)}; host pools beyond it cannot be registered for RDMA",
            fix,
        )


def check_open_files(target: DoctorTarget) -> Iterator[Finding]:
    """Check RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        yield ok("open files", f"limit {soft}")
    else:
        fix = "ulimit -n 65536" + (
            ""
            if hard == resource.RLIM_INFINITY or hard >= 65536
            else " (as root: the hard limit is low)"
        )
        yield warn(
            "open files",
            f"limit {soft}; an engine and its connections can use them up, and stored pages "
            "become misses",
            fix,
        )


def check_huge_pages(target: DoctorTarget) -> Iterator[Finding]:
    """Check transparent huge pages, which host pools request with madvise(2)."""
    try:
        text = _THP.read_text()
    except OSError:
        yield warn(
            "huge pages",
            "this kernel has none: the first touch of a host pool takes longer",
            "use another kernel",
        )
        return
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "never":
        fix = f"echo madvise > {_THP}"
        yield warn(
            "huge pages",
            "switched off: the first touch of a host pool takes more than twice as long",
            fix,
        )
    else:
        yield ok("huge pages", mode)


def check_clock(target: DoctorTarget) -> Iterator[Finding]:
    """Check that the clock is synchronised: nodes that share a store compare times of use."""
    libc = ctypes.CDLL(None, use_errno=True)
    # struct timex has 208 bytes; all zeros read the state and change nothing.
    state = libc.adjtimex(ctypes.create_string_buffer(512))
    if state < 0:
        yield warn(
            "clock", "its state cannot be read in this container", "check on the host: timedatectl"
        )
    elif state == TIME_ERROR:
        yield warn(
            "clock",
            "not synchronised; recency and leases of nodes that share a store drift apart",
            "run chrony or systemd-timesyncd",
        )
    else:
        yield ok("clock", "synchronised")


def size(count: int) -> str:
    """Format a number of bytes with a binary unit."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if value >= 10 or unit == "B" else f"{value:.1f} {unit}"


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
