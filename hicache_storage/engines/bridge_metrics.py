"""Counters of a bridge: refused calls, and the bandwidth of the served ones."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.objects.lifecycle import begin_in_children
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Generator

    from hicache_storage.spec import HiCacheStorage

logger = logging.getLogger(__name__)

MAX_REASONS = 64
"""Limit of the reasons that are logged as errors.

Further ones are counted, and logged at debug level.
"""


class RefusedCalls:
    """Counter and log of the calls that were answered without the storage. Thread-safe."""

    def __init__(self, engine: str) -> None:
        self.count = 0
        self._engine = engine
        self._reasons: set[tuple[str, str, str]] = set()
        self.begin_in_child()
        begin_in_children(self)

    def begin_in_child(self) -> None:
        """Replace the lock: a thread of the parent may hold it."""
        self._lock = threading.Lock()

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


@dataclass(frozen=True, slots=True)
class BatchSample:
    """Pages, bytes and duration of one call."""

    pages: int
    bytes: int
    seconds: float

    @property
    def gigabytes_per_second(self) -> float:
        """Bandwidth in 10^9 bytes a second; 0 for a call without duration."""
        return self.bytes / 1e9 / self.seconds if self.seconds > 0 else 0.0


class BandwidthMeter:
    """Bandwidth of KV batches, by the storage's own counters.

    Thread-safe for one reader beside one writer.

    A page that a set has found stored counts neither as a page nor as bytes.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        self._batches: dict[bool, list[BatchSample]] = {False: [], True: []}
        self.begin_in_child()
        begin_in_children(self)

    def begin_in_child(self) -> None:
        """Replace the lock: a thread of the parent may hold it."""
        self._lock = threading.Lock()

    @contextmanager
    def measured(self, storage: HiCacheStorage, *, writes: bool) -> Generator[None]:
        """Measure the call within the `with` block, which reads or writes KV."""
        if not self._enabled:
            yield
            return
        pages, size = _moved(storage, writes=writes)
        started = time.perf_counter()
        yield
        seconds = time.perf_counter() - started
        pages_after, size_after = _moved(storage, writes=writes)
        # A call that moved nothing has no bandwidth.
        if pages_after > pages:
            with self._lock:
                self._batches[writes].append(
                    BatchSample(pages_after - pages, size_after - size, seconds)
                )

    def drain(self, *, writes: bool) -> list[BatchSample]:
        """Return and forget the batches measured so far."""
        with self._lock:
            batches = self._batches[writes]
            self._batches[writes] = []
        return batches


def _moved(storage: HiCacheStorage, *, writes: bool) -> tuple[int, int]:
    stats = storage.get_stats().pools.get(PoolName.KV)
    if stats is None:
        return 0, 0
    return (
        (stats.pages_written, stats.bytes_written)
        if writes
        else (stats.pages_read, stats.bytes_read)
    )
