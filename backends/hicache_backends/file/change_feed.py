"""The change feed: how storages announce to each other that bundles were added or removed.

Every storage that writes has one cursor for each namespace: an empty file whose *name* holds the
number of its last event and the last events themselves. An announcement renames the cursor, then
gives the change counter a new value. A reader asks for the counter (one request) and lists the
cursors only if it has changed; usually the names in that listing hold every event it has missed.
Events that no longer fit into the cursor's name are first appended to the writer's event log
(`events.py`), several at a time, so a reader that is further behind reads the log instead of
listing the whole namespace.

A writer can be killed after it has renamed its cursor and before it has changed the counter. A
reader that lists the cursors for another reason would then know an event that no other reader
looks for, and would report pages that other storages deny. So the cursor's name contains a tag of
the counter value that follows it, and a reader that has not seen a value with this tag changes the
counter itself before it uses the cursor.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_backends.file.bundle import bundles_among
from hicache_backends.file.events import (
    Event,
    EventLogs,
    Found,
    Removed,
    Unlisted,
    WriterCursor,
    parse_cursor,
)
from hicache_backends.file.paths import BIRTH_NAME
from hicache_backends.file.removal_history import RemovalHistory
from hicache_backends.posix.directories import (
    Attributes,
    cached_attributes,
    server_attributes,
)
from hicache_backends.posix.files import Handle

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Mapping, Sequence

    from hicache_backends.file.bundle import BundleId, BundleName
    from hicache_backends.file.paths import StorePaths
    from hicache_backends.file.temp_files import ServerClock

MANY_CURSORS = 128
"""Cursors of idle writers are retired only above so many."""

IDLE_WRITER_SECONDS = 24 * 3600.0
"""Seconds without an event after which a writer counts as idle."""

REVALIDATION_SECONDS = 2.0
"""How long a file system that was mounted over the old one can go unnoticed, in seconds."""


class ChangeCounter:
    """A number that is different after every change of the store.

    Safe for many threads and processes. The number is the mtime of an empty directory, set to
    random bits. Random values need no agreement between writers on the next one. The mtime that the
    file system itself keeps would not do: two changes within one tick of its clock (4 ms on ext4,
    whole seconds elsewhere) leave the same value, and some file systems do not keep it at all.

    Args:
        path: the directory; it exists when the counter is read.
        asks_server: ask the file server each time, past the attribute cache of a network mount (one
            request).
    """

    def __init__(self, path: str, *, asks_server: bool) -> None:
        self._path = path
        self._attributes = server_attributes if asks_server else cached_attributes
        self._handle: Handle | None = None
        self._opened = 0.0

    def read(self) -> Attributes:
        """Read the value: equal to an earlier one if nothing has changed.

        Raises:
            OSError: the store is not reachable; `FileNotFoundError` if it has been deleted.
        """
        # The descriptor saves a path lookup for each call. A file system mounted over the path
        # would go unnoticed, so the directory is opened anew every few seconds.
        handle, now = self._handle, time.monotonic()
        if handle is None or now - self._opened > REVALIDATION_SECONDS:
            handle = self._open(now)
        try:
            found = self._attributes(handle.descriptor)
        except OSError:
            self._handle = None
            raise
        return found if found.links else self._attributes(self._open(now).descriptor)

    def read_cached(self) -> Attributes | None:
        """Read the value without I/O; None where that is not possible.

        Only on a local file system, whose inodes are in memory.
        """
        handle = self._handle
        if handle is None or time.monotonic() - self._opened > REVALIDATION_SECONDS:
            return None
        found = self._attributes(handle.descriptor)
        return found if found.links else None

    def advance(self, value: int | None = None) -> None:
        """Set a new value; the change that it announces is in place and visible.

        Args:
            value: one that `random_value` has drawn; a new one by default.

        Raises:
            OSError: it could not be set; other storages may not notice the change.
        """
        if value is None:
            value = random_value()
        try:
            os.utime(self._path, ns=(value, value))
        except PermissionError:
            self._replace(value)

    def close(self) -> None:
        """Close the descriptor. The counter can be used again."""
        self._handle = None

    def _open(self, now: float) -> Handle:
        # O_PATH costs no request on a FUSE mount whose directory entries are cached.
        handle = Handle(os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._handle = handle
        self._opened = now
        return handle

    def _replace(self, value: int) -> None:
        # Only its owner may set the times of a directory. Any process may make a directory of its
        # own, set its time and move it to the place of the old one.
        fresh = f"{self._path}.{os.urandom(8).hex()}"
        os.mkdir(fresh)
        try:
            os.utime(fresh, ns=(value, value))
            os.rename(fresh, self._path)
        except OSError:
            os.rmdir(fresh)
            raise


def random_value() -> int:
    """A value for the counter: a random time in nanoseconds since 1970."""
    # Between 1978 and 2038, so that every file system can keep it; 31 bits remain where it keeps
    # whole seconds.
    bits = int.from_bytes(os.urandom(8), "little")
    return ((1 << 28) + bits % ((1 << 31) - (1 << 28))) * 1_000_000_000 + (
        bits >> 34
    ) % 1_000_000_000


def counter_tag(value: int) -> int:
    """24 bits of a counter value that every file system keeps; never 0."""
    return value // 1_000_000_000 & 0xFFFFFF | 1


def _tag_of(value: Attributes | None) -> int:
    return 0 if value is None else counter_tag(value.mtime_ns)


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """All cursors, as of one listing."""

    generation: int = 0
    """Grows with every listing."""
    epoch: int = 0
    """A new value: the store was deleted and made again; nothing known about the old one holds."""
    cursors: Mapping[str, Mapping[str, WriterCursor]] = field(
        default_factory=dict[str, "Mapping[str, WriterCursor]"]
    )
    """By namespace and writer."""

    def of(self, namespace: str) -> Mapping[str, WriterCursor]:
        """The cursors of a namespace, by writer."""
        return self.cursors.get(namespace, {})


class ChangeFeed:
    """The cursors and the change counter of one store, for one writer. Safe for many threads.

    A number is used up by `take_sequence` before a file gets it, and `lock` is held until `describe`
    states its event: an interrupt in between leaves no number that is given again, and none that is
    left out. `_announcing` is held while an announcement is made and until its bundles are visible in
    this process, so no thread, here or elsewhere, can report a bundle that a later caller does not
    find.
    """

    def __init__(self, paths: StorePaths, writer: str, *, syncs: bool = False) -> None:
        self.writer = writer
        self.syncs = syncs
        self.lock = threading.RLock()
        self.paths = paths
        self.counter = ChangeCounter(paths.counter, asks_server=paths.asks_server)
        self._list_lock = threading.Lock()
        self._known: Attributes | None = None
        self._births: frozenset[str] = frozenset()
        self._parsed: dict[str, WriterCursor | None] = {}
        self._snapshot = FeedSnapshot()
        self.logs = EventLogs(paths)
        self.history = RemovalHistory(paths, writer)
        self._announced: dict[str, WriterCursor] = {}
        self._unlogged: dict[str, list[Event]] = {}
        """The last of the events that were announced and are not in the log."""
        self._logged: dict[str, int] = {}
        """The number of the last event that is."""
        self._queued: dict[str, list[Event]] = {}
        self._announcing = threading.Lock()
        self._on_announced: list[Callable[[], None]] = []
        self.removing: dict[str, Sequence[BundleId]] = {}
        """Bundles whose files this storage is removing."""
        self._due: list[Callable[[], None]] = []
        """Of events that are announced; those of an interrupted call are made by the next one."""
        self._advance_due = False
        self._short_names = False

    def read(self) -> FeedSnapshot:
        """Read everything announced before this call, this storage's own announcements included.

        Raises:
            OSError: the store is not reachable. A store that was deleted is empty instead.
        """
        snapshot = self._read()
        with self._announcing:
            return snapshot

    def read_cached(self) -> FeedSnapshot | None:
        """Answer `read` without I/O or a lock held during I/O; None where that is not possible."""
        # `_known` is compared without `_list_lock`: a listing that runs meanwhile sets it last,
        # after the snapshot that belongs to it.
        value = self.counter.read_cached()
        if value is None or value != self._known:
            return None
        snapshot = self._snapshot
        if not self._announcing.acquire(blocking=False):
            return None
        self._announcing.release()
        return snapshot

    def _read(self) -> FeedSnapshot:
        value = self._counter_value()
        if value is not None and value == self._known:
            return self._snapshot
        with self._list_lock:
            # Before the listing: an announcement made after it gives a value other than the one
            # kept here.
            value = self._counter_value()
            # A missing counter is never unchanged: the store may have been made and deleted since.
            if value is None or value != self._known:
                known, snapshot = self._parsed, self._list(value)
                self._confirm_counter(value, known)
                # Not before: a thread that has read the former value takes it as it is.
                self._snapshot = snapshot
                self._known = value
            return self._snapshot

    def _confirm_counter(self, value: Attributes | None, known: Container[str]) -> None:
        """Make sure that every later reader finds the cursors that this one did not know.

        Args:
            value: of the counter, before they were listed.
        """
        tags = {
            cursor.tag
            for name, cursor in self._parsed.items()
            if cursor is not None and cursor.writer != self.writer and name not in known
        } - {_tag_of(value)}
        if tags and tags != {_tag_of(self._counter_value())}:
            # A storage that may not write cannot change the counter; it may report a page earlier
            # than other storages do.
            with contextlib.suppress(OSError):
                self.counter.advance()

    def next_sequence(self, namespace: str) -> int:
        """The number of this writer's next event in a namespace; `lock` is held."""
        announced = self._announced.get(namespace)
        return (announced.sequence if announced else 0) + len(self._queued.get(namespace, ())) + 1

    def take_sequence(self, namespace: str, unknown: Callable[[], None]) -> int:
        """Use up the number of this writer's next event; `lock` is held until `describe`.

        Args:
            unknown: called after the announcement if the number is never described. It stands for
                unknown changes then, and every storage lists the namespace.
        """
        self.queue(namespace, [Unlisted()], unknown)
        return self.next_sequence(namespace) - 1

    def describe(
        self, namespace: str, event: Event, on_announced: Callable[[], None] | None = None
    ) -> None:
        """State the event of the number that was taken last; the change has been made."""
        # No call in here, because an interrupt may come with a call.
        self._on_announced[-1:] = [] if on_announced is None else [on_announced]
        self._queued[namespace][-1] = event

    def announce_removal(
        self, namespace: str, bundles: Sequence[BundleId], on_announced: Callable[[], None]
    ) -> None:
        """Announce that the files of some bundles are about to be removed.

        Until `end_removal`, every cursor of this writer ends with these events. So a process that
        lists knows the files of a removal whose process was killed. One removal at a time.

        Args:
            bundles: as many as a cursor has room for, see `fitting`.

        Raises:
            OSError: readers may know of it or not.
        """
        with self.lock:
            self.removing[namespace] = bundles
            self.queue(namespace, [Removed(id) for id in bundles], on_announced)
        self.announce()

    def end_removal(
        self, namespace: str, left: Sequence[BundleName], on_announced: Callable[[], None]
    ) -> None:
        """End a removal, and announce the return of the bundles whose files are perhaps still there.

        Every storage lists, to find out.
        """
        with self.lock:
            if left:
                self.queue(namespace, [*map(Found, left), Unlisted()], on_announced)
            self.removing.pop(namespace, None)
        if left:
            with contextlib.suppress(OSError):
                self.announce()

    def fitting(self, namespace: str, bundles: Sequence[BundleId]) -> int:
        """How many of some removals, from the first one, a cursor has room for."""
        events, empty = [Removed(id) for id in bundles], WriterCursor(namespace, self.writer, 0, ())
        while (room := len(empty.after(events, 0, short=self._short_names).events)) < len(events):
            events = events[:room]
        return max(1, len(events))

    def queue(
        self,
        namespace: str,
        events: Sequence[Event],
        on_announced: Callable[[], None] | None = None,
    ) -> None:
        """Add events to the next announcement; the changes that they describe have been made.

        Args:
            on_announced: called after the announcement; it makes the change visible in this
                process.
        """
        with self.lock:
            # First: an interrupt in between must not leave an event that this process never sees.
            if on_announced is not None:
                self._on_announced.append(on_announced)
            # Events of several threads are announced together: one rename and one counter value for
            # all.
            self._queued.setdefault(namespace, []).extend(events)

    def announce(self, *, always_advance: bool = False) -> None:
        """Announce the queued events.

        Args:
            always_advance: change the counter even if no event is queued. This storage may have
                read the cursor of a writer that has not changed the counter yet.

        Raises:
            OSError: the events stay queued for the next announcement; readers may miss them until
                then.
        """
        with self._announcing:
            with self.lock:
                self._advance_due |= always_advance
                self._announce()
                self._due += self._on_announced
                self._on_announced = []
            # Without `lock`: the callbacks take the lock of their bundle set, which comes before
            # it. Each stays until it has been made: an interrupt may come with any call.
            while self._due:
                self._due[0]()
                del self._due[0]

    def _announce(self) -> None:
        value = random_value()
        for namespace in list(self._queued):
            before, queued = self._announced.get(namespace), self._queued[namespace]
            last = [Removed(id) for id in self.removing.get(namespace, ())]
            if queued[-len(last) :] != last:
                queued += last
            # The tag is in the name before the counter has the value: whoever finds the name can
            # tell whether the counter was changed after it.
            after = (before or WriterCursor(namespace, self.writer, 0, ())).after(
                queued, counter_tag(value), short=self._short_names
            )
            # The log comes first. After the rename a reader may ask it for the events that the name
            # dropped.
            unlogged = self._log(after, [*self._unlogged.get(namespace, ()), *queued])
            try:
                self._move(before, after)
            except OSError as error:
                if error.errno != errno.ENAMETOOLONG or self._short_names:
                    raise
                # Only the attempt tells: `pathconf` has the length of the encrypted names.
                self._short_names = True
                self._announce()
                return
            self._announced[namespace], self._unlogged[namespace] = after, unlogged
            del self._queued[namespace]
            self._advance_due = True
        if self._advance_due:
            # Last: a reader that sees the new value finds the cursors in place.
            self.counter.advance(value)
            self._advance_due = False

    def _log(self, after: WriterCursor, events: list[Event]) -> list[Event]:
        """Append events to the log before the cursor drops them.

        Args:
            events: the last ones, up to the cursor's.

        Returns:
            The events that are still to be logged.
        """
        first = after.sequence - len(events) + 1
        # The name still holds all events that are not in the log; one append for some five events
        # is enough.
        if after.sequence - len(after.events) < first:
            return events
        # An announcement that failed is made again, and has been logged.
        fresh = max(first, self._logged.get(after.namespace, 0) + 1)
        if fresh <= after.sequence:
            # A reader that finds a gap in the log lists the bundles instead.
            with contextlib.suppress(OSError):
                self.logs.append(after.namespace, self.writer, fresh, events[fresh - first :])
            self._logged[after.namespace] = after.sequence
        return []

    def retired(self, namespace: str) -> dict[str, WriterCursor]:
        """The last cursors of idle writers that were retired, by writer.

        Raises:
            OSError: they could not be listed.
        """
        names = self.paths.list_names(self.paths.retired)
        cursors = [parse_cursor(name) for name in names if name.startswith(namespace)]
        return {
            cursor.writer: cursor
            for cursor in sorted(filter(None, cursors), key=lambda cursor: cursor.sequence)
        }

    def collect_retired(self, namespace: str, needed: Container[str]) -> None:
        """Remove the retired cursors of writers that have no bundle left."""
        for writer, cursor in self.retired(namespace).items():
            if writer not in needed:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self.paths.retired}/{cursor}")

    def retire_idle_cursors(self, clock: ServerClock) -> None:
        """Move aside the cursors of writers that are idle for a day, if there are many cursors.

        Each cursor costs every listing time. A retired one still proves that its bundles were
        announced; its writer makes a new cursor with its next event.
        """
        # No lock: a cursor that its writer renames meanwhile is missing under its old name, and
        # stays.
        names = os.listdir(self.paths.writers)
        if not any(map(BIRTH_NAME.fullmatch, names)):
            # The process that made the store was killed before it could.
            self.paths.mark_birth()
        if len(names) <= MANY_CURSORS:
            return
        idle = list[str]()
        for name in names:
            cursor = parse_cursor(name)
            if cursor is None:
                continue
            with contextlib.suppress(OSError):
                if clock.age_seconds(
                    os.stat(f"{self.paths.writers}/{name}").st_ctime_ns
                ) > IDLE_WRITER_SECONDS and not self._has_leftovers(cursor):
                    idle.append(name)
        if idle:
            os.makedirs(self.paths.retired, exist_ok=True)
        for name in idle:
            with contextlib.suppress(OSError):
                os.rename(f"{self.paths.writers}/{name}", f"{self.paths.retired}/{name}")

    def _has_leftovers(self, cursor: WriterCursor) -> bool:
        """Return whether files are there whose removal the cursor ends with."""
        removing = cursor.removing
        return bool(removing) and any(
            name.id in removing
            for name in bundles_among(self.paths.list_names(self.paths.bundles(cursor.namespace)))
        )

    def _counter_value(self) -> Attributes | None:
        with contextlib.suppress(FileNotFoundError):
            return self.counter.read()
        return None

    def _list(self, value: Attributes | None) -> FeedSnapshot:
        names = self.paths.list_names(self.paths.writers) if value else []
        parsed = self._parsed
        self._parsed = {
            name: parsed[name] if name in parsed else parse_cursor(name) for name in names
        }
        cursors = dict[str, dict[str, WriterCursor]]()
        for cursor in filter(None, self._parsed.values()):
            writers = cursors.setdefault(cursor.namespace, {})
            other = writers.get(cursor.writer)
            # A listing may see a file both before and after it was renamed.
            if other is None or other.sequence < cursor.sequence:
                writers[cursor.writer] = cursor
        # Not by the inode alone: file servers, and local file systems too, give the number of a
        # deleted directory again.
        births, before = frozenset(filter(BIRTH_NAME.fullmatch, names)), self._births
        self._births = births
        same = (
            self._known is not None
            and value is not None
            and self._known.inode == value.inode
            and before == births
        )
        last = self._snapshot
        return FeedSnapshot(last.generation + 1, last.epoch + (not same), cursors)

    def _move(self, before: WriterCursor | None, after: WriterCursor) -> None:
        path = f"{self.paths.writers}/{after}"
        if before is not None:
            try:
                os.rename(f"{self.paths.writers}/{before}", path)
            except FileNotFoundError:
                pass  # Retired as idle, or the store was deleted; a new one holds the same events.
            else:
                return
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666))
