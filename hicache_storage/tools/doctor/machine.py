"""Checks of the machine and its limits, for all drivers."""

from __future__ import annotations

import platform
import resource
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from hicache_storage.tools.doctor.finding import fail, ok, warn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_storage.tools.doctor.finding import DoctorTarget, Finding

ENOUGH_FILES: Final = 4096
"""Open files that an engine and its connections do not use up."""


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
