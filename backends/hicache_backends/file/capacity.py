"""Keeps a store below its capacity: all namespaces, all processes, temporary files included (rule EV-1).

What is used is never counted up and down in a file, so it cannot drift: it is the sum of the lengths in the names of
all bundles and temporary files. A writer makes its temporary file first, with its full length in the name, and looks at
the sum then. Of several who write at a time, the last to look sees all others; so no more is ever written than fits.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Bundle
from hicache_backends.file.bundle_set import no_deadline
from hicache_backends.file.temp_files import TOLERANCE_NS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.file.bundle_set import BundleSets
    from hicache_backends.file.change_feed import ChangeFeed
    from hicache_backends.file.page_index import PageIndex
    from hicache_backends.file.paths import StorePaths
    from hicache_backends.file.publisher import Publisher
    from hicache_backends.file.rewriter import Rewriter
    from hicache_backends.file.temp_files import ServerClock, TempFiles
    from hicache_storage.objects import Namespace

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

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._heap: list[_Entry] = []
        self._added: deque[Bundle] = deque()
        self._gone = 0
        """How many have been removed since such were last looked for."""

    def bundles_added(self, bundles: Sequence[Bundle]) -> None:
        """Called by shelves, from any thread."""
        latest = self._clock.now_ns()
        for bundle in bundles:
            bundle.modified = min(bundle.modified, latest)
        self._added.extend(bundles)

    def bundles_removed(self, bundles: Sequence[Bundle]) -> None:
        """Called by shelves, from any thread; a bundle that is gone is noticed when its turn comes."""
        # Of several threads one may get lost, which delays what is done about it.
        self._gone += len(bundles)

    def drop_removed(self) -> None:
        """Let go of bundles that are gone, where there are many: their turn may never come."""
        self._take_added()
        if self._gone > max(MANY_GONE, len(self._heap) // 2):
            self._gone = 0
            self._heap = [entry for entry in self._heap if not entry[-1].gone]
            heapq.heapify(self._heap)

    def pop(self) -> Bundle | None:
        """Take out the next victim; None if there is none left."""
        self._take_added()
        while self._heap:
            recency, *_, bundle = self._heap[0]
            if bundle.gone:
                heapq.heappop(self._heap)
                continue
            now = time.monotonic()
            if now - bundle.checked > STAT_SECONDS:
                self._refresh_mtime(bundle, now)
            if bundle.recency > recency:
                heapq.heapreplace(self._heap, _entry(bundle))
                continue
            heapq.heappop(self._heap)
            return bundle
        return None

    def put_back(self, bundle: Bundle) -> None:
        """A victim that could not be removed."""
        heapq.heappush(self._heap, _entry(bundle))

    def _take_added(self) -> None:
        fresh = [self._added.popleft() for _ in range(len(self._added))]
        if len(fresh) > len(self._heap) // 8:
            self._heap = [entry for entry in self._heap if not entry[-1].gone]
            self._heap += map(_entry, fresh)
            heapq.heapify(self._heap)
        else:
            for bundle in fresh:
                heapq.heappush(self._heap, _entry(bundle))

    def _refresh_mtime(self, bundle: Bundle, now: float) -> None:
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


logger = logging.getLogger(__name__)

RELIST_SECONDS = 60.0
RELIST_SHARE = 50
"""All bundles are listed again after a minute, but at most a fiftieth of the time goes into it: a writer that is killed
right after publishing leaves a bundle that nobody has been told of."""

SMALL_STORE_BUNDLES = 64
"""In a store of fewer bundles than this, a victim is shrunk if that is enough; in larger ones its loss does not matter."""

MAX_RACES = 8
"""So many times the bundles are listed again when others have been faster; then a bundle that they took is believed gone."""

SHRINK_SHARE = 8
"""At least an eighth of the pages goes, so that writing page by page does not rewrite a bundle for each."""


class Capacity:
    """Makes room for what is about to be written. Safe for many threads; one makes room at a time."""

    def __init__(
        self,
        limit: int,
        paths: StorePaths,
        feed: ChangeFeed,
        bundle_sets: BundleSets,
        temp_files: TempFiles,
        publisher: Publisher,
        rewriter: Rewriter,
        page_indexes: Callable[[str], PageIndex | None],
        evicted: Callable[[Namespace, int], None],
        clock: ServerClock,
    ) -> None:
        self.limit = limit
        self._paths = paths
        self._feed = feed
        self._bundle_sets = bundle_sets
        self._temp_files = temp_files
        self._publisher = publisher
        self._rewriter = rewriter
        self._page_indexes = page_indexes
        self._evicted = evicted
        self._lock = threading.Lock()
        self._queue = EvictionQueue(clock)
        self._relist_at = 0.0
        bundle_sets.made = lambda bundle_set: bundle_set.listen(self._queue)

    def used(self, expired: Callable[[], bool] = no_deadline) -> int:
        """Bytes in the store: bundles, and what the living have reserved. Collects what the dead have left.

        Args:
            expired: whether the caller's deadline has passed; indexes of new bundles are read until then.

        Raises:
            OSError: the store could not be listed.
        """
        snapshot = self._feed.read()
        reserved, collected = self._temp_files.collect()
        for namespace in snapshot.cursors:
            self._bundle_sets.get(namespace)
        # Whoever was killed while writing may also have published without telling.
        if collected:
            self._relist_at = 0.0
        started = time.monotonic()
        listing = started >= self._relist_at
        if listing:
            for namespace in self._paths.namespaces():
                self._bundle_sets.get(namespace).invalidate()
        for bundle_set in self._bundle_sets.all():
            bundle_set.catch_up(snapshot, expired)
        if listing:
            ended = time.monotonic()
            self._relist_at = ended + max(RELIST_SECONDS, RELIST_SHARE * (ended - started))
        return reserved + sum(bundle_set.used for bundle_set in self._bundle_sets.all())

    def make_room(self, expired: Callable[[], bool] = no_deadline) -> int:
        """Evict until what is used, reservations included, fits.

        Args:
            expired: whether the caller's deadline has passed; indexes of new bundles are read until then.

        Returns:
            Bytes that are still too many, because nothing is left to evict.

        Raises:
            OSError: the store could not be listed.
        """
        with self._lock:
            excess, races = self.used(expired) - self.limit, 0
            tried = list[Bundle]()
            try:
                while excess > 0 and (victim := self._queue.pop()) is not None:
                    tried.append(victim)
                    freed = self._evict(victim, excess)
                    if freed is not None:
                        excess -= freed
                    elif races < MAX_RACES:
                        races += 1
                        excess = self.used(expired) - self.limit
                    elif victim.name.claim is None:
                        excess -= victim.size
            finally:
                for bundle in tried:
                    if not bundle.gone:
                        self._queue.put_back(bundle)
            return max(0, excess)

    def drop_removed(self) -> None:
        """Let go of the bundles that others have removed; a process that writes nothing never looks for a victim."""
        # Who makes room holds the lock during I/O. The next time will do.
        if self._lock.acquire(blocking=False):
            try:
                self._queue.drop_removed()
            finally:
                self._lock.release()

    def _evict(self, victim: Bundle, excess: int) -> int | None:
        """Remove a bundle, or its last pages if these are enough.

        Returns:
            How many bytes that has freed; None where somebody else has removed it, or is replacing it: a listing tells.
        """
        bundle_set = self._bundle_sets.get(victim.namespace)
        if victim.name.claim is not None and not self._publisher.is_unclaimed(victim):
            # Being replaced, or about to be when its claimant was killed; others go instead.
            return 0
        try:
            freed = self._shrink(victim, excess)
        except FileNotFoundError:
            bundle_set.invalidate()
            return None
        except OSError as error:
            # A full disk, most likely, which has no room for a shorter copy.
            logger.debug("cannot shrink %s: %s", victim.path, error)
            freed = 0
        if freed:
            return freed
        try:
            removed = self._publisher.remove(bundle_set, victim)
        except OSError as error:
            logger.debug("cannot evict %s: %s", victim.path, error)
            return 0
        if not removed:
            return None
        if (page_index := self._page_indexes(victim.namespace)) is not None:
            self._evicted(page_index.namespace, len(victim.keys))
        return victim.size

    def _shrink(self, victim: Bundle, excess: int) -> int:
        page_index, size = self._page_indexes(victim.namespace), victim.name.size
        if (
            page_index is None
            or not victim.keys
            or victim.name.claim is not None
            or size * SMALL_STORE_BUNDLES < self.limit
            or excess >= size
        ):
            return 0
        pages, bundle_bytes = len(victim.keys), page_index.format.bundle_bytes
        dropped = -(-pages // SHRINK_SHARE)
        while dropped < pages and size - bundle_bytes(victim.keys[:-dropped]) < excess:
            dropped += 1
        if dropped * 4 > pages * 3:
            return 0
        self._rewriter.drop(page_index, victim, frozenset(victim.keys[-dropped:]))
        self._evicted(page_index.namespace, dropped)
        return size - bundle_bytes(victim.keys[:-dropped])
