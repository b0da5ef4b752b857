"""The page index of a namespace: key -> location, from the indexes of its bundles."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice, repeat
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import (
    TAIL_BYTES,
    Bundle,
    BundleFormat,
    BundleIndex,
    BundleName,
    NotABundleError,
)
from hicache_backends.file.bundle_set import no_deadline
from hicache_backends.file.events import segment_of
from hicache_backends.file.removal_history import RemovalLine
from hicache_backends.posix.faults import detached
from hicache_backends.posix.files import file_bytes
from hicache_storage.objects import ObjectRead, ObjectRemoval, this_process
from hicache_storage.objects.removals import MAX_REMOVALS
from hicache_storage.spec import RemovalReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_backends.file.bundle_set import BundleSet, Expired
    from hicache_backends.file.change_feed import FeedSnapshot
    from hicache_backends.file.temp_files import ServerClock
    from hicache_backends.posix.files import Descriptors
    from hicache_storage.objects import Namespace
    from hicache_storage.objects.thread_pool import ThreadPool

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""Seconds before an index is read again after an I/O error or for lack of a descriptor."""

MAX_RECHECKS = 6
"""Limit on reading an invalid bundle again, with exponential backoff: the disk may have erred."""

BUNDLES_PER_TASK = 16

BUNDLES_PER_STEP = 128
"""Indexes that are read between two checks of the deadline."""

MANY_UNREAD = 64
"""Above so many unread bundles, the event logs are searched first: one more directory listing."""

WAIT_SECONDS = 0.005
"""Seconds between checks of the deadline while another thread reads indexes."""

_Read = tuple["Bundle", "BundleIndex | Exception | None"]
"""A bundle and its index, or why there is none; None where the file is gone."""

Location = tuple["Bundle", int]
"""A bundle and the number of a page in it."""


@dataclass(slots=True, eq=False)
class Extent:
    """Contiguous pages of one bundle, to be read."""

    bundle: Bundle
    page: int
    """Number of the first one."""
    reads: list[ObjectRead]


class PageIndex:
    """The pages of one namespace. Safe for many threads.

    Lookups take no lock, changes that of the bundle set. A page that several bundles hold is taken
    from the newest of them, so that a repaired copy hides the damaged one; when that bundle is
    removed, the next newest takes its place.
    """

    def __init__(
        self,
        namespace: Namespace,
        bundle_set: BundleSet,
        descriptors: Descriptors,
        thread_pool: ThreadPool,
        clock: ServerClock,
        *,
        parallel: bool,
    ) -> None:
        self._clock = clock
        self.namespace = namespace
        self.bundle_set = bundle_set
        self.format = BundleFormat(namespace.page_bytes, namespace.fingerprint)
        self.pages: dict[str, Location] = {}
        self.ignored = 0
        """Number of files with the name of a bundle and other content."""
        self._copies: dict[str, list[Location]] = {}
        self._descriptors = descriptors
        self._thread_pool = thread_pool
        self._parallel = parallel
        self._unread: dict[Bundle, None] = {}
        """Bundles whose index is still to be read; until then their pages are misses."""
        self._reading = set[Bundle]()
        """Unread bundles that some thread is reading."""
        self.reading_changed = threading.Condition()
        self._search_logs = False
        """Many are unread, and perhaps in the event logs."""
        self._logged: dict[tuple[str, int], dict[BundleName, Bundle]] = {}
        """By segment of an event log, the unread bundles that it may hold."""
        self._retries: dict[Bundle, float] = {}
        """Bundles whose index could not be read or was invalid, and when to read it again."""
        self._retry_at = math.inf
        """The earliest of these times."""
        self._touched: dict[Bundle, None] = {}
        self._removed: dict[str, ObjectRemoval] | None = None
        """Pages that are gone since `take_removed`, by key; None while nobody watches."""
        self._removed_lost = False
        with bundle_set.lock:
            bundle_set.on_added = self._add_bundles
            bundle_set.on_removed = self._remove_bundles
            bundle_set.index = self.read_indexes
            # A set has answered True for its pages, and another storage has removed them.
            bundle_set.vanished = lambda bundle: self._keep_removed(
                bundle.keys, RemovalReason.UNKNOWN
            )
            self._add_bundles(list(bundle_set.bundles.values()))

    def catch_up(self, snapshot: FeedSnapshot, expired: Expired = no_deadline) -> None:
        """Apply the events that other storages have announced.

        `complete` is `False` afterwards while indexes are unread.

        Raises:
            OSError: the bundles could not be listed.
        """
        if not self.is_current(snapshot):
            with self.bundle_set.lock:
                self._requeue()
            self.bundle_set.catch_up(snapshot, expired)

    def is_current(self, snapshot: FeedSnapshot) -> bool:
        """Return whether `catch_up` would do nothing."""
        # The bundle set first: a bundle that another thread adds is among the unread before the set
        # is current.
        return self.bundle_set.is_current(snapshot) and self.complete and not self._is_retry_due()

    @property
    def complete(self) -> bool:
        """Whether every readable index has been read."""
        return not self._unread

    def _is_retry_due(self) -> bool:
        return bool(self._retries) and time.monotonic() >= self._retry_at

    def _requeue(self) -> None:
        """Queue unreadable and invalid bundles to be read again, if it is time."""
        now = time.monotonic()
        if now >= self._retry_at:
            due = {bundle: None for bundle, at in self._retries.items() if now >= at}
            self._unread.update(due)
            for bundle in due:
                del self._retries[bundle]
            self._retry_at = min(self._retries.values(), default=math.inf)

    def _retry_in(self, seconds: float, bundle: Bundle) -> None:
        self._retries[bundle] = time.monotonic() + seconds
        self._retry_at = min(self._retry_at, self._retries[bundle])

    def locate(self, reads: Sequence[ObjectRead]) -> list[Extent]:
        """Find the pages that exist, as extents in the order of the reads."""
        find, extents = self.pages.get, list[Extent]()
        bundle, expected, extent = None, 0, list[ObjectRead]()
        for read in reads:
            location = find(read.key)
            if location is None:
                continue
            if location[0] is not bundle or location[1] != expected:
                bundle, expected, extent = location[0], location[1], list[ObjectRead]()
                extents.append(Extent(bundle, expected, extent))
            extent.append(read)
            expected += 1
        return extents

    def copies(self, key: str) -> list[Location]:
        """Every location of a page, the newest first."""
        with self.bundle_set.lock:
            location = self.pages.get(key)
            return [] if location is None else [location, *self._copies.get(key, ())]

    def touch(self, keys: Sequence[str]) -> None:
        """Record a use of pages, the last first.

        The head of a chain counts as the most recently used (rule EV-3).
        """
        now, last = self._clock.now_ns(), None
        for location in map(self.pages.get, reversed(keys)):
            if location is not None and location[0] is not last:
                last = location[0]
                now += 1
                last.touched = now
                self._touched[last] = None

    def touch_bundles(self, bundles: Sequence[Bundle]) -> None:
        """Record that the bundles of one batch were written, the last first."""
        now = self._clock.now_ns()
        for rank, bundle in enumerate(reversed(bundles)):
            bundle.touched = now + rank
            self._touched[bundle] = None

    def take_touched(self) -> list[Bundle]:
        """Return the bundles that were used since the last call."""
        touched = self._touched
        self._touched = {}
        return [bundle for bundle in list(touched) if not bundle.gone]

    def _add_bundles(self, bundles: Sequence[Bundle]) -> None:
        unread = [bundle for bundle in bundles if not bundle.keys]
        self._unread.update(dict.fromkeys(unread))
        self._search_logs |= sum(not bundle.suspect for bundle in unread) > MANY_UNREAD
        for bundle in bundles:
            if bundle.keys:
                self._insert(bundle)

    def _remove_bundles(self, bundles: Sequence[Bundle]) -> None:
        for bundle in bundles:
            self._descriptors.forget(bundle.path)
            self._touched.pop(bundle, None)
            self._unread.pop(bundle, None)
            self._retries.pop(bundle, None)
            # First: an interrupted call is repeated.
            if bundle.reason is not None or self._removed is not None:
                self._note_removed(bundle)
            for key in bundle.keys:
                self._forget(key, bundle)

    def watch(self) -> None:
        """Note the pages that are gone from now on, for `take_removed`."""
        with self.bundle_set.lock:
            if self._removed is None:
                self._removed = {}

    def take_removed(self) -> tuple[list[ObjectRemoval], bool] | None:
        """Return the pages that are gone since the last call, and whether some are missing.

        Returns:
            None while indexes are unread: pages may be in these bundles.
        """
        with self.bundle_set.lock:
            if self._unread:
                return None
            removed, lost = self._removed or {}, self._removed_lost
            self._removed = {}
            self._removed_lost = False
            # Others were moved by another process, or stored again.
            return [one for key, one in removed.items() if key not in self.pages], lost

    def _note_removed(self, bundle: Bundle) -> None:
        """Note the pages that go with a bundle, and have no other copy."""
        find, copies = self.pages.get, self._copies
        gone = [
            key
            for key in bundle.keys
            if (location := find(key)) and location[0] is bundle and key not in copies
        ]
        if not gone:
            return
        # The time and the author are known of this storage's own removals alone.
        if bundle.reason is None:
            self._keep_removed(gone, RemovalReason.UNKNOWN)
            return
        line = RemovalLine(self._clock.now_ns() / 1e9, bundle.reason, this_process(), tuple(gone))
        self.bundle_set.feed.history.note(self.namespace.name, line)
        self._keep_removed(gone, line.reason, line.seconds, line.by)

    def _keep_removed(
        self, keys: Iterable[str], reason: RemovalReason, seconds: float = 0.0, by: str = ""
    ) -> None:
        """Keep removals for `take_removed`, where there is a watch."""
        if self._removed is None:
            return
        for key in keys:
            # In the order of the last time that they went.
            self._removed.pop(key, None)
            self._removed[key] = ObjectRemoval(self.namespace.name, key, reason, seconds, by)
        while len(self._removed) > MAX_REMOVALS:
            self._removed_lost = True
            del self._removed[next(iter(self._removed))]

    def read_indexes(self, expired: Expired) -> None:
        """Read the indexes of new bundles, from the event logs or from the bundles.

        Where files are gone, their bundles are removed, and the bundle set is no longer current.
        """
        while self._unread and not expired():
            if self._read_logged():
                continue
            bundles = list[Bundle]()
            try:
                self._take_unread(bundles)
                if bundles:
                    self._read_batch(bundles)
                else:
                    # Other threads read the rest. Polling, so that a thread that hangs in the file
                    # system holds no call past its deadline.
                    with self.reading_changed:
                        self.reading_changed.wait(WAIT_SECONDS)
            finally:
                # Also after an interrupt at any step: an index that stays among these is never read.
                with self.reading_changed:
                    self._reading.difference_update(bundles)
                    self.reading_changed.notify_all()

    def read_before_removal(self, bundles: Sequence[Bundle]) -> None:
        """Read the indexes of some bundles that are still unread: their pages are to be counted."""
        if unread := [bundle for bundle in bundles if bundle in self._unread]:
            self._read_batch(unread)

    def _read_logged(self) -> bool:
        """Read one segment of an event log for unread bundles; `False` if there is none left."""
        if self._search_logs:
            self._search_logs = False
            self._locate_in_logs()
        try:
            segment, bundles = self._logged.popitem()
        except KeyError:
            return False
        indexes = self.bundle_set.feed.logs.indexes(self.namespace.name, bundles, segment)
        with self.bundle_set.lock:
            for name, index in indexes.items():
                bundle = bundles[name]
                if bundle in self._unread:
                    self._note_index(bundle, index)
                    self._unread.pop(bundle, None)
        return True

    def _locate_in_logs(self) -> None:
        segments = self.bundle_set.feed.logs.segments(self.namespace.name)
        if not segments:
            return
        logged = dict[tuple[str, int], dict[BundleName, Bundle]]()
        for bundle in list(self._unread):
            if not bundle.suspect and (segment := segment_of(bundle.id)) in segments:
                logged.setdefault(segment, {})[bundle.name.plain] = bundle
        self._logged = logged

    def _take_unread(self, bundles: list[Bundle]) -> None:
        """Take some unread bundles that no other thread reads, and append them.

        They stay unread until their indexes have been read.
        """
        with self.bundle_set.lock:
            unread = list(islice(self._unread, len(self._reading) + BUNDLES_PER_STEP))
        with self.reading_changed:
            bundles += [bundle for bundle in unread if bundle not in self._reading]
            self._reading.update(bundles)

    def _read_batch(self, bundles: Sequence[Bundle]) -> None:
        parts = [
            bundles[at : at + BUNDLES_PER_TASK] for at in range(0, len(bundles), BUNDLES_PER_TASK)
        ]
        read = list[_Read]()
        if self._parallel:
            self._thread_pool.run([partial(self._read_indexes, part, read) for part in parts])
        else:
            for part in parts:
                self._read_indexes(part, read)
        gone = [bundle for bundle, index in read if index is None and not bundle.gone]
        with self.bundle_set.lock:
            if gone:
                # First: a thread that finds nothing unread takes the bundle set for current.
                self.bundle_set.invalidate()
                self.bundle_set.remove([bundle.id for bundle in gone])
            for bundle, index in read:
                if bundle.gone or index is None:
                    pass  # Removed, just now or meanwhile by an event.
                elif isinstance(index, BundleIndex):
                    self._note_index(bundle, index)
                elif isinstance(index, NotABundleError):
                    self._note_invalid(bundle, index)
                else:
                    self._retry_in(RETRY_SECONDS, bundle)
                    logger.debug("cannot read %s now: %s", bundle.path, index)
                # Last: after an interrupt it is read again.
                self._unread.pop(bundle, None)

    def _note_index(self, bundle: Bundle, index: BundleIndex) -> None:
        bundle.envelopes = index.envelopes
        bundle.keys = index.keys
        if bundle.invalid:
            bundle.invalid = 0
            self.ignored -= 1
        if bundle.size != bundle.name.size:
            self.bundle_set.note_size(bundle, bundle.name.size)
        self._insert(bundle)

    def _insert(self, bundle: Bundle) -> None:
        if len(bundle.keys) == 1 and bundle.keys[0] not in self.pages:
            self.pages[bundle.keys[0]] = bundle, 0
            return
        locations = zip(repeat(bundle), range(len(bundle.keys)), strict=False)
        known = self.pages.keys() & bundle.keys
        if not known:
            self.pages.update(zip(bundle.keys, locations, strict=True))
            return
        for key, location in zip(bundle.keys, locations, strict=True):
            current = self.pages.get(key)
            if current is None:
                self.pages[key] = location
            elif current[0] is not bundle:
                # Sorted, not in the order of reading: all storages choose the same copy.
                copies = [other for other in self._copies.get(key, ()) if other[0] is not bundle]
                copies = [location, current, *copies]
                copies.sort(key=lambda copy: copy[0].name.created_us, reverse=True)
                self._copies[key] = copies[1:]
                self.pages[key] = copies[0]

    def _forget(self, key: str, bundle: Bundle) -> None:
        others = [location for location in self._copies.pop(key, ()) if location[0] is not bundle]
        current = self.pages.get(key)
        if current is not None and current[0] is bundle:
            if others:
                self.pages[key] = others.pop(0)
            else:
                del self.pages[key]
        if others:
            self._copies[key] = others

    def _read_indexes(self, bundles: Iterable[Bundle], read: list[_Read]) -> None:
        for bundle in bundles:
            try:
                read.append((bundle, self._read_index(bundle)))
            except OSError as error:
                read.append((bundle, detached(error)))
            except (ValueError, OverflowError) as error:
                # A nonsensical name or footer must not hide other bundles.
                damaged = NotABundleError(str(error))
                damaged.file_bytes = file_bytes(bundle.path)
                read.append((bundle, damaged))

    def _read_index(self, bundle: Bundle) -> BundleIndex | None:
        """Read the index of a bundle; None if its file is gone."""
        size = bundle.name.size
        try:
            descriptor = self._descriptors.open(bundle.path, os.O_RDONLY)
        except FileNotFoundError:
            # A listing on a mount does not tell links from files.
            if os.path.islink(bundle.path):
                raise NotABundleError("a link to nothing") from None
            return None
        try:
            # A longer or shorter file has no footer there that would fit the length in its name.
            end = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
            length = self.format.tail_bytes(end, size, bundle.name.checksum)
            if length > len(end):
                end = os.pread(descriptor, length, size - length)
                # Both reads must have been served from this file, and the second one whole.
                if (
                    length > len(end)
                    or self.format.tail_bytes(end, size, bundle.name.checksum) != length
                ):
                    raise NotABundleError("shorter than its name says")
            return self.format.parse(end[-length:])
        finally:
            os.close(descriptor)

    def _note_invalid(self, bundle: Bundle, error: NotABundleError) -> None:
        if bundle.invalid < MAX_RECHECKS:
            self._retry_in(RETRY_SECONDS * (1 << bundle.invalid), bundle)
        bundle.invalid += 1
        if bundle.invalid > 1:
            return
        self.bundle_set.note_size(bundle, error.file_bytes)
        level = logging.DEBUG if self.ignored else logging.WARNING
        self.ignored += 1
        logger.log(level, "ignoring %s: %s; more of these are logged at debug", bundle.path, error)
