"""Which pages a namespace has, and where: the bundles' indexes, merged in memory."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import TAIL_BYTES, Index, NotABundleError, Shape
from hicache_storage.objects import ObjectRead

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from hicache_backends.file.board import Notices
    from hicache_backends.file.clock import Clock
    from hicache_backends.file.shelf import Bundle, Shelf
    from hicache_backends.posix.descriptors import Descriptors
    from hicache_backends.posix.workers import Workers
    from hicache_storage.objects import Namespace

logger = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""A bundle whose index could not be read, for want of a descriptor or by an I/O error, is not tried again sooner."""

MAX_HURRIES = 8
"""But so many times it is, as soon as others of its namespace can be read or written: the fault may be gone."""

MAX_DOUBTS = 6
"""What is no bundle is looked at again so many times, each time after twice as long: the disk may have lied."""

BUNDLES_A_TASK = 16

Location = tuple["Bundle", int]
"""A bundle and the number of a page in it."""


@dataclass(slots=True, eq=False)
class Run:
    """Pages that follow each other in a bundle, to be read."""

    bundle: Bundle
    page: int
    """Number of the first one."""
    reads: list[ObjectRead]


class Catalog:
    """The pages of one namespace. Safe for many threads: lookups take no lock, changes take the shelf's.

    A page that stands in several bundles is taken from the newest of them, so that a repaired copy wins over the
    damaged one; when that goes, the next newest takes its place.
    """

    def __init__(
        self, namespace: Namespace, shelf: Shelf, descriptors: Descriptors, workers: Workers, clock: Clock, *, parallel: bool
    ) -> None:
        self._clock = clock
        self.namespace = namespace
        self.shelf = shelf
        self.shape = Shape(namespace.page_bytes, namespace.fingerprint)
        self.pages: dict[str, Location] = {}
        self.ignored = 0
        """Files that are named like bundles and are none."""
        self._copies: dict[str, list[Location]] = {}
        self._descriptors, self._workers, self._parallel = descriptors, workers, parallel
        self._unread: dict[Bundle, None] = {}
        self._doubted: dict[Bundle, None] = {}
        self._doubt_at = 0.0
        self._doubts = 0
        self._retry_at = 0.0
        self._hurries = 0
        self._touched: dict[Bundle, None] = {}
        shelf.listen(self)

    def is_current(self, notices: Notices) -> bool:
        """Whether `catch_up` would do nothing."""
        now = time.monotonic()
        waits_for_files = (self._unread and now >= self._retry_at) or (self._doubted and now >= self._doubt_at)
        return not waits_for_files and self.shelf.is_current(notices)

    def catch_up(self, notices: Notices) -> None:
        """Take in what others have announced.

        Raises:
            OSError: the bundles could not be listed.
        """
        self.shelf.catch_up(notices)
        if self._unread and time.monotonic() >= self._retry_at:
            with self.shelf.lock:
                again, self._unread = list(self._unread), {}
                self.bundles_added(again)
        if self._doubted:
            with self.shelf.lock:
                self._look_again()

    def _look_again(self) -> None:
        """Try what was found to be no bundle, if it is time."""
        if self._doubted and time.monotonic() >= self._doubt_at:
            again, self._doubted = list(self._doubted), {}
            self._doubts += 1
            self.bundles_added(again)

    def note_service(self) -> None:
        """The file system has just served this namespace: what it would not let us read before is worth another try."""
        if self._unread and self._hurries < MAX_HURRIES:
            self._hurries += 1
            self._retry_at = 0.0
        elif not self._unread:
            self._hurries = 0

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """For each key, whether the page is there."""
        return list(map(self.pages.__contains__, keys))

    def locate(self, reads: Sequence[ObjectRead]) -> list[Run]:
        """Where the pages are that exist, in the order of the reads: a chain that was written at a time is one run."""
        find, runs = self.pages.get, list[Run]()
        bundle, expected, run = None, 0, list[ObjectRead]()
        for read in reads:
            place = find(read.key)
            if place is None:
                continue
            if place[0] is not bundle or place[1] != expected:
                bundle, expected, run = place[0], place[1], list[ObjectRead]()
                runs.append(Run(bundle, expected, run))
            run.append(read)
            expected += 1
        return runs

    def copies(self, key: str) -> list[Location]:
        """All bundles that hold a page."""
        with self.shelf.lock:
            location = self.pages.get(key)
            return [] if location is None else [location, *self._copies.get(key, ())]

    def touch(self, keys: Sequence[str]) -> None:
        """Note that pages were used, the last first: the head of a chain counts as the most recently used (rule EV-3)."""
        now, last, find = self._clock.now_ns(), None, self.pages.get
        for key in reversed(keys):
            location = find(key)
            if location is not None and location[0] is not last:
                last = location[0]
                now += 1
                last.touched = now
                self._touched[last] = None

    def touch_bundles(self, bundles: Sequence[Bundle]) -> None:
        """Note that bundles of one batch were written, the last first."""
        now = self._clock.now_ns()
        for rank, bundle in enumerate(reversed(bundles)):
            bundle.touched = now + rank
            self._touched[bundle] = None

    def take_touched(self) -> list[Bundle]:
        """The bundles that were used since the last call."""
        touched, self._touched = self._touched, {}
        return [bundle for bundle in list(touched) if not bundle.gone]

    def publish(self, bundles: Sequence[tuple[Bundle, Index]]) -> None:
        """Note bundles of this storage's own, whose index need not be read; the shelf's lock is held."""
        for bundle, index in bundles:
            bundle.keys, bundle.envelopes = index.keys, index.envelopes
        self.shelf.add([bundle for bundle, _ in bundles])

    def bundles_added(self, bundles: Sequence[Bundle]) -> None:
        unread = [bundle for bundle in bundles if not bundle.keys]
        if self._parallel and len(unread) > BUNDLES_A_TASK:
            parts = [unread[at : at + BUNDLES_A_TASK] for at in range(0, len(unread), BUNDLES_A_TASK)]
            self._workers.run([partial(self._read_indexes, part) for part in parts])
        else:
            self._read_indexes(unread)
        # Oldest first: of two copies of a page, the later one goes on top.
        for bundle in sorted(bundles, key=lambda bundle: bundle.name.created_us):
            self._insert(bundle)
        gone = [bundle for bundle in unread if bundle.gone]
        if gone:
            self.shelf.remove(gone)
            self.shelf.distrust()

    def bundles_removed(self, bundles: Sequence[Bundle]) -> None:
        for bundle in bundles:
            self._descriptors.forget(bundle.path)
            self._touched.pop(bundle, None)
            self._unread.pop(bundle, None)
            self._doubted.pop(bundle, None)
            for key in bundle.keys:
                self._forget(key, bundle)

    def _insert(self, bundle: Bundle) -> None:
        places = zip(repeat(bundle), range(len(bundle.keys)), strict=False)
        known = self.pages.keys() & bundle.keys
        if not known:
            self.pages.update(zip(bundle.keys, places, strict=True))
            return
        for key, place in zip(bundle.keys, places, strict=True):
            current = self.pages.get(key)
            if current is None:
                self.pages[key] = place
            elif current[0].name.created_us > bundle.name.created_us:
                self._copies.setdefault(key, []).append(place)
            else:
                self._copies.setdefault(key, []).insert(0, current)
                self.pages[key] = place

    def _forget(self, key: str, bundle: Bundle) -> None:
        others = [place for place in self._copies.pop(key, ()) if place[0] is not bundle]
        current = self.pages.get(key)
        if current is not None and current[0] is bundle:
            if others:
                self.pages[key] = others.pop(0)
            else:
                del self.pages[key]
        if others:
            self._copies[key] = others

    def _read_indexes(self, bundles: Iterable[Bundle]) -> None:
        for bundle in bundles:
            try:
                index = self._read_index(bundle)
            except NotABundleError as error:
                self._ignore(bundle, error)
            except OSError as error:
                self._unread[bundle] = None
                self._retry_at = time.monotonic() + RETRY_SECONDS
                logger.debug("cannot read %s now: %s", bundle.path, error)
            else:
                if index is None:
                    bundle.gone = True
                else:
                    bundle.keys, bundle.envelopes = index.keys, index.envelopes
                    if bundle.useless:
                        bundle.useless = False
                        self.ignored -= 1

    def _read_index(self, bundle: Bundle) -> Index | None:
        """A bundle's index; None if there is no such file any more."""
        size = bundle.name.size
        try:
            descriptor = self._descriptors.open(bundle.path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            # A longer or shorter file has no footer there that would fit the length in its name.
            end = os.pread(descriptor, TAIL_BYTES, max(0, size - TAIL_BYTES))
            length = self.shape.tail_bytes(end, size, bundle.name.checksum)
            if length > len(end):
                end = os.pread(descriptor, length, size - length)
                # Both reads must have been served from this file, and the second one whole.
                if length > len(end) or self.shape.tail_bytes(end, size, bundle.name.checksum) != length:
                    raise NotABundleError("shorter than its name says")
            return self.shape.parse(end[-length:])
        finally:
            os.close(descriptor)

    def _ignore(self, bundle: Bundle, error: NotABundleError) -> None:
        fresh = not bundle.useless
        if fresh:
            self._doubts = 0
        if self._doubts < MAX_DOUBTS:
            self._doubted[bundle] = None
            self._doubt_at = time.monotonic() + RETRY_SECONDS * (1 << self._doubts)
        if not fresh:
            return
        bundle.useless = True
        level = logging.DEBUG if self.ignored else logging.WARNING
        self.ignored += 1
        logger.log(level, "ignoring %s: %s; more of these are logged at debug", bundle.path, error)
