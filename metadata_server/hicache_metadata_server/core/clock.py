"""Time that leases, quarantines and pins are measured by."""

from __future__ import annotations

import time


class SteadyClock:
    """Seconds since 1970 as they were at the start, and from there on as they pass: setting the
    machine's clock ends no lease early."""

    def __init__(self) -> None:
        self._begin = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._begin + time.monotonic()
