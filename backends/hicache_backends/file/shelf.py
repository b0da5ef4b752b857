"""Which bundles a namespace has: kept in memory, and up to date with what every writer has announced."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Protocol

from hicache_backends.file.attributes import list_directory
from hicache_backends.file.names import Added, BundleId, BundleName, Event, Found, Removed, Unlisted, bundles_among
from hicache_storage.objects import ENVELOPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_backends.file.board import Board, Notices
    from hicache_backends.file.names import Marker
    from hicache_backends.file.tree import Tree


logger = logging.getLogger(__name__)

STEP_BYTES = 32 << 10
"""A listing of so many bytes, or less, is read in one step, which no rename interrupts; `ENTRY_BYTES` come to each name."""

ENTRY_BYTES = 32

SETTLING = 8
"""How often a directory is listed again because others change it meanwhile."""


class Bundle:
    """A bundle as this process knows it."""

    __slots__ = ("checked", "envelopes", "gone", "keys", "modified", "name", "namespace", "path", "touched", "useless")

    def __init__(self, namespace: str, name: BundleName, path: str) -> None:
        self.namespace, self.name, self.path = namespace, name, path
        self.keys: list[str] = []
        """The pages, once the index has been read."""
        self.envelopes = b""
        self.touched = 0
        """When this process last used it, in nanoseconds since 1970."""
        self.modified = name.created_us * 1_000
        """The file's mtime when last asked for; what other processes say about its use."""
        self.checked = 0.0
        """When that was, on the monotonic clock."""
        self.gone = False
        self.useless = False
        """It is no bundle, whatever its name says."""

    @property
    def recency(self) -> int:
        """When it was last used, as far as is known."""
        return 0 if self.useless else max(self.touched, self.modified)

    def envelope(self, page: int) -> bytes:
        """The envelope of a page, once the index has been read."""
        return self.envelopes[page * ENVELOPE_BYTES : (page + 1) * ENVELOPE_BYTES]


class ShelfListener(Protocol):
    """Who wants to know which bundles come and go. Called with the shelf's lock held."""

    def bundles_added(self, bundles: Sequence[Bundle]) -> None: ...

    def bundles_removed(self, bundles: Sequence[Bundle]) -> None: ...


class Shelf:
    """The bundles of one namespace. Safe for many threads: `lock` is held while they change.

    Lookups take no lock. So a bundle that has taken another's place is on the shelf before that one leaves it: a page
    that stays in the store all the while is found all the while.
    """

    def __init__(self, namespace: str, tree: Tree, board: Board, *, asks_server: bool) -> None:
        self.namespace = namespace
        self.lock = threading.RLock()
        self.bundles: dict[BundleId, Bundle] = {}
        self.used = 0
        """Bytes in all of them."""
        self._expected: dict[BundleId, Bundle] = {}
        """Published by this storage, and not announced yet."""
        self._listed_since = False
        """Since others were last made to list: then more may be known here than everyone was told of."""
        self._tree, self._board, self._asks_server = tree, board, asks_server
        self._listeners: list[ShelfListener] = []
        self._generation = self._epoch = -1
        self._seen: dict[str, int] = {}

    def listen(self, listener: ShelfListener) -> None:
        """Tell a listener of all bundles, those that are there first."""
        with self.lock:
            self._listeners.append(listener)
            if self.bundles:
                listener.bundles_added(list(self.bundles.values()))

    def is_current(self, notices: Notices) -> bool:
        """Whether there is nothing to catch up with."""
        return self._generation >= notices.generation

    def catch_up(self, notices: Notices) -> None:
        """Take in what has been announced.

        Raises:
            OSError: the bundles could not be listed.
        """
        if self.is_current(notices):
            return
        waited, told = set[BundleName](), set[BundleName]()
        for attempt in range(SETTLING + 1):
            untold = self._catch_up(notices, told, last=attempt == SETTLING)
            if not untold:
                return
            # What is found here must be found by everybody who asks from now on. Mostly its writer is about to tell.
            late = untold & waited
            if late:
                self._tell([Found(name) for name in late])
                told |= late
            waited = untold
            notices = self._board.read()

    def _catch_up(self, notices: Notices, told: set[BundleName], *, last: bool) -> set[BundleName]:
        """Take in what has been announced, or, where that is not enough, what is there.

        Args:
            told: bundles that everybody has been told of by now.
            last: take in all that is there, told or not.

        Returns:
            Bundles that are there and that nobody has been told of, but for those in `told`: nothing was taken in then.
        """
        with self.lock:
            if self._generation >= notices.generation:
                return set()
            markers = notices.of(self.namespace)
            events = None if self._epoch != notices.epoch else self._events(markers)
            if events is None or not self._apply(events):
                self.distrust()
                self._listed_since = True
                names = self._listed()
                for _ in range(SETTLING):
                    if not last and (untold := self._untold(names, markers) - told):
                        return untold
                    if self._take(names):
                        break
                    names = self._listed()
                self._drop_all_but(names)
            self._seen = {writer: marker.sequence for writer, marker in markers.items()}
            self._generation, self._epoch = notices.generation, notices.epoch
        return set()

    def distrust(self) -> None:
        """List the bundles the next time, to find also what nobody has announced.

        That is a bundle whose writer was killed before it could, or a file deleted by hand.
        """
        with self.lock:
            self._generation = self._epoch = -1

    def share_knowledge(self) -> None:
        """Make everyone list with the next announcement, if this shelf may know of what nobody has told yet.

        A page that is not found here may have been removed by another who is still about to say so.
        """
        with self.lock:
            if self._listed_since:
                self._listed_since = False
                self._board.queue(self.namespace, [Unlisted()])

    def expect(self, bundle: Bundle) -> None:
        """Note a bundle that is there and that `arrive` will add, unless it has been removed until then."""
        with self.lock:
            self._expected[bundle.name.id] = bundle

    def arrive(self, bundle: Bundle) -> bool:
        """Whether an expected bundle is still there; the lock is held until it has been added."""
        del self._expected[bundle.name.id]
        return not bundle.gone

    def add(self, bundles: Sequence[Bundle]) -> None:
        """Note bundles that were published."""
        with self.lock:
            fresh = [bundle for bundle in bundles if bundle.name.id not in self.bundles]
            for bundle in fresh:
                self.bundles[bundle.name.id] = bundle
                self.used += bundle.name.size
            if fresh:
                for listener in self._listeners:
                    listener.bundles_added(fresh)

    def remove(self, bundles: Sequence[Bundle]) -> None:
        """Note bundles whose files are gone."""
        self._remove({bundle.name.id for bundle in bundles})

    def _remove(self, ids: Iterable[BundleId]) -> None:
        with self.lock:
            known = list[Bundle]()
            for id in ids:
                # Somebody has found it by listing, and removed it before its writer could tell of it.
                if (expected := self._expected.get(id)) is not None:
                    expected.gone = True
                if (bundle := self.bundles.pop(id, None)) is not None:
                    bundle.gone = True
                    self.used -= bundle.name.size
                    known.append(bundle)
            if known:
                for listener in self._listeners:
                    listener.bundles_removed(known)

    def bundle(self, name: BundleName) -> Bundle:
        """A bundle of that name, not yet on the shelf."""
        return Bundle(self.namespace, name, self._tree.bundle(self.namespace, name))

    def _events(self, markers: Mapping[str, Marker]) -> list[Event] | None:
        """What is new; None where that cannot be told, because a marker has left some out or has disappeared."""
        if any(writer not in markers and writer != self._board.writer for writer in self._seen):
            return None
        events = list[Event]()
        for writer, marker in markers.items():
            # What this storage itself has done is on the shelf already.
            if writer == self._board.writer:
                continue
            missed = marker.since(self._seen.get(writer, 0))
            if missed is None:
                return None
            events += missed
        return events

    def _apply(self, events: Sequence[Event]) -> bool:
        """Take in what is new; `False` where a bundle is gone again: another may have its pages, and not be told of yet."""
        # By all writers together: one's bundle may have been removed by another, whose marker came first.
        removed = {event.bundle for event in events if isinstance(event, Removed)}
        added = [event.bundle for event in events if isinstance(event, (Added, Found))]
        if not self._add_names(name for name in added if name.id not in removed):
            return False
        self._remove(removed)
        return True

    def _listed(self) -> list[BundleName]:
        """The bundles that are there; those that have been replaced, and not yet removed, are removed now."""
        directory = self._tree.bundles(self.namespace)
        names = bundles_among(self._settled(directory))
        there = {name.id for name in names}
        void = [name for name in names if name.claim is not None and name.claim.replacement in there]
        for name in void:
            with contextlib.suppress(OSError):
                os.unlink(f"{directory}/{name}")
        return [name for name in names if name not in void] if void else names

    def _settled(self, directory: str) -> list[str]:
        """The names in a directory.

        A long listing takes several steps, between which a bundle that was not listed yet may move to a name that would
        have been. So it is listed until nothing has disappeared since the time before. A bundle that moves twice, each time
        past a listing, is missed until who moves it tells of it: then everybody looks again.
        """
        names = list_directory(directory, asks_server=self._asks_server)
        for _ in range(SETTLING):
            if sum(map(len, names)) + ENTRY_BYTES * len(names) < STEP_BYTES:
                break
            before, names = names, list_directory(directory, asks_server=self._asks_server)
            if set(names).issuperset(before):
                break
        return names

    def _untold(self, names: Sequence[BundleName], markers: Mapping[str, Marker]) -> set[BundleName]:
        """Bundles that are new here, and later than all that their writers have announced."""
        fresh = [name._replace(claim=None) for name in names if name.id not in self.bundles]
        return {name for name in fresh if name.writer not in markers or markers[name.writer].sequence < name.sequence}

    def _tell(self, events: Sequence[Event]) -> None:
        try:
            self._board.queue(self.namespace, events)
            self._board.announce()
        except OSError as error:
            logger.debug("cannot tell others what was found in namespace %s: %s", self.namespace, error)

    def _take(self, names: Sequence[BundleName]) -> bool:
        """Add the bundles that are there; `False` where some are gone already."""
        for name in names:
            known = self.bundles.get(name.id)
            if known is not None and known.name != name:
                # It is being replaced, or whoever wanted to has been killed.
                known.name, known.path = name, self._tree.bundle(self.namespace, name)
        return self._add_names(names)

    def _drop_all_but(self, names: Sequence[BundleName]) -> None:
        there = {name.id for name in names}
        self._remove([id for id in (*self.bundles, *self._expected) if id not in there])

    def _add_names(self, names: Iterable[BundleName]) -> bool:
        """Add bundles that are new here; `False` where one's file was gone when its index was to be read."""
        # Some may be named twice: by their writer and by who has found them, or before and after they were claimed.
        fresh = {name.id: name for name in names if name.id not in self.bundles}
        bundles = [self.bundle(name) for name in fresh.values()]
        self.add(bundles)
        return not any(bundle.gone for bundle in bundles)
