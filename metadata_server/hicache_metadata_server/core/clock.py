"""The clock of leases, quarantines and pins."""

from __future__ import annotations

import time


class SteadyClock:
    """Wall-clock time at the start, advanced by the monotonic clock.

    Times are seconds since 1970, so they can be compared after a restart. A step of the machine's
    clock ends no lease early.
    """

    def __init__(self) -> None:
        self._begin = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._begin + time.monotonic()
