"""How the C library keeps large blocks of memory."""

from __future__ import annotations

import ctypes
from typing import Final

MMAP_THRESHOLD: Final = -3
"""As glibc's malloc.h numbers its options."""
LARGE_BYTES: Final = 1 << 20


def keep_large_blocks_apart() -> None:
    """Let each large block have its own mapping, however many of them come and go.

    The columns of a scope grow for as long as the server runs. glibc lets blocks that often grow
    move into the common heap, where each move leaves a hole: a seventh of all memory with a million
    pages. Of another C library nothing is asked.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(MMAP_THRESHOLD, LARGE_BYTES)


def give_back() -> None:
    """Give the kernel what was freed: what a start needed beside the pages themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
