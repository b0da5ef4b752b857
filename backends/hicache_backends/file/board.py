"""How storages tell each other of bundles that come and go.

Every storage that writes has, for each namespace, one marker: an empty file whose *name* tells how many events it has
announced and the last of them. An announcement renames the marker, then renews the stamp. Who asks looks at the stamp
(one request); only if it is new, it lists the markers, and mostly knows then all that has happened. Events that no longer
fit into the marker's name go to the writer's event log first (`events.py`), several at a time, so that a reader that is
further behind reads what it has missed, and not the whole namespace.

A listing can find a marker whose stamp is still to come, or never comes because its writer was killed. Nobody else would know
of it, and whoever found it would promise what others deny. So a marker names the stamp that follows it, and who has not seen
that one renews the stamp before it believes the marker.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_backends.file.attributes import list_directory
from hicache_backends.file.events import EventLogs
from hicache_backends.file.names import Event, Marker, is_birth, parse_marker
from hicache_backends.file.stamp import new_value, tag_of

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from hicache_backends.file.attributes import Attributes
    from hicache_backends.file.clock import Clock
    from hicache_backends.file.stamp import Stamp
    from hicache_backends.file.tree import Tree

MANY_MARKERS = 128
FORGOTTEN_SECONDS = 24 * 3600.0

RECENT_TAGS = 64

NOTHING: Mapping[str, Marker] = {}


@dataclass(frozen=True, slots=True)
class Notices:
    """All markers, as of one listing."""

    generation: int = 0
    """Grows with every listing."""
    epoch: int = 0
    """Another one: this is another store than before, and nothing that was known of it holds."""
    markers: Mapping[str, Mapping[str, Marker]] = field(default_factory=dict[str, "Mapping[str, Marker]"])
    """By namespace and writer."""

    def of(self, namespace: str) -> Mapping[str, Marker]:
        return self.markers.get(namespace, NOTHING)


class Board:
    """The markers and the stamp of one store, seen by one writer. Safe for many threads.

    `lock` is held by whoever takes a number with `next_sequence` until its event is queued. `_telling` is held while an
    announcement is made and what it tells of appears in this process: so that nobody, here or elsewhere, is told of a
    bundle while others who ask later are not.
    """

    def __init__(self, tree: Tree, stamp: Stamp, writer: str, *, asks_server: bool, syncs: bool = False) -> None:
        self.writer, self.syncs = writer, syncs
        self.lock = threading.RLock()
        self._tree, self._stamp, self._asks_server = tree, stamp, asks_server
        self._listing = threading.Lock()
        self._tags: deque[int] = deque(maxlen=RECENT_TAGS)
        """Of the stamp's latest values."""
        self._known: Attributes | None = None
        self._births: frozenset[str] = frozenset()
        self._parsed: dict[str, Marker | None] = {}
        self._notices = Notices()
        self.logs = EventLogs(tree)
        self._announced: dict[str, Marker] = {}
        self._unlogged: dict[str, list[Event]] = {}
        """The last of the events that were announced and are not in the log."""
        self._logged: dict[str, int] = {}
        """The number of the last event that is."""
        self._queued: dict[str, list[Event]] = {}
        self._telling = threading.Lock()
        self._unshown: list[Callable[[], None]] = []
        self._unstamped = False

    def read(self) -> Notices:
        """All that has been announced before this call; what this storage itself has announced can be found then.

        Raises:
            OSError: the store is away. One that was deleted is empty instead.
        """
        notices = self._read()
        with self._telling:
            return notices

    def read_cached(self) -> Notices | None:
        """Answer `read` without I/O, and without a lock that is held during I/O; None where that is not possible."""
        value = self._stamp.read_cached()
        if value is None or value != self._known:
            return None
        notices = self._notices
        if not self._telling.acquire(blocking=False):
            return None
        self._telling.release()
        return notices

    def _read(self) -> Notices:
        value = self._stamp_value()
        if value is not None and value == self._known:
            return self._notices
        with self._listing:
            # Before the listing, so that an announcement after it gives another value than the one kept here.
            value = self._note_stamp()
            # A missing stamp is never unchanged: the store may have been made and deleted again since the last look.
            if value is None or value != self._known:
                known, self._notices = self._parsed, self._list(value)
                self._vouch(marker for name, marker in self._parsed.items() if marker is not None and name not in known)
                self._known = value
            return self._notices

    def _vouch(self, fresh: Iterable[Marker]) -> None:
        """Make sure that everyone who asks from now on finds these markers."""
        tags = {marker.tag for marker in fresh if marker.writer != self.writer}
        if tags and not tags.issubset(self._tags):
            self._note_stamp()
            if not tags.issubset(self._tags):
                # Where this storage must not write, its knowledge may be ahead of others'.
                with contextlib.suppress(OSError):
                    self._stamp.renew()

    def next_sequence(self, namespace: str) -> int:
        """The number of this writer's next event in a namespace."""
        announced = self._announced.get(namespace)
        return (announced.sequence if announced else 0) + len(self._queued.get(namespace, ())) + 1

    def queue(self, namespace: str, events: Sequence[Event], show: Callable[[], None] | None = None) -> None:
        """Announce events with the next `announce`; what they tell of has happened.

        Args:
            show: called when everyone has been told, to let this storage's own threads find it too.
        """
        with self.lock:
            self._queued.setdefault(namespace, []).extend(events)
            if show is not None:
                self._unshown.append(show)

    def announce(self, *, insist: bool = False) -> None:
        """Tell everyone of the queued events.

        Args:
            insist: make sure too that everyone knows what this storage knows. It may have seen the marker of another whose
                stamp is still to come.

        Raises:
            OSError: they stay queued; others may not know of them.
        """
        with self._telling:
            with self.lock:
                self._unstamped |= insist
                self._announce()
                shown, self._unshown = self._unshown, []
            # Without `lock`: they take that of their shelf, which comes before it.
            for show in shown:
                show()

    def _announce(self) -> None:
        value = new_value()
        for namespace in list(self._queued):
            before = self._announced.get(namespace)
            after = (before or Marker(namespace, self.writer, 0, ())).after(self._queued[namespace], tag_of(value))
            unlogged = self._log(after, [*self._unlogged.get(namespace, ()), *self._queued[namespace]])
            self._move(before, after)
            self._announced[namespace], self._unlogged[namespace] = after, unlogged
            del self._queued[namespace]
            self._unstamped = True
        if self._unstamped:
            self._stamp.renew(value)
            self._unstamped = False

    def _log(self, after: Marker, events: list[Event]) -> list[Event]:
        """Write events to the log before a marker drops them.

        Args:
            events: the last ones, up to the marker's.

        Returns:
            Those that are still to be written.
        """
        first = after.sequence - len(events) + 1
        if after.sequence - len(after.events) < first:
            return events
        # An announcement that failed is made again, and has been logged.
        fresh = max(first, self._logged.get(after.namespace, 0) + 1)
        if fresh <= after.sequence:
            # A log with a gap makes readers list, as if there were none: nothing fails for it.
            self.logs.append(after.namespace, self.writer, fresh, events[fresh - first :])
            self._logged[after.namespace] = after.sequence
        return []

    def retired(self, namespace: str) -> dict[str, Marker]:
        """By writer, the last markers of writers that have been collected as forgotten.

        Raises:
            OSError: they could not be listed.
        """
        names = list_directory(self._tree.retired, asks_server=self._asks_server)
        markers = [parse_marker(name) for name in names if name.startswith(namespace)]
        return {marker.writer: marker for marker in sorted(filter(None, markers), key=lambda marker: marker.sequence)}

    def collect_retired(self, namespace: str, needed: Container[str]) -> None:
        """Remove the retired markers of writers that are not needed: they have no bundle left."""
        for writer, marker in self.retired(namespace).items():
            if writer not in needed:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._tree.retired}/{marker}")

    def collect_forgotten(self, clock: Clock) -> None:
        """Retire the markers of writers that have long said nothing, if there are many: each costs every listing something.

        A retired marker still says that its bundles were announced. A writer that lives on makes a new one.
        """
        listed = os.listdir(self._tree.writers)
        if not any(map(is_birth, listed)):
            # Whoever made the store was killed before it could.
            self._tree.mark_birth()
        names = [name for name in listed if parse_marker(name) is not None]
        if len(names) <= MANY_MARKERS:
            return
        forgotten = list[str]()
        for name in names:
            with contextlib.suppress(OSError):
                if clock.age_seconds(os.stat(f"{self._tree.writers}/{name}").st_ctime_ns) > FORGOTTEN_SECONDS:
                    forgotten.append(name)
        if forgotten:
            os.makedirs(self._tree.retired, exist_ok=True)
        for name in forgotten:
            with contextlib.suppress(OSError):
                os.rename(f"{self._tree.writers}/{name}", f"{self._tree.retired}/{name}")

    def _stamp_value(self) -> Attributes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._stamp.read()
        return None

    def _note_stamp(self) -> Attributes | None:
        """The stamp's value, its tag remembered; under `_listing`."""
        value = self._stamp_value()
        if value is not None:
            self._tags.append(tag_of(value.mtime_ns))
        return value

    def _list(self, value: Attributes | None) -> Notices:
        names = list_directory(self._tree.writers, asks_server=self._asks_server) if value else []
        parsed = self._parsed
        self._parsed = {name: parsed[name] if name in parsed else parse_marker(name) for name in names}
        markers = dict[str, dict[str, Marker]]()
        for marker in filter(None, self._parsed.values()):
            writers = markers.setdefault(marker.namespace, {})
            other = writers.get(marker.writer)
            # A listing may see a file both before and after it was renamed.
            if other is None or other.sequence < marker.sequence:
                writers[marker.writer] = marker
        # Not by the inode alone: file servers, and local file systems too, give the number of a deleted directory again.
        births, before = frozenset(filter(is_birth, names)), self._births
        self._births = births
        same = self._known is not None and value is not None and self._known.inode == value.inode and before == births
        last = self._notices
        return Notices(last.generation + 1, last.epoch + (not same), markers)

    def _move(self, before: Marker | None, after: Marker) -> None:
        path = f"{self._tree.writers}/{after}"
        if before is not None:
            try:
                os.rename(f"{self._tree.writers}/{before}", path)
            except FileNotFoundError:
                pass  # Collected as forgotten, or the store was deleted; a new one says the same.
            else:
                return
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            self._tree.create()
            descriptor = os.open(path, flags, 0o666)
        os.close(descriptor)
