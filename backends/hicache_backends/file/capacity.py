"""Capacity: LRU eviction keeps a store below its limit (rule EV-1), and leaves others room.

The limit covers all namespaces, all processes and the temporary files. Used bytes are not kept in
a file, where a count could drift: they are the sum of the lengths in the names of all bundles and
temporary files. A writer creates its temporary file first, with its full length in the name, and
computes the sum then. When several processes write at once, the last one to compute it sees every
reservation, so the capacity is never exceeded.

Others fill the file system, too: pages are evicted where less than `min_free` of it is free.
"""

from __future__ import annotations

import heapq
import logging
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Bundle, BundleId
from hicache_backends.file.bundle_set import MAX_GONE, no_deadline
from hicache_backends.file.temp_files import TOLERANCE_NS
from hicache_backends.posix.files import file_bytes
from hicache_storage.spec import RemovalReason

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hicache_backends.file.bundle_set import BundleSets, Expired
    from hicache_backends.file.page_index import PageIndex
    from hicache_backends.file.publisher import Publisher
    from hicache_backends.file.temp_files import ServerClock
    from hicache_storage.objects.recorder import StatsRecorder

logger = logging.getLogger(__name__)

RELIST_SECONDS = 60.0
RELIST_SHARE = 50
"""All bundles are listed again after a minute, but at most a fiftieth of the time goes into it: a
writer that is killed right after publishing leaves a bundle that is not announced."""

MAX_RACES = 8
"""So many times the bundles are listed again when others have been faster; then a bundle that they
took counts as removed."""

MEASURE_SECONDS = 1.0
"""Seconds before the free bytes of the file system are measured again."""

LATE_SECONDS = 1.0
"""Seconds after an eviction in which what is missing to `min_free` is not evicted again: another
process has the files open, or the file system frees their bytes in the background."""


FULL_DISK_SECONDS = 10.0
"""Seconds in which a disk that is full for no reason that can be measured evicts once: something else
takes the room as fast, and would have the whole store evicted."""

_Entry = tuple[int, int, str, str, int, "Bundle"]


class EvictionQueue:
    """Bundles of all namespaces in LRU order, for one thread at a time.

    The recency of a bundle only grows, by uses in this process and by mtimes that other processes
    have set. So an entry that has become stale is found when it is popped, and goes back to its new
    place: one `stat` for each victim, not for each bundle.

    An mtime ahead of the file server's clock comes from a node whose clock was wrong. It is
    ignored; otherwise the bundles of that node would never be evicted.

    Args:
        clock: the file server's.
    """

    def __init__(self, clock: ServerClock) -> None:
        self._clock = clock
        self._heap: list[_Entry] = []
        self._limit = MAX_GONE

    def add(self, bundles: Sequence[Bundle]) -> None:
        latest = self._clock.now_ns()
        for bundle in bundles:
            bundle.modified = min(bundle.modified, latest)
            self.put_back(bundle)
        if len(self._heap) > self._limit:
            # Below the capacity, `pop` reaches no entries of bundles that have been removed.
            self._heap = [entry for entry in self._heap if not entry[-1].gone]
            heapq.heapify(self._heap)
            self._limit = 2 * len(self._heap) + MAX_GONE

    def pop(self, taken: list[Bundle]) -> Bundle | None:
        """Move the next victim to the end of a list; None if there is none left."""
        while self._heap:
            recency, *_, bundle = self._heap[0]
            if not bundle.gone and bundle.recency <= recency:
                self._refresh_mtime(bundle)
            if bundle.gone:
                heapq.heappop(self._heap)
            elif bundle.recency > recency:
                heapq.heapreplace(self._heap, _entry(bundle))
            else:
                # First: an interrupt in between must not lose it.
                taken.append(bundle)
                heapq.heappop(self._heap)
                return bundle
        return None

    def put_back(self, bundle: Bundle) -> None:
        """Return a victim that could not be removed, or that has been used."""
        heapq.heappush(self._heap, _entry(bundle))

    def _refresh_mtime(self, bundle: Bundle) -> None:
        try:
            modified = os.stat(bundle.path).st_mtime_ns
        except OSError:
            # Perhaps it is gone; the attempt to remove it will tell.
            return
        if modified <= self._clock.now_ns() + TOLERANCE_NS:
            bundle.modified = max(bundle.modified, modified)


def _entry(bundle: Bundle) -> _Entry:
    # Where a file system keeps coarse times, the later of a writer's bundles goes first: it is a
    # tail rather than a head. A bundle that was removed and added again has two entries, whose
    # order does not matter.
    return (
        bundle.recency,
        -bundle.name.sequence,
        bundle.name.writer,
        bundle.namespace,
        id(bundle),
        bundle,
    )


class FreeSpace:
    """The bytes of the store's file system that may still be taken. Safe for many threads.

    Measured once a second, which is a request on a network mount, and reckoned in between.

    Args:
        path: of the store.
        min_free: returns the bytes to be left free on a file system of so many.
    """

    def __init__(self, path: str, min_free: Callable[[int], int]) -> None:
        self._path = path
        self._min_free = min_free
        self._spare = 0
        self._measure_at = 0.0
        self._settles_at = 0.0
        self._floor = 0

    def spare(self, wanted: int = 0) -> int:
        """Bytes that are free beyond `min_free`; negative where less is free.

        Args:
            wanted: if fewer seem to be free, they are measured.
        """
        now = time.monotonic()
        if self._spare < wanted or now >= self._measure_at:
            self._measure_at = now + MEASURE_SECONDS
            self._spare = self._measured()
            if now < self._settles_at:
                # Sets make room for their own bytes until then.
                self._spare = max(0, self._spare)
        return self._spare

    def invalidate(self) -> None:
        """Measure before the next bytes are written: others have filled the file system."""
        self._measure_at = 0.0

    def take(self, size: int) -> None:
        """Reckon with bytes that are about to be written."""
        self._spare -= size

    def give(self, size: int) -> None:
        """Reckon with the bytes of files that have been removed."""
        self._spare += size
        if (now := time.monotonic()) >= self._settles_at:
            self._settles_at = now + LATE_SECONDS

    def __str__(self) -> str:
        free = max(0, self._spare + self._floor)
        return f"{free:,} bytes are free at {self._path}, min_free is {self._floor:,}"

    def _measured(self) -> int:
        try:
            status = os.statvfs(self._path)
        except OSError:
            return sys.maxsize  # The store was deleted, or the mount fails: the write will tell.
        # Some file systems have no fixed size, and report 0.
        total = status.f_blocks * status.f_frsize
        self._floor = self._min_free(total)
        spare = status.f_bavail * status.f_frsize - self._floor if total else sys.maxsize
        # Without an inode no file can be made: as if a byte were missing, a bundle goes.
        return min(-1, spare) if status.f_files and not status.f_favail else spare


class Capacity:
    """Makes room for pending bundles. Safe for many threads; one at a time makes room.

    Args:
        limit: bytes of the whole store, if they are limited.
        free: the room on the file system.
    """

    def __init__(
        self,
        limit: int | None,
        free: FreeSpace,
        bundle_sets: BundleSets,
        publisher: Publisher,
        page_indexes: Callable[[str], PageIndex | None],
        recorder: StatsRecorder,
    ) -> None:
        self.limit = limit
        self.free = free
        self._publisher = publisher
        self._feed = publisher.feed
        self._temp_files = publisher.temp_files
        self._bundle_sets = bundle_sets
        self._page_indexes = page_indexes
        self._recorder = recorder
        self._lock = threading.Lock()
        self._queue = EvictionQueue(self._temp_files.clock)
        self._relist_at = 0.0
        self._full_until = 0.0
        self._kept = set[tuple[str, BundleId]]()
        """Bundles that could not be removed; tried again after the next listing."""
        self._told = False

    def count(self, expired: Expired = no_deadline) -> tuple[int, int]:
        """Count the bytes of living processes' reservations, and of bundles.

        Files that killed processes have left are collected.

        Raises:
            OSError: the store could not be listed.
        """
        snapshot = self._feed.read()
        reserved, collected = self._temp_files.collect()
        for namespace in snapshot.cursors:
            self._bundle_sets.get(namespace)
        # A process that was killed while writing may also have published without an announcement.
        if collected:
            self._relist_at = 0.0
        started = time.monotonic()
        listing = started >= self._relist_at
        if listing:
            # Also namespaces that no cursor names: their writers were killed before their first
            # announcement.
            self._kept.clear()
            for namespace in self._feed.paths.namespaces():
                self._bundle_sets.get(namespace).invalidate()
        for bundle_set in self._bundle_sets.all():
            bundle_set.catch_up(snapshot, expired)
        if listing:
            ended = time.monotonic()
            self._relist_at = ended + max(RELIST_SECONDS, RELIST_SHARE * (ended - started))
        return reserved, sum(
            bundle_set.used + bundle_set.leaving_bytes() for bundle_set in self._bundle_sets.all()
        )

    def has_room(self, wanted: int) -> bool:
        """Return whether so many bytes may be written without `make_room`."""
        return self.limit is None and self.free.spare(wanted) >= wanted

    def keep_free(self) -> None:
        """Evict if others have left less than `min_free`.

        Raises:
            OSError: the store could not be listed.
        """
        if self.free.spare() < 0:
            self.make_room()

    def note_full(self, missing: int, expired: Expired) -> None:
        """Note that so many bytes did not fit, and make room for the next ones.

        The file system's numbers do not say it where a user's quota is used up, so that below the
        capacity as many bytes are evicted in any case.

        Raises:
            OSError: the store could not be listed.
        """
        self.free.invalidate()
        now = time.monotonic()
        if self.limit is not None and now >= self._full_until:
            self._full_until = now + FULL_DISK_SECONDS
            self.make_room(expired, missing=missing)

    def refusal(self) -> str:
        """The reason why no set can make room; empty if one can.

        Raises:
            OSError: the store could not be listed.
        """
        spare = self.free.spare()
        return "" if spare > 0 or self.count(lambda: True)[1] > -spare else str(self)

    def __str__(self) -> str:
        limit = "" if self.limit is None else f", the capacity is {self.limit:,}"
        return f"no room: {self.free}{limit}"

    def make_room(self, expired: Expired = no_deadline, *, missing: int = 0) -> int:
        """Evict until the used bytes, reservations included, are within the limit, and enough of
        the file system is free for the reservations.

        Args:
            missing: bytes that are evicted at least.

        Returns:
            Bytes above the limit that remain, because nothing is left to evict.

        Raises:
            OSError: the store could not be listed.
        """
        with self._lock:
            # One thread of this process at a time: two would evict for the same bytes.
            reserved, stored = self._recount(expired)
            excess, races = max(missing, self._excess(reserved, stored)), 0
            tried = list[Bundle]()
            try:
                while excess > 0 and (victims := self._victims(excess, tried)):
                    freed, taken = self._evict(victims)
                    self.free.give(freed)
                    if taken and races < MAX_RACES:
                        races += 1
                        excess = self._excess(*self._recount(expired))
                    else:
                        excess -= freed + taken
            finally:
                for bundle in tried:
                    # A victim that could not be removed is tried again by the next call.
                    if not bundle.gone:
                        self._queue.put_back(bundle)
            return max(0, excess)

    def _recount(self, expired: Expired) -> tuple[int, int]:
        """Count, and queue the bundles that were added; with the lock."""
        counted = self.count(expired)
        # Also where nothing is evicted: a time that is ahead of the clock counts as this one.
        for bundle_set in self._bundle_sets.all():
            with bundle_set.lock:
                self._queue.add(bundle_set.added)
                # Last: an interrupted call is repeated.
                bundle_set.added = []
        return counted

    def _excess(self, reserved: int, stored: int) -> int:
        excess = reserved + stored - (sys.maxsize if self.limit is None else self.limit)
        if (spare := self.free.spare(reserved)) >= reserved:
            return excess
        if not self._told:
            self._told = True
            logger.info("file: evicting pages: %s", self.free)
        return max(excess, reserved - spare)

    def _victims(self, excess: int, tried: list[Bundle]) -> list[Bundle]:
        """Take out as many bundles as free so many bytes; `tried` gets all that were looked at."""
        victims = list[Bundle]()
        while excess > 0 and (victim := self._queue.pop(tried)) is not None:
            if (victim.namespace, victim.id) in self._kept:
                bundle_set = self._bundle_sets.get(victim.namespace)
                bundle_set.note_size(victim, file_bytes(victim.path))
            # Another process may be replacing it, or was killed while it did; other bundles are
            # evicted instead.
            elif self._publisher.is_unclaimed(victim):
                victims.append(victim)
                excess -= victim.size
        return victims

    def _evict(self, victims: Sequence[Bundle]) -> tuple[int, int]:
        """Remove bundles.

        Returns:
            The bytes freed, and those of bundles that others have removed or are replacing, which a
            listing shows.
        """
        freed = taken = 0
        for namespace in {victim.namespace: None for victim in victims}:
            some = [victim for victim in victims if victim.namespace == namespace]
            page_index = self._page_indexes(namespace)
            if page_index is not None:
                page_index.read_before_removal(some)
            bundle_set = self._bundle_sets.get(namespace)
            outcomes = self._publisher.remove(bundle_set, some, RemovalReason.EVICTED)
            for victim, outcome in zip(some, outcomes, strict=True):
                if isinstance(outcome, OSError):
                    logger.debug("cannot evict %s: %s", victim.path, outcome)
                    self._kept.add((namespace, victim.id))
                    # A directory with the name of a bundle takes no bytes of pages.
                    freed += victim.size - file_bytes(victim.path)
                elif not outcome:
                    taken += victim.size
                else:
                    freed += victim.size
                    if page_index is not None:
                        pool = page_index.namespace.pool
                        self._recorder.count(pool, pages_evicted=len(victim.keys))
        return freed, taken
