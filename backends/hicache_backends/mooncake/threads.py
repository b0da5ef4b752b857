"""Number of threads for the transfers of one call: one copies while another transfers."""

from __future__ import annotations

from typing import Final

MAX_HELPERS: Final = 8
"""Threads of one storage, for all calls together. If all are busy or hung, a call runs in its
caller alone."""
MAX_THREADS: Final = 4
"""Threads for one call, including its caller."""
LARGE_BYTES: Final = 1 << 20
"""From this object size on, more than two threads are faster."""


def threads_for(size: int) -> int:
    """Number of threads for the transfer of objects of `size` bytes over TCP.

    One prepares or copies while the other's transfer goes on. For large objects that takes longer
    than the library needs to begin the next transfer, so two more keep its connections busy.
    """
    return MAX_THREADS if size >= LARGE_BYTES else 2
