"""The heap of a server's process; with another C library than glibc nothing is done."""

from __future__ import annotations

import ctypes
from typing import Final

MMAP_THRESHOLD: Final = -3
"""M_MMAP_THRESHOLD in glibc's malloc.h."""
LARGE_BYTES: Final = 1 << 20


def keep_large_blocks_apart() -> None:
    """Give each large block of memory its own mapping while the process runs.

    The columns of a scope grow with its pages. By default glibc raises its threshold each time a
    mapped block is freed, so that later blocks come from the heap, where each growth leaves a hole:
    a seventh of all memory with a million pages. Setting the threshold stops that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def trim_heap() -> None:
    """Return to the kernel the memory that a recovery or a takeover needed beyond the pages.

    It takes some milliseconds, in which other threads go on.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
