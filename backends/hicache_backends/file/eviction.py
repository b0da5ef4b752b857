"""Which bundle goes first: the one that no process has used for longest."""

from __future__ import annotations

import heapq
import os
import time
from collections import deque
from typing import TYPE_CHECKING

from hicache_backends.file.clock import TOLERANCE_NS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.file.clock import Clock
    from hicache_backends.file.shelf import Bundle

STAT_SECONDS = 1.0
"""A file's mtime is not asked for again sooner."""

MANY_GONE = 1024
"""Fewer bundles that are gone are not worth going through all of them."""

_Entry = tuple[int, int, str, str, int, "Bundle"]


class EvictionQueue:
    """Bundles of all namespaces by their recency. Not thread-safe.

    Recency only grows, by uses in this process and by mtimes that others have set, so that an entry that has become
    stale is found when it is taken out, and goes back to its new place: one `stat` for each victim, not for each bundle.

    A time that lies ahead of the file server's clock comes from a node whose clock was wrong. It is not believed, or what
    that node wrote would outlive everything.

    Args:
        clock: the file server's.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[_Entry] = []
        self._fresh: deque[Bundle] = deque()
        self._gone = 0
        """How many have been removed since such were last looked for."""

    def bundles_added(self, bundles: Sequence[Bundle]) -> None:
        """Called by shelves, from any thread."""
        latest = self._clock.now_ns()
        for bundle in bundles:
            bundle.modified = min(bundle.modified, latest)
        self._fresh.extend(bundles)

    def bundles_removed(self, bundles: Sequence[Bundle]) -> None:
        """Called by shelves, from any thread; a bundle that is gone is noticed when its turn comes."""
        # Of several threads one may get lost, which delays what is done about it.
        self._gone += len(bundles)

    def forget_gone(self) -> None:
        """Let go of bundles that are gone, where there are many: their turn may never come."""
        self._take_fresh()
        if self._gone > max(MANY_GONE, len(self._heap) // 2):
            self._gone = 0
            self._heap = [entry for entry in self._heap if not entry[-1].gone]
            heapq.heapify(self._heap)

    def pop(self) -> Bundle | None:
        """Take out the next victim; None if there is none left."""
        self._take_fresh()
        while self._heap:
            recency, *_, bundle = self._heap[0]
            if bundle.gone:
                heapq.heappop(self._heap)
                continue
            now = time.monotonic()
            if now - bundle.checked > STAT_SECONDS:
                self._ask_mtime(bundle, now)
            if bundle.recency > recency:
                heapq.heapreplace(self._heap, _entry(bundle))
                continue
            heapq.heappop(self._heap)
            return bundle
        return None

    def put_back(self, bundle: Bundle) -> None:
        """A victim that could not be removed."""
        heapq.heappush(self._heap, _entry(bundle))

    def _take_fresh(self) -> None:
        fresh = [self._fresh.popleft() for _ in range(len(self._fresh))]
        if len(fresh) > len(self._heap) // 8:
            self._heap = [entry for entry in self._heap if not entry[-1].gone]
            self._heap += map(_entry, fresh)
            heapq.heapify(self._heap)
        else:
            for bundle in fresh:
                heapq.heappush(self._heap, _entry(bundle))

    def _ask_mtime(self, bundle: Bundle, now: float) -> None:
        bundle.checked = now
        try:
            modified = os.stat(bundle.path).st_mtime_ns
        except OSError:
            # Gone, perhaps: whoever tries to remove it will see.
            return
        if modified <= self._clock.now_ns() + TOLERANCE_NS:
            bundle.modified = max(bundle.modified, modified)


def _entry(bundle: Bundle) -> _Entry:
    # Where a file system keeps coarse times, the later of a writer's bundles goes first: it is a tail rather than a head.
    # What comes back after it seemed to be gone is there twice: which of the two comes first does not matter.
    return bundle.recency, -bundle.name.sequence, bundle.name.writer, bundle.namespace, id(bundle), bundle
