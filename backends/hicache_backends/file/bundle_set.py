"""Which bundles a namespace has: kept in memory, and up to date with what every writer has announced."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hicache_backends.file.bundle import Bundle
from hicache_backends.file.events import Added, Event, Found, Removed, Unlisted
from hicache_backends.file.paths import BundleId, BundleName, bundles_among, sync_directory
from hicache_backends.posix.statx import list_directory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicache_backends.file.bundle import BundleIndex
    from hicache_backends.file.change_feed import ChangeFeed, FeedSnapshot
    from hicache_backends.file.events import EventLogs, WriterCursor
    from hicache_backends.file.paths import StorePaths


logger = logging.getLogger(__name__)

ATOMIC_LISTING_BYTES = 32 << 10
"""A listing of so many bytes, or less, is read in one step, which no rename interrupts; `ENTRY_BYTES` come to each name."""

ENTRY_BYTES = 32

MAX_RELISTS = 8
"""How often a directory is listed again because others change it meanwhile."""


def no_deadline() -> bool:
    """The deadline of a caller without one: it has not passed."""
    return False


class BundleSetListener(Protocol):
    """Who wants to know which bundles come and go.

    Called with the shelf's lock held, so it does no I/O. A call that was interrupted is repeated, with the same bundles.
    """

    def bundles_added(self, bundles: Sequence[Bundle]) -> None: ...

    def bundles_removed(self, bundles: Sequence[Bundle]) -> None: ...


@dataclass(frozen=True, slots=True)
class _CatchUp:
    """What is left to do when the bundles that are new have been added."""

    removed: list[BundleId]
    seen: dict[str, int]
    """By writer, the number of the last event that is taken in."""
    invalidations: int
    """As of the beginning: a listing that was asked for since is still to be made."""


class BundleSet:
    """The bundles of one namespace. Safe for many threads: `lock` is held while they change.

    Lookups take no lock. So a bundle that has taken another's place is on the shelf before that one leaves it: a page
    that stays in the store all the while is found all the while.
    """

    def __init__(self, namespace: str, paths: StorePaths, feed: ChangeFeed, *, asks_server: bool) -> None:
        self.namespace = namespace
        self.lock = threading.RLock()
        self.bundles: dict[BundleId, Bundle] = {}
        self.used = 0
        """Bytes in all of them."""
        self._prepared: dict[BundleId, Bundle] = {}
        """Published by this storage, and not announced yet."""
        self._listed_unshared = False
        """Since others were last made to list: then more may be known here than everyone was told of."""
        self._paths = paths
        self._feed = feed
        self._asks_server = asks_server
        self._directory = paths.bundles(namespace)
        self._listeners: list[BundleSetListener] = []
        self._adding: dict[BundleId, Bundle] = {}
        """Being added: not empty only where that was interrupted."""
        self.index: Callable[[Callable[[], bool]], bool] = lambda expired: True
        """Reads the indexes of new bundles, without the lock; `False` where files are gone."""
        self._generation = self._epoch = -1
        self._invalidations = 0
        self._seen: dict[str, int] = {}
        self._retired: dict[str, int] = {}
        """Of writers that are retired: the number of the last event that is taken in."""

    @property
    def logs(self) -> EventLogs:
        """The store's event logs."""
        return self._feed.logs

    def listen(self, listener: BundleSetListener) -> None:
        """Tell a listener of all bundles, those that are there first."""
        with self.lock:
            self._listeners.append(listener)
            if self.bundles:
                listener.bundles_added(list(self.bundles.values()))

    def is_current(self, snapshot: FeedSnapshot) -> bool:
        """Whether there is nothing to catch up with."""
        return self._generation >= snapshot.generation

    def catch_up(self, snapshot: FeedSnapshot, expired: Callable[[], bool] = no_deadline) -> None:
        """Take in what has been announced.

        Args:
            expired: whether the caller's deadline has passed: then indexes are left for the next call to read.

        Raises:
            OSError: the bundles could not be listed.
        """
        if self.is_current(snapshot):
            return
        waited, announced = set[BundleName](), set[BundleName]()
        for attempt in range(MAX_RELISTS + 1):
            unannounced = self._catch_up(snapshot, announced, expired, last=attempt == MAX_RELISTS)
            if not unannounced:
                return
            # What is found here must be found by everybody who asks from now on. Mostly its writer is about to tell.
            late = unannounced & waited
            if late:
                self._announce_found([Found(name) for name in late])
                announced |= late
            waited = unannounced
            snapshot = self._feed.read()

    def _catch_up(
        self, snapshot: FeedSnapshot, announced: set[BundleName], expired: Callable[[], bool], *, last: bool
    ) -> set[BundleName]:
        """Take in what has been announced, or, where that is not enough, what is there.

        Args:
            told: bundles that everybody has been told of by now.
            last: take in all that is there, told or not.

        Returns:
            Bundles that are there and that nobody has been told of, but for those in `told`: nothing was taken in then.
        """
        for attempt in range(MAX_RELISTS + 1):
            with self.lock:
                if self._generation >= snapshot.generation:
                    return set()
                plan = self._begin_catch_up(snapshot, announced, last=last)
                if not isinstance(plan, _CatchUp):
                    return plan
            # New bundles can be found before old ones go: one that has taken another's place holds its pages.
            if not self.index(expired) and attempt < MAX_RELISTS:
                # Another may have taken the place of a file that is gone, and not be announced yet.
                self.invalidate()
                continue
            with self.lock:
                self._remove(plan.removed)
                if self._invalidations == plan.invalidations and self._generation < snapshot.generation:
                    self._seen = plan.seen
                    self._generation = snapshot.generation
                    self._epoch = snapshot.epoch
            break
        return set()

    def _begin_catch_up(self, snapshot: FeedSnapshot, announced: set[BundleName], *, last: bool) -> _CatchUp | set[BundleName]:
        """Add what is new and find out what is gone; or, without `last`, what nobody has been told of, and do nothing."""
        if self._adding:
            self._commit_adding()
        invalidations, cursors = self._invalidations, snapshot.of(self.namespace)
        seen = {writer: cursor.sequence for writer, cursor in cursors.items()}
        if self._epoch == snapshot.epoch:
            events = self._new_events(cursors)
            removed = None if events is None else self._apply_events(events)
            if removed is not None:
                return _CatchUp(removed, seen, invalidations)
        self._listed_unshared = True
        names = self._list_bundles()
        if not last and (unannounced := self._unannounced(names, cursors) - announced):
            return unannounced
        return _CatchUp(self._apply_listing(names), seen, invalidations)

    def invalidate(self) -> None:
        """List the bundles the next time, to find also what nobody has announced.

        That is a bundle whose writer was killed before it could, or a file deleted by hand.
        """
        with self.lock:
            self._generation = self._epoch = -1
            self._invalidations += 1

    def force_relist(self) -> None:
        """Make everyone list with the next announcement, if this shelf may know of what nobody has told yet.

        A page that is not found here may have been removed by another who is still about to say so.
        """
        with self.lock:
            if self._listed_unshared:
                self._listed_unshared = False
                self._feed.queue(self.namespace, [Unlisted()])

    def prepare_add(self, bundle: Bundle) -> None:
        """Note a bundle that is there and that `commit_add` will add, unless it has been removed until then."""
        with self.lock:
            self._prepared[bundle.id] = bundle

    def commit_add(self, bundle: Bundle) -> None:
        """Add a prepared bundle, unless it has been removed since."""
        with self.lock:
            del self._prepared[bundle.id]
            if not bundle.gone:
                self.add([bundle])

    def add(self, bundles: Iterable[Bundle]) -> None:
        """Note bundles that were published."""
        with self.lock:
            self._adding.update({bundle.id: bundle for bundle in bundles if bundle.id not in self.bundles})
            self._commit_adding()

    def _commit_adding(self) -> None:
        """Let everyone know of the arriving bundles. Where that is interrupted, at any point, it is done again."""
        if not self._adding:
            return
        bundles = list(self._adding.values())
        for listener in self._listeners:
            listener.bundles_added(bundles)
        used = self.used + sum([bundle.size for bundle in bundles])
        self.bundles.update(self._adding)
        # Together: nothing is interrupted between two assignments.
        self.used, self._adding = used, {}

    def remove(self, bundles: Sequence[Bundle]) -> None:
        """Note bundles whose files are gone."""
        self._remove({bundle.id for bundle in bundles})

    def _remove(self, ids: Iterable[BundleId]) -> None:
        with self.lock:
            known = list[Bundle]()
            for id in ids:
                # Somebody has found it by listing, and removed it before its writer could tell of it.
                if (expected := self._prepared.get(id)) is not None:
                    expected.gone = True
                if (bundle := self.bundles.pop(id, None)) is not None:
                    bundle.gone = True
                    self.used -= bundle.size
                    known.append(bundle)
            if known:
                for listener in self._listeners:
                    listener.bundles_removed(known)

    def note_size(self, bundle: Bundle, size: int) -> None:
        """Correct the length of a file whose name claims another one: capacity counts what is there."""
        with self.lock:
            if self.bundles.get(bundle.id) is bundle:
                self.used += size - bundle.size
            bundle.size = size

    def collect_logs(self, snapshot: FeedSnapshot) -> None:
        """Remove event logs and retired markers that tell of no bundle that is there; they are no more than a cache."""
        with self.lock:
            if self._generation < 0:
                return
            needed = list(self.bundles)
        cursors = snapshot.of(self.namespace)
        self._feed.logs.collect(self.namespace, needed, {writer: cursor.sequence for writer, cursor in cursors.items()})
        with contextlib.suppress(OSError):
            self._feed.collect_retired(self.namespace, {id.writer for id in needed})

    def bundle(self, name: BundleName, index: BundleIndex | None = None) -> Bundle:
        """A bundle of that name, not yet on the shelf."""
        keys, envelopes = ([], b"") if index is None else (index.keys, index.envelopes)
        return Bundle(self.namespace, name, self._directory, name.id, name.size, name.created_us * 1_000, keys, envelopes)

    def _new_events(self, cursors: Mapping[str, WriterCursor]) -> list[Event] | None:
        """What is new; None where that cannot be told, because a writer's log has a gap or its marker has disappeared."""
        events = list[Event]()
        missing = [writer for writer in self._seen if writer not in cursors and writer != self._feed.writer]
        if missing:
            retired = self._feed.retired(self.namespace)
            if not all(writer in retired and self._add_missed(retired[writer], events) for writer in missing):
                return None
            self._retired.update({writer: retired[writer].sequence for writer in missing})
        # What this storage itself has done is on the shelf already.
        if all(self._add_missed(cursor, events) for writer, cursor in cursors.items() if writer != self._feed.writer):
            return events
        return None

    def _add_missed(self, cursor: WriterCursor, events: list[Event]) -> bool:
        """Gather the events of a writer that are new here; whether they are all known."""
        seen = self._seen.get(cursor.writer, self._retired.get(cursor.writer, 0))
        missed = cursor.since(seen)
        if missed is None:
            known = cursor.sequence - len(cursor.events)
            missed, rest = self._feed.logs.since(self.namespace, cursor.writer, seen, known), cursor.since(known)
            if missed is None or rest is None:
                return False
            missed += rest
        events += missed
        return True

    def _apply_events(self, events: Sequence[Event]) -> list[BundleId] | None:
        """Add what is new, and tell what is gone; None, and nothing is done, where that takes a listing."""
        # By all writers together: one's bundle may have been removed by another, whose marker came first.
        removed = {event.bundle for event in events if isinstance(event, Removed)}
        added = list[Bundle]()
        for event in events:
            if isinstance(event, Unlisted):
                return None
            if isinstance(event, Removed):
                continue
            bundle = self.bundle(event.bundle, event.index if isinstance(event, Added) else None)
            if bundle.id not in self.bundles and bundle.id not in removed:
                added.append(bundle)
        self.add(added)
        return list(removed)

    def _list_bundles(self) -> dict[BundleId, BundleName]:
        """The bundles that are there; those that have been replaced, and not yet removed, are removed now."""
        names, claimed = dict[BundleId, BundleName](), list[BundleName]()
        for name in bundles_among(self._stable_listing(self._directory)):
            id = name.id
            other = names.setdefault(id, name)
            if other is not name:
                names[id] = self._resolve_duplicate(id, other, name)
            if name.claim is not None:
                claimed.append(name)
        for name in claimed:
            if name.claim is not None and name.claim.replacement in names:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._directory}/{name}")
                if names.get(name.id) == name:
                    del names[name.id]
        return names

    def _resolve_duplicate(self, id: BundleId, one: BundleName, other: BundleName) -> BundleName:
        """The one that a number stands for, of two names in a listing."""
        if one.plain == other.plain:
            # Listed before and after it was claimed, or before and after it was not any more.
            return other
        # Two files under one number, which nothing that works right makes: all storages take the same one. A file that
        # has not the length of its name is no bundle.
        whole = [name for name in (one, other) if self._has_its_size(name)]
        if len(whole) == 1:
            return whole[0]
        known = self.bundles.get(id)
        for name in (one, other):
            if known is not None and known.name.plain == name.plain:
                return name
        return min(one, other, key=lambda name: (name.created_us, name.checksum))

    def _has_its_size(self, name: BundleName) -> bool:
        try:
            return os.stat(f"{self._directory}/{name}").st_size == name.size
        except OSError:
            return False

    def _stable_listing(self, directory: str) -> list[str]:
        """The names in a directory.

        A long listing takes several steps, between which a bundle that was not listed yet may move to a name that would
        have been. So it is listed until nothing has disappeared since the time before. A bundle that moves twice, each time
        past a listing, is missed until who moves it tells of it: then everybody looks again.
        """
        names = list_directory(directory, asks_server=self._asks_server)
        for _ in range(MAX_RELISTS):
            if sum(map(len, names)) + ENTRY_BYTES * len(names) < ATOMIC_LISTING_BYTES:
                break
            before, names = names, list_directory(directory, asks_server=self._asks_server)
            if set(names).issuperset(before):
                break
        return names

    def _unannounced(self, names: Mapping[BundleId, BundleName], cursors: Mapping[str, WriterCursor]) -> set[BundleName]:
        """Bundles that are new here, and later than all that their writers have announced."""
        announced = {writer: cursor.sequence for writer, cursor in cursors.items()}
        fresh = [name for id, name in names.items() if announced.get(id[0], 0) < id[1] and id not in self.bundles]
        if not fresh:
            return set()
        retired = self._feed.retired(self.namespace)
        return {name.plain for name in fresh if name.writer not in retired or retired[name.writer].sequence < name.sequence}

    def _announce_found(self, events: Sequence[Event]) -> None:
        try:
            if self._feed.syncs:
                # Its writer may not have come so far: what is promised here must survive a loss of power too.
                sync_directory(self._paths.bundles(self.namespace))
            self._feed.queue(self.namespace, events)
            self._feed.announce()
        except OSError as error:
            logger.debug("cannot tell others what was found in namespace %s: %s", self.namespace, error)

    def _apply_listing(self, names: Mapping[BundleId, BundleName]) -> list[BundleId]:
        """Add the bundles that are there, and tell which are not any more."""
        for id in names.keys() & self.bundles.keys():
            known, name = self.bundles[id], names[id]
            if known.name == name:
                continue
            if known.name.plain == name.plain:
                # It is being replaced, or whoever wanted to has been killed.
                known.name = name
            else:
                # Another file's, whose bytes are never read as the known bundle's: that one is gone.
                self._remove([id])
        gone = [id for id in (*self.bundles, *self._prepared) if id not in names]
        self.add([self.bundle(name) for id, name in names.items() if id not in self.bundles])
        return gone


class BundleSets:
    """The shelves of a store by namespace, made when first asked for."""

    def __init__(self, paths: StorePaths, feed: ChangeFeed, *, asks_server: bool) -> None:
        self._paths = paths
        self._feed = feed
        self._asks_server = asks_server
        self._lock = threading.Lock()
        self._bundle_sets: dict[str, BundleSet] = {}
        self.made: Callable[[BundleSet], None] | None = None

    def get(self, namespace: str) -> BundleSet:
        bundle_set = self._bundle_sets.get(namespace)
        if bundle_set is not None:
            return bundle_set
        with self._lock:
            bundle_set = self._bundle_sets.get(namespace)
            if bundle_set is None:
                bundle_set = BundleSet(namespace, self._paths, self._feed, asks_server=self._asks_server)
                if self.made is not None:
                    self.made(bundle_set)
                self._bundle_sets[namespace] = bundle_set
            return bundle_set

    def all(self) -> list[BundleSet]:
        return list(self._bundle_sets.values())
