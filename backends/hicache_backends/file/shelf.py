"""Which bundles a namespace has: kept in memory, and up to date with what every writer has announced."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import msgspec

from hicache_backends.file.attributes import list_directory
from hicache_backends.file.names import Added, BundleId, BundleName, Event, Found, Removed, Unlisted, bundles_among
from hicache_backends.file.tree import sync_directory
from hicache_storage.objects import ENVELOPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicache_backends.file.board import Board, Notices
    from hicache_backends.file.bundle import Index
    from hicache_backends.file.events import EventLogs
    from hicache_backends.file.names import Marker
    from hicache_backends.file.tree import Tree


logger = logging.getLogger(__name__)

STEP_BYTES = 32 << 10
"""A listing of so many bytes, or less, is read in one step, which no rename interrupts; `ENTRY_BYTES` come to each name."""

ENTRY_BYTES = 32

SETTLING = 8
"""How often a directory is listed again because others change it meanwhile."""


def never() -> bool:
    """The deadline of a caller without one: it has not passed."""
    return False


class Bundle(msgspec.Struct, eq=False, gc=False):
    """A bundle as this process knows it.

    There is one for each file of a store, so what can be computed is not kept, and the garbage collector, which would go
    through all of them, leaves them alone: they refer to nothing that refers to them.
    """

    namespace: str
    name: BundleName
    directory: str
    id: BundleId
    size: int
    """Bytes of the file: what its name says, until the file has been found to have another length."""
    modified: int
    """The file's mtime when last asked for; what other processes say about its use."""
    keys: list[str]
    """The pages, once the index has been read."""
    envelopes: bytes = b""
    touched: int = 0
    """When this process last used it, in nanoseconds since 1970."""
    checked: float = 0.0
    """When `modified` was asked for, on the monotonic clock."""
    gone: bool = False
    useless: bool = False
    """It is no bundle, whatever its name says."""

    @property
    def path(self) -> str:
        """Where the file is, by its present name."""
        return f"{self.directory}/{self.name}"

    @property
    def recency(self) -> int:
        """When it was last used, as far as is known."""
        return 0 if self.useless else max(self.touched, self.modified)

    def envelope(self, page: int) -> bytes:
        """The envelope of a page, once the index has been read."""
        return self.envelopes[page * ENVELOPE_BYTES : (page + 1) * ENVELOPE_BYTES]


class ShelfListener(Protocol):
    """Who wants to know which bundles come and go.

    Called with the shelf's lock held, so it does no I/O. A call that was interrupted is repeated, with the same bundles.
    """

    def bundles_added(self, bundles: Sequence[Bundle]) -> None: ...

    def bundles_removed(self, bundles: Sequence[Bundle]) -> None: ...


@dataclass(frozen=True, slots=True)
class _Plan:
    """What is left to do when the bundles that are new have been added."""

    removed: list[BundleId]
    seen: dict[str, int]
    """By writer, the number of the last event that is taken in."""
    distrusts: int
    """As of the beginning: a listing that was asked for since is still to be made."""


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
        self._directory = tree.bundles(namespace)
        self._listeners: list[ShelfListener] = []
        self._arriving: dict[BundleId, Bundle] = {}
        """Being added: not empty only where that was interrupted."""
        self.index: Callable[[Callable[[], bool]], bool] = lambda expired: True
        """Reads the indexes of new bundles, without the lock; `False` where files are gone."""
        self._generation = self._epoch = -1
        self._distrusts = 0
        self._seen: dict[str, int] = {}
        self._retired: dict[str, int] = {}
        """Of writers that are retired: the number of the last event that is taken in."""

    @property
    def logs(self) -> EventLogs:
        """The store's event logs."""
        return self._board.logs

    def listen(self, listener: ShelfListener) -> None:
        """Tell a listener of all bundles, those that are there first."""
        with self.lock:
            self._listeners.append(listener)
            if self.bundles:
                listener.bundles_added(list(self.bundles.values()))

    def is_current(self, notices: Notices) -> bool:
        """Whether there is nothing to catch up with."""
        return self._generation >= notices.generation

    def catch_up(self, notices: Notices, expired: Callable[[], bool] = never) -> None:
        """Take in what has been announced.

        Args:
            expired: whether the caller's deadline has passed: then indexes are left for the next call to read.

        Raises:
            OSError: the bundles could not be listed.
        """
        if self.is_current(notices):
            return
        waited, told = set[BundleName](), set[BundleName]()
        for attempt in range(SETTLING + 1):
            untold = self._catch_up(notices, told, expired, last=attempt == SETTLING)
            if not untold:
                return
            # What is found here must be found by everybody who asks from now on. Mostly its writer is about to tell.
            late = untold & waited
            if late:
                self._tell([Found(name) for name in late])
                told |= late
            waited = untold
            notices = self._board.read()

    def _catch_up(self, notices: Notices, told: set[BundleName], expired: Callable[[], bool], *, last: bool) -> set[BundleName]:
        """Take in what has been announced, or, where that is not enough, what is there.

        Args:
            told: bundles that everybody has been told of by now.
            last: take in all that is there, told or not.

        Returns:
            Bundles that are there and that nobody has been told of, but for those in `told`: nothing was taken in then.
        """
        for attempt in range(SETTLING + 1):
            with self.lock:
                if self._generation >= notices.generation:
                    return set()
                plan = self._plan(notices, told, last=last)
                if not isinstance(plan, _Plan):
                    return plan
            # New bundles can be found before old ones go: one that has taken another's place holds its pages.
            if not self.index(expired) and attempt < SETTLING:
                # Another may have taken the place of a file that is gone, and not be announced yet.
                self.distrust()
                continue
            with self.lock:
                self._remove(plan.removed)
                if self._distrusts == plan.distrusts and self._generation < notices.generation:
                    self._seen, self._generation, self._epoch = plan.seen, notices.generation, notices.epoch
            break
        return set()

    def _plan(self, notices: Notices, told: set[BundleName], *, last: bool) -> _Plan | set[BundleName]:
        """Add what is new and find out what is gone; or, without `last`, what nobody has been told of, and do nothing."""
        if self._arriving:
            self._hand_over()
        distrusts, markers = self._distrusts, notices.of(self.namespace)
        seen = {writer: marker.sequence for writer, marker in markers.items()}
        if self._epoch == notices.epoch:
            events = self._events(markers)
            removed = None if events is None else self._apply(events)
            if removed is not None:
                return _Plan(removed, seen, distrusts)
        self._listed_since = True
        names = self._listed()
        if not last and (untold := self._untold(names, markers) - told):
            return untold
        return _Plan(self._take(names), seen, distrusts)

    def distrust(self) -> None:
        """List the bundles the next time, to find also what nobody has announced.

        That is a bundle whose writer was killed before it could, or a file deleted by hand.
        """
        with self.lock:
            self._generation = self._epoch = -1
            self._distrusts += 1

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
            self._expected[bundle.id] = bundle

    def arrive(self, bundle: Bundle) -> bool:
        """Whether an expected bundle is still there; the lock is held until it has been added."""
        del self._expected[bundle.id]
        return not bundle.gone

    def add(self, bundles: Iterable[Bundle]) -> None:
        """Note bundles that were published."""
        with self.lock:
            self._arriving.update({bundle.id: bundle for bundle in bundles if bundle.id not in self.bundles})
            self._hand_over()

    def _hand_over(self) -> None:
        """Let everyone know of the arriving bundles. Where that is interrupted, at any point, it is done again."""
        if not self._arriving:
            return
        bundles = list(self._arriving.values())
        for listener in self._listeners:
            listener.bundles_added(bundles)
        used = self.used + sum([bundle.size for bundle in bundles])
        self.bundles.update(self._arriving)
        # Together: nothing is interrupted between two assignments.
        self.used, self._arriving = used, {}

    def remove(self, bundles: Sequence[Bundle]) -> None:
        """Note bundles whose files are gone."""
        self._remove({bundle.id for bundle in bundles})

    def _remove(self, ids: Iterable[BundleId]) -> None:
        with self.lock:
            known = list[Bundle]()
            for id in ids:
                # Somebody has found it by listing, and removed it before its writer could tell of it.
                if (expected := self._expected.get(id)) is not None:
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

    def collect_logs(self, notices: Notices) -> None:
        """Remove event logs and retired markers that tell of no bundle that is there; they are no more than a cache."""
        with self.lock:
            if self._generation < 0:
                return
            needed = list(self.bundles)
        markers = notices.of(self.namespace)
        self._board.logs.collect(self.namespace, needed, {writer: marker.sequence for writer, marker in markers.items()})
        with contextlib.suppress(OSError):
            self._board.collect_retired(self.namespace, {id.writer for id in needed})

    def bundle(self, name: BundleName, index: Index | None = None) -> Bundle:
        """A bundle of that name, not yet on the shelf."""
        keys, envelopes = ([], b"") if index is None else (index.keys, index.envelopes)
        return Bundle(self.namespace, name, self._directory, name.id, name.size, name.created_us * 1_000, keys, envelopes)

    def _events(self, markers: Mapping[str, Marker]) -> list[Event] | None:
        """What is new; None where that cannot be told, because a writer's log has a gap or its marker has disappeared."""
        events = list[Event]()
        missing = [writer for writer in self._seen if writer not in markers and writer != self._board.writer]
        if missing:
            retired = self._board.retired(self.namespace)
            if not all(writer in retired and self._missed(retired[writer], events) for writer in missing):
                return None
            self._retired.update({writer: retired[writer].sequence for writer in missing})
        # What this storage itself has done is on the shelf already.
        if all(self._missed(marker, events) for writer, marker in markers.items() if writer != self._board.writer):
            return events
        return None

    def _missed(self, marker: Marker, events: list[Event]) -> bool:
        """Gather the events of a writer that are new here; whether they are all known."""
        seen = self._seen.get(marker.writer, self._retired.get(marker.writer, 0))
        missed = marker.since(seen)
        if missed is None:
            known = marker.sequence - len(marker.events)
            missed, rest = self._board.logs.since(self.namespace, marker.writer, seen, known), marker.since(known)
            if missed is None or rest is None:
                return False
            missed += rest
        events += missed
        return True

    def _apply(self, events: Sequence[Event]) -> list[BundleId] | None:
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

    def _listed(self) -> dict[BundleId, BundleName]:
        """The bundles that are there; those that have been replaced, and not yet removed, are removed now."""
        names, claimed = dict[BundleId, BundleName](), list[BundleName]()
        for name in bundles_among(self._settled(self._directory)):
            id = name.id
            other = names.setdefault(id, name)
            if other is not name:
                names[id] = self._one_of(id, other, name)
            if name.claim is not None:
                claimed.append(name)
        for name in claimed:
            if name.claim is not None and name.claim.replacement in names:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._directory}/{name}")
                if names.get(name.id) == name:
                    del names[name.id]
        return names

    def _one_of(self, id: BundleId, one: BundleName, other: BundleName) -> BundleName:
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

    def _untold(self, names: Mapping[BundleId, BundleName], markers: Mapping[str, Marker]) -> set[BundleName]:
        """Bundles that are new here, and later than all that their writers have announced."""
        announced = {writer: marker.sequence for writer, marker in markers.items()}
        fresh = [name for id, name in names.items() if announced.get(id[0], 0) < id[1] and id not in self.bundles]
        if not fresh:
            return set()
        retired = self._board.retired(self.namespace)
        return {name.plain for name in fresh if name.writer not in retired or retired[name.writer].sequence < name.sequence}

    def _tell(self, events: Sequence[Event]) -> None:
        try:
            if self._board.syncs:
                # Its writer may not have come so far: what is promised here must survive a loss of power too.
                sync_directory(self._tree.bundles(self.namespace))
            self._board.queue(self.namespace, events)
            self._board.announce()
        except OSError as error:
            logger.debug("cannot tell others what was found in namespace %s: %s", self.namespace, error)

    def _take(self, names: Mapping[BundleId, BundleName]) -> list[BundleId]:
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
        gone = [id for id in (*self.bundles, *self._expected) if id not in names]
        self.add([self.bundle(name) for id, name in names.items() if id not in self.bundles])
        return gone
