"""Events about a store's pages, for the listeners of an engine, such as routers and directories."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

from hicache_storage.layers.deadline import JOIN_SECONDS
from hicache_storage.objects.thread_pool import ThreadPool
from hicache_storage.spec import HiCacheStorage, MissReason, RemovalScope

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence

    from hicache_storage.engines.bridge_storage import RefusedCalls
    from hicache_storage.spec import Removals

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.5
"""Interval at which the storages are asked for removals."""
MAX_LOOKUP: Final = 1000
"""Limit of the pages of one lookup."""
MAX_UNWATCHED: Final = 1 << 18
"""Limit of the published pages of storages that report no removals: the oldest are forgotten."""

PageT = TypeVar("PageT")
PageT_contra = TypeVar("PageT_contra", contravariant=True)


class PageId(NamedTuple):
    """Identification of a page."""

    storage: HiCacheStorage
    pool: str
    key: str


class Publish(Protocol[PageT_contra]):
    """Function that passes events on to the engine; must not call `PageEvents`."""

    def __call__(self, pages: Sequence[PageT_contra], *, removed: bool) -> None: ...


class PageEvents(Generic[PageT]):
    """Publisher of the pages that an engine stores and reads, and of their removals.

    A page is published as stored when a set or a get of it first answers `True`, and as removed
    when a lookup finds that it does not exist any more. Looked up are the pages that the storage
    reports as removed, those that the engine has missed, and all after the storage may have lost
    removals. Each is published once, and in the order in which it happened.

    A report alone is no proof: by the time that it comes, the page may have been set again. And a
    page that is reported while a call of it runs may be published by that call afterwards: it stays
    doubtful until then.

    Owns a thread. Thread-safe.

    Args:
        publish: called in any thread, for one event after the other.
        refusals: counts the calls for removals that fail.
    """

    def __init__(self, publish: Publish[PageT], refusals: RefusedCalls) -> None:
        self._publish = publish
        self._refusals = refusals
        self._closing = threading.Event()
        # Of two lookups of one page the earlier could be taken for the later. Comes before `_lock`.
        self._confirming = threading.Lock()
        # Guards everything below. Held while events are published, so that their order is right,
        # and never during a call of a storage.
        self._lock = threading.Lock()
        self._cursors = dict[HiCacheStorage, int | None]()
        self._published = dict[PageId, tuple[int, PageT]]()
        """Pages that the listeners know, with the number of the event, in their order."""
        self._events = 0
        self._running = defaultdict[PageId, int](int)
        """Number of calls that may store or read a page now."""
        self._doubtful = dict[PageId, bool]()
        """Pages to be looked up; `True` if something has happened since the lookup began."""
        self._ended = 0
        self._polled = 0
        """Number of calls that had ended when the last poll began that is over."""
        self._thread_pool = ThreadPool("hicache-removals", 1)
        self._thread = self._thread_pool.submit(self._run)

    @property
    def behind(self) -> bool:
        """Whether calls have ended whose removals may not have been asked for yet."""
        with self._lock:
            late = self._polled < self._ended
        return late and self._thread is not None and not self._thread.ended

    def watch(self, storage: HiCacheStorage) -> None:
        """Ask a storage for removals from now on, until this is closed; its pools are registered."""
        with self._lock:
            self._cursors[storage] = None

    @contextmanager
    def call(
        self, pages: Sequence[PageId], items: Sequence[PageT], answers: Sequence[bool]
    ) -> Generator[None]:
        """Publish the pages that the set or get within the `with` block has stored or delivered.

        Args:
            pages: of the call.
            items: what is published of each page.
            answers: one for each page, set within the block.
        """
        with self._lock:
            for page in pages:
                self._running[page] += 1
        try:
            yield
        finally:
            self._end(pages, items, answers)

    def doubt(self, pages: Iterable[PageId]) -> None:
        """Have pages looked up that the engine has missed, if they are published."""
        with self._lock:
            self._doubt(page for page in pages if page in self._published)

    def confirm(self, pages: Iterable[PageId]) -> None:
        """Look pages up, and publish those that are gone. Blocks."""
        groups = defaultdict[tuple[HiCacheStorage, str], list[PageId]](list)
        for page in pages:
            groups[page.storage, page.pool].append(page)
        for (storage, pool), group in groups.items():
            for start in range(0, len(group), MAX_LOOKUP):
                part = group[start : start + MAX_LOOKUP]
                if self._closing.is_set() or not self._look_up(storage, pool, part):
                    break

    def poll(self) -> None:
        """Ask the storages for removals, and look up what is doubtful. Blocks."""
        with self._lock:
            ended, cursors = self._ended, dict(self._cursors)
        for storage, cursor in cursors.items():
            if storage.capabilities.removals is not RemovalScope.NONE:
                try:
                    self._note(storage, cursor, storage.removals(cursor))
                except (Exception, SystemExit) as error:  # noqa: BLE001 - counted and logged; it may not end the thread
                    self._refusals.note("removals", "", error)
        with self._lock:
            doubtful = list(self._doubtful)
        self.confirm(doubtful)
        with self._lock:
            self._polled = ended

    def published(self, after: int = -1) -> list[tuple[int, PageT]]:
        """Return the pages that the listeners know, with ascending numbers above `after`."""
        with self._lock:
            known = list(self._published.values())
        return [entry for entry in known if entry[0] > after]

    def forget(self, *, again: bool = False) -> None:
        """Publish all pages as removed, as when the engine serves none of them any more.

        And as stored `again`, for listeners that may have forgotten them or not.
        """
        with self._lock:
            known = dict(self._published)
            self._remove(list(known))
            if again:
                self._published = known
                self._tell([item for _, item in known.values()], removed=False)

    def close(self) -> None:
        """End the thread; a call that it makes is waited for, but not for ever. Idempotent."""
        self._closing.set()
        self._thread_pool.close(JOIN_SECONDS)

    def _run(self) -> None:
        while not self._closing.wait(POLL_SECONDS):
            self.poll()

    def _end(
        self, pages: Sequence[PageId], items: Sequence[PageT], answers: Sequence[bool]
    ) -> None:
        with self._lock:
            stored = list[PageT]()
            for page in pages:
                self._running[page] -= 1
                if not self._running[page]:
                    del self._running[page]
            for page, item, answer in zip(pages, items, answers, strict=True):
                if page in self._doubtful or (page in self._published and not answer):
                    self._doubtful[page] = True
                if answer and page not in self._published:
                    self._published[page] = self._events, item
                    self._events += 1
                    stored.append(item)
            self._ended += 1
            self._tell(stored, removed=False)
            while len(self._published) > MAX_UNWATCHED:
                oldest = next(iter(self._published))
                if oldest.storage.capabilities.removals is not RemovalScope.NONE:
                    break
                del self._published[oldest]

    def _note(self, storage: HiCacheStorage, cursor: int | None, found: Removals) -> None:
        with self._lock:
            if found.lost or cursor is None:
                # What had been removed before the watch began is reported by no call.
                known = (*self._published, *self._running)
                self._doubt(page for page in known if page.storage is storage)
            else:
                reported = (PageId(storage, each.pool, each.key) for each in found.removed)
                # A call that begins from here on finds what is there after the removal.
                self._doubt(
                    page for page in reported if page in self._published or page in self._running
                )
            self._cursors[storage] = found.cursor

    def _doubt(self, pages: Iterable[PageId]) -> None:
        self._doubtful.update(dict.fromkeys(pages, True))

    def _look_up(self, storage: HiCacheStorage, pool: str, pages: Sequence[PageId]) -> bool:
        """Look pages up, and publish those that are gone; `False` if the storage has failed."""
        with self._confirming:
            with self._lock:
                self._doubtful.update(dict.fromkeys(pages, False))
            try:
                before = _failures(storage, pool)
                found = storage.batch_present([page.key for page in pages], pool=pool)
                failed = _failures(storage, pool) != before
            except (Exception, SystemExit) as error:
                logger.debug("hicache bridge: a lookup failed", exc_info=error)
                return False
            if failed:
                # A miss may be a fault; the next poll asks again.
                return False
            with self._lock:
                gone = list[PageId]()
                for page, is_there in zip(pages, found, strict=True):
                    # A call that runs may publish what it has found before the page was removed.
                    if not self._doubtful[page] and (is_there or page not in self._running):
                        del self._doubtful[page]
                        if not is_there and page in self._published:
                            gone.append(page)
                self._remove(gone)
        return True

    def _remove(self, pages: Sequence[PageId]) -> None:
        self._tell([self._published.pop(page)[1] for page in pages], removed=True)

    def _tell(self, items: Sequence[PageT], *, removed: bool) -> None:
        if items:
            try:
                self._publish(items, removed=removed)
            except Exception:
                logger.exception("hicache bridge: a listener of the engine failed")


def _failures(storage: HiCacheStorage, pool: str) -> int:
    """Count the calls so far whose misses do not tell that a page is absent."""
    stats = storage.get_stats()
    refused = sum(
        counted.absent[MissReason.REFUSED] for name, counted in stats.pools.items() if name == pool
    )
    return stats.faults + stats.breaker_refusals + refused
