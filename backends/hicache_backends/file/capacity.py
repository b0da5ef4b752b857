"""Keeps a store below its capacity: all namespaces, all processes, temporary files included (rule EV-1).

What is used is never counted up and down in a file, so it cannot drift: it is the sum of the lengths in the names of
all bundles and temporary files. A writer makes its temporary file first, with its full length in the name, and looks at
the sum then. Of several who write at a time, the last to look sees all others; so no more is ever written than fits.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from hicache_backends.file.eviction import EvictionQueue
from hicache_backends.file.shelf import Bundle, Shelf, never

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_backends.file.board import Board
    from hicache_backends.file.catalog import Catalog
    from hicache_backends.file.changes import Changes
    from hicache_backends.file.clock import Clock
    from hicache_backends.file.drafts import Drafts
    from hicache_backends.file.rewriter import Rewriter
    from hicache_backends.file.tree import Tree
    from hicache_storage.objects import Namespace

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


class Shelves:
    """The shelves of a store by namespace, made when first asked for."""

    def __init__(self, tree: Tree, board: Board, *, asks_server: bool) -> None:
        self._tree, self._board, self._asks_server = tree, board, asks_server
        self._lock = threading.Lock()
        self._shelves: dict[str, Shelf] = {}
        self.made: Callable[[Shelf], None] | None = None

    def get(self, namespace: str) -> Shelf:
        shelf = self._shelves.get(namespace)
        if shelf is not None:
            return shelf
        with self._lock:
            shelf = self._shelves.get(namespace)
            if shelf is None:
                shelf = Shelf(namespace, self._tree, self._board, asks_server=self._asks_server)
                if self.made is not None:
                    self.made(shelf)
                self._shelves[namespace] = shelf
            return shelf

    def all(self) -> list[Shelf]:
        return list(self._shelves.values())


class Capacity:
    """Makes room for what is about to be written. Safe for many threads; one makes room at a time."""

    def __init__(
        self,
        limit: int,
        tree: Tree,
        board: Board,
        shelves: Shelves,
        drafts: Drafts,
        changes: Changes,
        rewriter: Rewriter,
        catalogs: Callable[[str], Catalog | None],
        evicted: Callable[[Namespace, int], None],
        clock: Clock,
    ) -> None:
        self.limit = limit
        self._tree, self._board, self._shelves, self._drafts = tree, board, shelves, drafts
        self._changes, self._rewriter, self._catalogs, self._evicted = changes, rewriter, catalogs, evicted
        self._lock = threading.Lock()
        self._queue = EvictionQueue(clock)
        self._relist_at = 0.0
        shelves.made = lambda shelf: shelf.listen(self._queue)

    def used(self, expired: Callable[[], bool] = never) -> int:
        """Bytes in the store: bundles, and what the living have reserved. Collects what the dead have left.

        Args:
            expired: whether the caller's deadline has passed; indexes of new bundles are read until then.

        Raises:
            OSError: the store could not be listed.
        """
        notices = self._board.read()
        reserved, collected = self._drafts.collect()
        for namespace in notices.markers:
            self._shelves.get(namespace)
        # Whoever was killed while writing may also have published without telling.
        if collected:
            self._relist_at = 0.0
        started = time.monotonic()
        listing = started >= self._relist_at
        if listing:
            for namespace in self._tree.namespaces():
                self._shelves.get(namespace).distrust()
        for shelf in self._shelves.all():
            shelf.catch_up(notices, expired)
        if listing:
            ended = time.monotonic()
            self._relist_at = ended + max(RELIST_SECONDS, RELIST_SHARE * (ended - started))
        return reserved + sum(shelf.used for shelf in self._shelves.all())

    def make_room(self, expired: Callable[[], bool] = never) -> int:
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

    def forget_gone(self) -> None:
        """Let go of the bundles that others have removed; a process that writes nothing never looks for a victim."""
        # Who makes room holds the lock during I/O. The next time will do.
        if self._lock.acquire(blocking=False):
            try:
                self._queue.forget_gone()
            finally:
                self._lock.release()

    def _evict(self, victim: Bundle, excess: int) -> int | None:
        """Remove a bundle, or its last pages if these are enough.

        Returns:
            How many bytes that has freed; None where somebody else has removed it, or is replacing it: a listing tells.
        """
        shelf = self._shelves.get(victim.namespace)
        if victim.name.claim is not None and not self._changes.is_free(victim):
            # Being replaced, or about to be when its claimant was killed; others go instead.
            return 0
        try:
            freed = self._shrink(victim, excess)
        except FileNotFoundError:
            shelf.distrust()
            return None
        except OSError as error:
            # A full disk, most likely, which has no room for a shorter copy.
            logger.debug("cannot shrink %s: %s", victim.path, error)
            freed = 0
        if freed:
            return freed
        try:
            removed = self._changes.remove(shelf, victim)
        except OSError as error:
            logger.debug("cannot evict %s: %s", victim.path, error)
            return 0
        if not removed:
            return None
        if (catalog := self._catalogs(victim.namespace)) is not None:
            self._evicted(catalog.namespace, len(victim.keys))
        return victim.size

    def _shrink(self, victim: Bundle, excess: int) -> int:
        catalog, size = self._catalogs(victim.namespace), victim.name.size
        if (
            catalog is None
            or not victim.keys
            or victim.name.claim is not None
            or size * SMALL_STORE_BUNDLES < self.limit
            or excess >= size
        ):
            return 0
        pages, bundle_bytes = len(victim.keys), catalog.shape.bundle_bytes
        dropped = -(-pages // SHRINK_SHARE)
        while dropped < pages and size - bundle_bytes(victim.keys[:-dropped]) < excess:
            dropped += 1
        if dropped * 4 > pages * 3:
            return 0
        self._rewriter.drop(catalog, victim, frozenset(victim.keys[-dropped:]))
        self._evicted(catalog.namespace, dropped)
        return size - bundle_bytes(victim.keys[:-dropped])
