"""Refused calls of a bridge: counted, and logged once for each reason."""

from __future__ import annotations

import logging

from hicache_storage.objects.lifecycle import ForkAware

logger = logging.getLogger(__name__)

MAX_REASONS = 64
"""Limit of the reasons that are logged as errors.

Further ones are counted, and logged at debug level.
"""


class RefusedCalls(ForkAware):
    """Counter and log of the calls that were answered without the storage. Thread-safe."""

    def __init__(self, engine: str) -> None:
        self.count = 0
        self._engine = engine
        self._reasons: set[tuple[str, str, str]] = set()
        super().__init__()

    def note(self, call: str, pool: str, error: BaseException) -> None:
        """Count a refused call, and log a reason that is new."""
        reason = (call, pool, f"{type(error).__name__}: {error}")
        with self._lock:
            self.count += 1
            # An engine repeats a refused call for every batch: one line for each reason, and no
            # more reasons than the set may hold.
            is_new = reason not in self._reasons and len(self._reasons) < MAX_REASONS
            if is_new:
                self._reasons.add(reason)
        level = logging.ERROR if is_new else logging.DEBUG
        where = f"{call}, pool {pool}" if pool else call
        logger.log(level, "hicache bridge for %s: refused %s: %s", self._engine, where, reason[2])
