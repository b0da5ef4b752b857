"""The bundles of a namespace, kept in memory and in step with the change feed.

A bundle set applies the events that other writers have announced. Where events are missing (a log
with a gap, a cursor that was removed, a store that was made anew) it lists the directory instead.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import Bundle, BundleId, BundleName, bundles_among
from hicache_backends.file.events import Added, Event, Found, Removed, Unlisted
from hicache_backends.file.paths import MAX_USUAL_BYTES
from hicache_backends.file.temp_files import writers_at_work
from hicache_backends.posix.directories import sync_directory
from hicache_backends.posix.faults import detached
from hicache_backends.posix.files import file_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicache_backends.file.bundle import BundleIndex
    from hicache_backends.file.change_feed import ChangeFeed, FeedSnapshot
    from hicache_backends.file.events import WriterCursor
    from hicache_storage.spec import RemovalReason

    Expired = Callable[[], bool]
    """Returns whether the caller's deadline has passed: what is left then, such as indexes of new
    bundles that are still to be read, is left for the next call."""

logger = logging.getLogger(__name__)

ATOMIC_LISTING_BYTES = 32 << 10
"""A listing of at most so many bytes is read in one system call, which no rename interrupts."""

ENTRY_BYTES = 32
"""Bytes of a directory entry beside its name, at most."""

MAX_REMOVALS = 32
"""Limit on bundles whose removal is announced at once; a cursor has room for some ten."""

MAX_RELISTS = 8
"""Limit on listing a directory again because other processes change it meanwhile."""

MAX_GONE = 1024
"""Removed bundles that are kept among those to be evicted."""

MAX_CATCH_UPS = 64
"""Limit on attempts of one call to read the indexes of bundles that others replace meanwhile."""


def no_deadline() -> bool:
    """The deadline of a caller without one: it never expires."""
    return False


@dataclass(frozen=True, slots=True)
class _CatchUp:
    """The steps that remain after the new bundles have been added."""

    removed: list[BundleId]
    seen: dict[str, int]
    """By writer, the number of the last event that was applied."""
    invalidations: int
    """Count of invalidations at the start: a listing requested since is still to be made."""
    listed: bool = False


class BundleSet:
    """The bundles of one namespace. Safe for many threads: `lock` is held while they change.

    Lookups take no lock. So a replacement is added before the bundle that it replaces is removed: a
    page that stays in the store is found at any moment.

    `on_added` and `on_removed` are called with the lock held, so they do no I/O. A call that was
    interrupted is repeated with the same bundles.
    """

    def __init__(self, namespace: str, feed: ChangeFeed) -> None:
        self.namespace = namespace
        self.directory = feed.paths.bundles(namespace)
        self.lock = threading.RLock()
        self.bundles: dict[BundleId, Bundle] = {}
        self.used = 0
        """Bytes in all of them."""
        self._prepared: dict[BundleId, Bundle] = {}
        """Published by this storage, and not announced yet."""
        self.feed = feed
        self.on_added: Callable[[Sequence[Bundle]], None] = lambda bundles: None
        self.on_removed: Callable[[Sequence[Bundle]], None] = lambda bundles: None
        self._adding: dict[BundleId, Bundle] = {}
        """Being added; left non-empty only by an interrupt."""
        self.added = list[Bundle]()
        """Those that eviction has not been told of."""
        self.index: Callable[[Expired], None] = lambda expired: None
        """Reads the indexes of new bundles, without the lock."""
        self.vanished: Callable[[Bundle], None] = lambda bundle: None
        """Called for an own bundle that is gone before it could be added, with the lock."""
        self._generation = -1
        self._epoch = -1
        self._invalidations = 0
        self._orphans: list[Bundle] = []
        """Void files that the last listing has shown."""
        self._leaving: dict[BundleId, Bundle] = {}
        """Announced as removed by another process, which may not have removed the files yet."""
        self.removing = threading.RLock()
        """Held by the one thread that removes files; taken before `lock`."""
        self._seen: dict[str, int] = {}
        """By writer, the number of the last event that was applied."""
        self._writers = set[str]()
        """Those with a cursor in the last snapshot: others have been retired."""
        self._buried = set[BundleId]()
        """Removed before their writers have announced them: a late announcement adds nothing."""
        self._since_listing: dict[str, int] | None = None
        """`_seen` after the first snapshot that follows the last listing; None before that."""

    def is_current(self, snapshot: FeedSnapshot) -> bool:
        """Return whether every event of a snapshot has been applied."""
        return self._generation >= snapshot.generation

    def catch_up(self, snapshot: FeedSnapshot, expired: Expired = no_deadline) -> None:
        """Apply the events that have been announced, and read the indexes of new bundles.

        Raises:
            OSError: the bundles could not be listed, or are replaced faster than they are read.
        """
        waited, announced = set[BundleName](), set[BundleName]()
        for attempt in range(MAX_CATCH_UPS):
            # A thread that hangs in a listing holds the lock, and keeps none that is up to date.
            if self.is_current(snapshot):
                plan = None
            else:
                with self.lock:
                    plan = self._begin_catch_up(snapshot, announced, last=attempt >= MAX_RELISTS)
            if isinstance(plan, set):
                # A page reported here must be found by every later caller. In most cases the writer
                # is about to announce it: wait for one more listing.
                late = plan & waited
                # A bundle found by two listings in turn: its writer was probably killed between the
                # rename and the announcement. This storage is about to report its pages, so it
                # announces the bundle itself.
                if late:
                    self._announce_found([Found(name) for name in late])
                    announced |= late
                waited = plan
                snapshot = self.feed.read()
                continue
            # New bundles are visible before old ones are removed: a replacement holds the pages of
            # the bundle that it replaces. A file that is gone, here or in another thread, has
            # perhaps a replacement that is not announced yet, which only a listing shows: nothing
            # is removed before that.
            self.index(expired)
            if self.is_current(snapshot) if plan is None else self._end_catch_up(snapshot, plan):
                with contextlib.suppress(OSError):
                    self._remove_orphans(snapshot)
                return
        # Counted as a fault. To go on without the replacements would be misses that nobody counts.
        raise OSError(
            errno.ESTALE, f"bundles in {self.directory} are replaced faster than they are read"
        )

    def _remove_orphans(self, snapshot: FeedSnapshot) -> None:
        """Remove void files that killed processes have left behind.

        One that a living process is about to remove is left to it, which counts its pages.
        """
        orphans = self._orphans
        self._orphans = []
        if not orphans:
            return
        at_work = writers_at_work(self.feed.paths)
        cursors = snapshot.of(self.namespace)
        busy = _removing({writer: cursors[writer] for writer in at_work & cursors.keys()})
        left = [one for one in orphans if one.name.claim is not None or one.id not in busy]
        if len(left) < len(orphans):
            self.invalidate()
        # Announced again: storages that do not list may still report the pages.
        self.remove_files(left, void=True)

    def _begin_catch_up(
        self, snapshot: FeedSnapshot, announced: set[BundleName], *, last: bool
    ) -> _CatchUp | set[BundleName] | None:
        """Add the new bundles of the events, or, where some are missing, of a listing; with the lock.

        Args:
            announced: bundles that were unannounced before and that this call has announced.
            last: apply the listing even if some of its bundles are unannounced.

        Returns:
            The steps that remain; None if there is nothing to apply; or bundles that are in place
            and unannounced, apart from those in `announced`, and nothing is changed.
        """
        # Another thread may have applied it meanwhile.
        if self.is_current(snapshot):
            return None
        # An earlier call was interrupted while it added bundles.
        self._commit_adding()
        invalidations, cursors = self._invalidations, snapshot.of(self.namespace)
        seen = {writer: cursor.sequence for writer, cursor in cursors.items()}
        # Events build on what was known before, which a store that was made anew makes void.
        if self._epoch == snapshot.epoch:
            events = self._new_events(cursors)
            removed = None if events is None else self._apply_events(events)
            if events is not None and removed is not None:
                if removed or self._leaving:
                    self._note_leaving(events, removed, _removing(cursors))
                return _CatchUp(removed, seen, invalidations)
        names = self._list_bundles(cursors)
        if not last and (unannounced := self._unannounced(names, cursors) - announced):
            return unannounced
        # The void ones, too: their writers may announce them later.
        removed = [*self._apply_listing(names), *(bundle.id for bundle in self._orphans)]
        return _CatchUp(removed, seen, invalidations, listed=True)

    def _end_catch_up(self, snapshot: FeedSnapshot, plan: _CatchUp) -> bool:
        """Remove the old bundles, unless a listing has been requested since the plan was made."""
        with self.lock:
            if self._invalidations != plan.invalidations:
                return False
            self.remove(plan.removed)
            if self._generation < snapshot.generation:
                self._note_positions(plan)
                self._buried = set(filter(self._is_unannounced, self._buried))
                self._generation = snapshot.generation
                self._epoch = snapshot.epoch
            return True

    def invalidate(self) -> None:
        """Make the next call list the bundles, to find also unannounced changes.

        Such as a bundle whose writer was killed before its announcement, or a file deleted by hand.
        """
        with self.lock:
            self._generation = -1
            self._epoch = -1
            self._invalidations += 1

    def prepare_add(self, bundle: Bundle) -> None:
        """Note a bundle that is in place and that `commit_add` will add after its announcement."""
        with self.lock:
            self._prepared[bundle.id] = bundle

    def commit_add(self, bundle: Bundle) -> None:
        """Add a prepared bundle, unless it has been removed since."""
        with self.lock:
            # A call that was interrupted is repeated: removed from `_prepared` last.
            if bundle.gone:
                self.vanished(bundle)
            else:
                self.add([bundle])
            self._prepared.pop(bundle.id, None)

    def add(self, bundles: Iterable[Bundle]) -> None:
        """Add bundles that are in place."""
        with self.lock:
            self._adding.update(
                {bundle.id: bundle for bundle in bundles if bundle.id not in self.bundles}
            )
            self._commit_adding()

    def _commit_adding(self) -> None:
        """Report the bundles being added, and store them.

        A call that was interrupted, at any point, is repeated by the next one.
        """
        if not self._adding:
            return
        bundles = list(self._adding.values())
        self.on_added(bundles)
        used = self.used + sum([bundle.size for bundle in bundles])
        self.bundles.update(self._adding)
        # No call between these, because an interrupt may come with a call: the repetition would
        # add the sizes again.
        self.used = used
        self.added += bundles
        self._adding = {}

    def remove_files(
        self,
        bundles: Sequence[Bundle],
        expired: Expired = no_deadline,
        *,
        void: bool = False,
        paths: Mapping[Bundle, str] | None = None,
        reason: RemovalReason | None = None,
    ) -> list[bool | OSError]:
        """Announce that bundles are removed, as many at once as fit into a cursor; unlink them.

        Args:
            void: no storage uses these files, and one that cannot be removed stays void.
            paths: the files, where a bundle that has another name by now is to stay.
            reason: why their pages are removed; None if these are in the store all the same.

        Returns:
            For each bundle, `True`; `False` if its file was gone: another process has removed it,
            or is replacing it by a bundle with some of its pages, which the next listing finds out;
            or the error after which it may still be there.

        Raises:
            OSError: an announcement failed; the files of its bundles are still there.
        """
        outcomes = list[bool | OSError]()
        while (done := len(outcomes)) < len(bundles):
            if expired():
                passed = TimeoutError("the deadline has passed; some bundles are still there")
                return [*outcomes, *[passed] * (len(bundles) - done)]
            with self.removing:
                batch = bundles[done : done + MAX_REMOVALS]
                for bundle in batch:
                    bundle.reason = reason
                outcomes += self._remove_batch(batch, void=void, paths=paths or {})
        return outcomes

    def _remove_batch(
        self, bundles: Sequence[Bundle], *, void: bool, paths: Mapping[Bundle, str]
    ) -> list[bool | OSError]:
        # What is queued does not grow while announcements fail.
        self.feed.announce()
        ids = [bundle.id for bundle in bundles]
        ids = ids[: self.feed.fitting(self.namespace, ids)]
        bundles = bundles[: len(ids)]
        left, outcomes = list(bundles), list[bool | OSError]()
        try:
            self.feed.announce_removal(self.namespace, ids, partial(self.remove, ids))
            if self.feed.fitting(self.namespace, ids) < len(ids):
                # Names of cursors have just been found to be shorter here: again, with fewer.
                return outcomes
            for bundle in bundles:
                # Without a lock of the lookups: an unlink that hangs keeps no other thread.
                outcomes.append(_unlink(paths.get(bundle) or bundle.path))
                if outcomes[-1] is True:
                    left.remove(bundle)
            if left:
                # Gone, or renamed by a claim; only in the latter case it comes back.
                self.invalidate()
                with contextlib.suppress(OSError):
                    names = bundles_among(self.feed.paths.list_names(self.directory))
                    present = {name.id for name in names}
                    left = [bundle for bundle in left if bundle.id in present]
        finally:
            # Also after an error or an interrupt: what may still be there comes back.
            returning = [] if void else [bundle.name.plain for bundle in left]
            self.feed.end_removal(self.namespace, returning, self.invalidate)
        return outcomes

    def leaving_bytes(self) -> int:
        """Bytes of files that another process is removing and that are still there."""
        for id, bundle in list(self._leaving.items()):
            if not os.path.exists(bundle.path):
                self._leaving.pop(id, None)
        return sum([bundle.size for bundle in list(self._leaving.values())])

    def remove(self, ids: Iterable[BundleId]) -> None:
        """Remove bundles whose files are gone."""
        with self.lock:
            known = list[Bundle]()
            for id in dict.fromkeys(ids):
                if self._is_unannounced(id):
                    self._buried.add(id)
                # Another storage has found it by listing, and removed it before its announcement.
                if (prepared := self._prepared.get(id)) is not None:
                    prepared.gone = True
                if (bundle := self.bundles.get(id)) is not None:
                    bundle.gone = True
                    known.append(bundle)
            if known:
                self.on_removed(known)
            # Last, and without a call in between: after an interrupt they are removed again.
            for bundle in known:
                del self.bundles[bundle.id]
                self.used -= bundle.size
            # A process that never evicts does not take them.
            if len(self.added) > 2 * len(self.bundles) + MAX_GONE:
                self.added = [bundle for bundle in self.added if not bundle.gone]

    def note_size(self, bundle: Bundle, size: int) -> None:
        """Correct the length of a bundle whose file differs from its name.

        The capacity counts the bytes of the file.
        """
        with self.lock:
            if self.bundles.get(bundle.id) is bundle:
                self.used += size - bundle.size
            bundle.size = size

    def collect_logs(self, snapshot: FeedSnapshot) -> None:
        """Remove event logs and retired cursors of bundles that are gone; they are only a cache."""
        with self.lock:
            if self._generation < 0:
                return
            needed = list(self.bundles)
        cursors = snapshot.of(self.namespace)
        self.feed.logs.collect(
            self.namespace, needed, {writer: cursor.sequence for writer, cursor in cursors.items()}
        )
        with contextlib.suppress(OSError):
            self.feed.collect_retired(self.namespace, {id.writer for id in needed})

    def bundle(self, name: BundleName, index: BundleIndex | None = None) -> Bundle:
        """A new `Bundle` of that name, not yet in the set."""
        keys, envelopes = ((), b"") if index is None else (index.keys, index.envelopes)
        return Bundle(
            self.namespace,
            name,
            self.directory,
            name.id,
            name.size,
            name.created_us * 1_000,
            keys,
            envelopes,
        )

    def _bundle_in_place(self, name: BundleName, index: BundleIndex | None = None) -> Bundle:
        """A bundle that another process has published."""
        bundle = self.bundle(name, index)
        if name.size > MAX_USUAL_BYTES:
            bundle.size = file_bytes(bundle.path)
        return bundle

    def _new_events(self, cursors: Mapping[str, WriterCursor]) -> list[Event] | None:
        """The events that are new here; None if some are unknown.

        That is where a log has a gap, or a cursor has disappeared.
        """
        # This storage's own changes are in the set already.
        own, events = self.feed.writer, list[Event]()
        if not self._writers - {own} <= cursors.keys():
            return None
        if all(
            self._add_missed(cursor, events) for writer, cursor in cursors.items() if writer != own
        ):
            return events
        return None

    def _add_missed(self, cursor: WriterCursor, events: list[Event]) -> bool:
        """Append the new events of one writer; return `False` if some are unknown."""
        seen = self._seen.get(cursor.writer, 0)
        missed = cursor.since(seen)
        if missed is None:
            known = cursor.sequence - len(cursor.events)
            missed, rest = (
                self.feed.logs.since(self.namespace, cursor.writer, seen, known),
                cursor.since(known),
            )
            if missed is None or rest is None:
                return False
            missed += rest
        events += missed
        return True

    def _apply_events(self, events: Sequence[Event]) -> list[BundleId] | None:
        """Add the new bundles of some events, and return the removed ones.

        Returns:
            None, and nothing is changed, if the events require a listing.
        """
        # Removals of all writers first: a bundle of one writer may have been removed by another,
        # whose cursor was read first.
        removed = {event.bundle for event in events if isinstance(event, Removed)}
        void = removed | self._buried
        added = list[Bundle]()
        for event in events:
            if isinstance(event, Unlisted):
                return None
            if isinstance(event, Removed):
                continue
            bundle = self._bundle_in_place(event.bundle, event.index)
            if bundle.id not in self.bundles and bundle.id not in void:
                added.append(bundle)
        self._suspect([bundle for bundle in added if not self._is_trusted(bundle.name.writer)])
        self.add(added)
        return list(removed)

    def _suspect(self, bundles: Sequence[Bundle]) -> None:
        """Forget indexes that the log has of bundles whose files are gone.

        These were perhaps removed before the last listing, which has not shown them, and announced
        after it.
        """
        if any(bundle.keys for bundle in bundles):
            present = {name.id for name in bundles_among(self._stable_listing())}
            for bundle in bundles:
                if bundle.id not in present:
                    bundle.keys = ()
                    bundle.envelopes = b""
        for bundle in bundles:
            bundle.suspect = not bundle.keys

    def _note_positions(self, plan: _CatchUp) -> None:
        """Note how far the events have been applied."""
        self._seen.update(plan.seen)
        self._writers = set(plan.seen)
        if plan.listed:
            self._since_listing = None
        elif self._since_listing is None:
            self._since_listing = self._seen.copy()

    def _is_trusted(self, writer: str) -> bool:
        """Return whether a writer has announced all bundles of the time of the last listing.

        It announces together all that it has renamed before. So once it has announced anything
        after the first snapshot that follows a listing, none of these is still to be announced.
        """
        before = self._since_listing
        return before is not None and self._seen.get(writer, 0) > before.get(writer, 0)

    def _is_unannounced(self, id: BundleId) -> bool:
        """Return whether the writer of a bundle is still to announce it, as far as is known."""
        return id.writer != self.feed.writer and self._seen.get(id.writer, 0) < id.sequence

    def _note_leaving(
        self, events: Sequence[Event], removed: Sequence[BundleId], void: set[BundleId]
    ) -> None:
        """Note the bundles whose files may still be there after an announced removal.

        Also those that this storage has never known: announced and removed since its last call.
        """
        gone = {id: self.bundles[id] for id in removed if id in self.bundles}
        if void:
            new = [event.bundle for event in events if isinstance(event, Added)]
            gone |= {name.id: self.bundle(name) for name in new if name.id in void}
        self._leaving = {
            id: bundle for id, bundle in {**self._leaving, **gone}.items() if id in void
        }

    def _list_bundles(self, cursors: Mapping[str, WriterCursor]) -> dict[BundleId, BundleName]:
        """List the bundles that are in place, and note void ones.

        A file is void whose removal the last events of a writer announce, as long as they are the
        last: that process is about to remove it, or was killed before it could.
        """
        # Before the listing: this storage ends a removal after the file is gone.
        own = self.feed.removing.get(self.namespace, ())
        void = _removing(cursors)
        names, claimed = dict[BundleId, BundleName](), list[BundleName]()
        for name in bundles_among(self._stable_listing()):
            id = name.id
            other = names.setdefault(id, name)
            if other is not name:
                names[id] = self._resolve_duplicate(other, name)
            if name.claim is not None:
                claimed.append(name)
        # After all names are known: a replacement may be listed after the bundle that it replaces.
        void.update(
            name.id
            for name in claimed
            if name.claim is not None and name.claim.replacement in names
        )
        found = [names.pop(id) for id in void.union(own) & names.keys()]
        self._orphans = [self.bundle(name) for name in found if name.id not in own]
        self._leaving = {bundle.id: bundle for bundle in self._orphans}
        return names

    def _resolve_duplicate(self, one: BundleName, other: BundleName) -> BundleName:
        """Choose one of two names in a listing that have the same number."""
        if one.plain == other.plain:
            # Listed twice: before and after a claim, or before and after its end.
            return other
        # Two files with one number, which only a fault can produce: all storages choose the same
        # one. A file whose length differs from its name is not a bundle.
        return min(
            (one, other),
            key=lambda name: (
                file_bytes(f"{self.directory}/{name}") != name.size,
                name.created_us,
                name.checksum,
            ),
        )

    def _stable_listing(self) -> list[str]:
        """The names of the files, from a listing that no rename has passed.

        A long listing takes several steps. A bundle that is renamed between two of them, from a
        name not listed yet to one that has been passed, would be missing. So the directory is
        listed until no name has disappeared since the time before. A bundle that is renamed twice,
        each time past a listing, is missing until the process that renames it announces the change:
        then all storages list again.
        """
        names = self.feed.paths.list_names(self.directory)
        for _ in range(MAX_RELISTS):
            if sum(map(len, names)) + ENTRY_BYTES * len(names) < ATOMIC_LISTING_BYTES:
                break
            before, names = names, self.feed.paths.list_names(self.directory)
            if set(names).issuperset(before):
                break
        return names

    def _unannounced(
        self, names: Mapping[BundleId, BundleName], cursors: Mapping[str, WriterCursor]
    ) -> set[BundleName]:
        """Bundles that are new here, with numbers above those that their writers have announced."""
        # A writer announces its events in the order of their numbers, so the last number covers all
        # before.
        announced = {writer: cursor.sequence for writer, cursor in cursors.items()}
        fresh = [
            name
            for id, name in names.items()
            if announced.get(id.writer, 0) < id.sequence and id not in self.bundles
        ]
        if not fresh:
            return set()
        retired = self.feed.retired(self.namespace)
        return {
            name.plain
            for name in fresh
            if name.writer not in retired or retired[name.writer].sequence < name.sequence
        }

    def _announce_found(self, events: Sequence[Event]) -> None:
        try:
            if self.feed.syncs:
                # Its writer may not have synced it yet: a page reported here must survive a loss of
                # power.
                sync_directory(self.directory)
            self.feed.queue(self.namespace, events)
            self.feed.announce()
        except OSError as error:
            logger.debug(
                "cannot announce bundles found by listing in namespace %s: %s",
                self.namespace,
                error,
            )

    def _apply_listing(self, names: Mapping[BundleId, BundleName]) -> list[BundleId]:
        """Add the bundles of a listing, and return those that are not in it."""
        for id in names.keys() & self.bundles.keys():
            known, name = self.bundles[id], names[id]
            if known.name == name:
                continue
            if known.name.plain == name.plain:
                # It has been claimed, or its claim was undone.
                known.name = name
            else:
                # A different file, whose bytes must never be read as the known bundle's: that one
                # is gone.
                self.remove([id])
        gone = [id for id in (*self.bundles, *self._prepared) if id not in names]
        self.add(
            [self._bundle_in_place(name) for id, name in names.items() if id not in self.bundles]
        )
        return gone


def _removing(cursors: Mapping[str, WriterCursor]) -> set[BundleId]:
    return {id for cursor in cursors.values() for id in cursor.removing}


def _unlink(path: str) -> bool | OSError:
    """Unlink a file: `True`, `False` if there is none, or the error."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        return False
    except OSError as error:
        return detached(error)
    return True


class BundleSets:
    """The bundle sets of a store by namespace, created when first asked for."""

    def __init__(self, feed: ChangeFeed) -> None:
        self.feed = feed
        self._lock = threading.Lock()
        self._bundle_sets: dict[str, BundleSet] = {}

    def get(self, namespace: str) -> BundleSet:
        with self._lock:
            if namespace not in self._bundle_sets:
                self._bundle_sets[namespace] = BundleSet(namespace, self.feed)
            return self._bundle_sets[namespace]

    def all(self) -> list[BundleSet]:
        return list(self._bundle_sets.values())
