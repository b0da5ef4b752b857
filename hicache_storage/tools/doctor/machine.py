"""Checks of the machine and its limits, for all drivers."""

from __future__ import annotations

import platform
import resource
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.doctor.finding import fail, ok, warn
from hicache_storage.tools.options import size_text

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

ENOUGH_FILES: Final = 4096
"""Open files that an engine and its connections do not use up."""
CAP_IPC_LOCK: Final = 14


def check_python(target: DoctorTarget) -> Iterator[Finding]:
    """Report the versions of Python and the SDK."""
    installed = f"hicache-storage {version('hicache-storage')}, contract HiCacheStorage v2"
    yield ok("python", f"{platform.python_version()}, {installed}")


def check_torch(target: DoctorTarget) -> Iterator[Finding]:
    """Check that torch can be imported."""
    try:
        import torch
    except ImportError as error:
        yield fail("torch", f"cannot be imported: {error}", "pip install torch")
        return
    yield ok("torch", str(torch.__version__))


def check_locked_memory(target: DoctorTarget) -> Iterator[Finding]:
    """Check RLIMIT_MEMLOCK, which limits RDMA registration and mlock(2), not what CUDA locks."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fix = "ulimit -l unlimited (containers: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
    if soft == resource.RLIM_INFINITY:
        yield ok("locked memory", "no limit")
    # Before the comparison: the kernel does not apply the limit to such a process.
    elif _has_capability(CAP_IPC_LOCK):
        detail = f"limit {size_text(soft)}, which does not apply to this process (CAP_IPC_LOCK)"
        yield ok("locked memory", detail)
    else:
        detail = f"limit {size_text(soft)}; host pools beyond it cannot be registered for RDMA"
        yield warn("locked memory", detail, fix)


def check_open_files(target: DoctorTarget) -> Iterator[Finding]:
    """Check RLIMIT_NOFILE."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= ENOUGH_FILES:
        yield ok("open files", f"limit {soft}")
    else:
        low = hard != resource.RLIM_INFINITY and hard < 65536
        fix = "ulimit -n 65536" + " (as root: the hard limit is low)" * low
        detail = "an engine and its connections can use them up, and stored pages become misses"
        yield warn("open files", f"limit {soft}; {detail}", fix)


def _has_capability(number: int) -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False
