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
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hicache_backends.file.events import Event, EventLogs, WriterCursor, parse_cursor
from hicache_backends.file.paths import is_birth
from hicache_backends.posix.descriptors import Handle
from hicache_backends.posix.statx import cached_attributes, list_directory, server_attributes

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from hicache_backends.file.paths import StorePaths
    from hicache_backends.file.temp_files import ServerClock
    from hicache_backends.posix.statx import Attributes

REVALIDATION_SECONDS = 2.0
"""How long a file system that was mounted over the old one can go unnoticed."""


class ChangeCounter:
    """The stamp of one store. Safe for many threads and processes.

    Args:
        path: the directory; it exists when the stamp is read.
        asks_server: ask the file server each time, past the attribute cache of a network mount (one request).
    """

    def __init__(self, path: str, *, asks_server: bool) -> None:
        self._path = path
        self._attributes = server_attributes if asks_server else cached_attributes
        self._handle: Handle | None = None
        self._opened = 0.0

    def read(self) -> Attributes:
        """The stamp's value: equal to an earlier one if nothing has changed.

        Raises:
            OSError: the store is away; `FileNotFoundError` where it has been deleted.
        """
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
        """Read the value without I/O; None where that is not possible. Only on a local file system, whose inodes are in memory."""
        handle = self._handle
        if handle is None or time.monotonic() - self._opened > REVALIDATION_SECONDS:
            return None
        found = self._attributes(handle.descriptor)
        return found if found.links else None

    def advance(self, value: int | None = None) -> None:
        """Give the stamp a new value; what changed is in place and visible.

        Args:
            value: one that `new_value` has drawn; another one if not given.

        Raises:
            OSError: it could not be set; others may not notice the change.
        """
        if value is None:
            value = random_value()
        try:
            os.utime(self._path, ns=(value, value))
        except PermissionError:
            self._replace(value)

    def close(self) -> None:
        """Let go of the descriptor. The stamp can be used again."""
        self._handle = None

    def _open(self, now: float) -> Handle:
        # O_PATH costs no request on a FUSE mount whose directory entries are cached.
        handle = Handle(os.open(self._path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._handle, self._opened = handle, now
        return handle

    def _replace(self, value: int) -> None:
        # Only the owner may set the times of a directory; of one that takes its place, whoever makes it.
        fresh = f"{self._path}.{os.urandom(8).hex()}"
        os.mkdir(fresh)
        try:
            os.utime(fresh, ns=(value, value))
            os.rename(fresh, self._path)
        except OSError:
            os.rmdir(fresh)
            raise


def random_value() -> int:
    """A value for the stamp: a time in nanoseconds since 1970, at random."""
    # Between 1978 and 2038, so that every file system can keep it; 31 bits remain where it keeps whole seconds.
    bits = int.from_bytes(os.urandom(8), "little")
    return ((1 << 28) + bits % ((1 << 31) - (1 << 28))) * 1_000_000_000 + (bits >> 34) % 1_000_000_000


def counter_tag(value: int) -> int:
    """24 bits of a value that every file system keeps; never 0."""
    return value // 1_000_000_000 & 0xFFFFFF | 1


MANY_CURSORS = 128
IDLE_WRITER_SECONDS = 24 * 3600.0

MAX_SEEN_TAGS = 64

NO_CURSORS: Mapping[str, WriterCursor] = {}


@dataclass(frozen=True, slots=True)
class FeedSnapshot:
    """All markers, as of one listing."""

    generation: int = 0
    """Grows with every listing."""
    epoch: int = 0
    """Another one: this is another store than before, and nothing that was known of it holds."""
    cursors: Mapping[str, Mapping[str, WriterCursor]] = field(default_factory=dict[str, "Mapping[str, WriterCursor]"])
    """By namespace and writer."""

    def of(self, namespace: str) -> Mapping[str, WriterCursor]:
        return self.cursors.get(namespace, NO_CURSORS)


class ChangeFeed:
    """The markers and the stamp of one store, seen by one writer. Safe for many threads.

    `lock` is held by whoever takes a number with `next_sequence` until its event is queued. `_telling` is held while an
    announcement is made and what it tells of appears in this process: so that nobody, here or elsewhere, is told of a
    bundle while others who ask later are not.
    """

    def __init__(self, paths: StorePaths, counter: ChangeCounter, writer: str, *, asks_server: bool, syncs: bool = False) -> None:
        self.writer, self.syncs = writer, syncs
        self.lock = threading.RLock()
        self._paths, self._counter, self._asks_server = paths, counter, asks_server
        self._list_lock = threading.Lock()
        self._seen_tags: deque[int] = deque(maxlen=MAX_SEEN_TAGS)
        """Of the stamp's latest values."""
        self._known: Attributes | None = None
        self._births: frozenset[str] = frozenset()
        self._parsed: dict[str, WriterCursor | None] = {}
        self._snapshot = FeedSnapshot()
        self.logs = EventLogs(paths)
        self._announced: dict[str, WriterCursor] = {}
        self._unlogged: dict[str, list[Event]] = {}
        """The last of the events that were announced and are not in the log."""
        self._logged: dict[str, int] = {}
        """The number of the last event that is."""
        self._queued: dict[str, list[Event]] = {}
        self._announcing = threading.Lock()
        self._on_announced: list[Callable[[], None]] = []
        self._advance_due = False

    def read(self) -> FeedSnapshot:
        """All that has been announced before this call; what this storage itself has announced can be found then.

        Raises:
            OSError: the store is away. One that was deleted is empty instead.
        """
        snapshot = self._read()
        with self._announcing:
            return snapshot

    def read_cached(self) -> FeedSnapshot | None:
        """Answer `read` without I/O, and without a lock that is held during I/O; None where that is not possible."""
        value = self._counter.read_cached()
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
            # Before the listing, so that an announcement after it gives another value than the one kept here.
            value = self._read_counter()
            # A missing stamp is never unchanged: the store may have been made and deleted again since the last look.
            if value is None or value != self._known:
                known, self._snapshot = self._parsed, self._list(value)
                self._confirm_counter(cursor for name, cursor in self._parsed.items() if cursor is not None and name not in known)
                self._known = value
            return self._snapshot

    def _confirm_counter(self, fresh: Iterable[WriterCursor]) -> None:
        """Make sure that everyone who asks from now on finds these markers."""
        tags = {cursor.tag for cursor in fresh if cursor.writer != self.writer}
        if tags and not tags.issubset(self._seen_tags):
            self._read_counter()
            if not tags.issubset(self._seen_tags):
                # Where this storage must not write, its knowledge may be ahead of others'.
                with contextlib.suppress(OSError):
                    self._counter.advance()

    def next_sequence(self, namespace: str) -> int:
        """The number of this writer's next event in a namespace."""
        announced = self._announced.get(namespace)
        return (announced.sequence if announced else 0) + len(self._queued.get(namespace, ())) + 1

    def queue(self, namespace: str, events: Sequence[Event], on_announced: Callable[[], None] | None = None) -> None:
        """Announce events with the next `announce`; what they tell of has happened.

        Args:
            show: called when everyone has been told, to let this storage's own threads find it too.
        """
        with self.lock:
            self._queued.setdefault(namespace, []).extend(events)
            if on_announced is not None:
                self._on_announced.append(on_announced)

    def announce(self, *, always_advance: bool = False) -> None:
        """Tell everyone of the queued events.

        Args:
            insist: make sure too that everyone knows what this storage knows. It may have seen the marker of another whose
                stamp is still to come.

        Raises:
            OSError: they stay queued; others may not know of them.
        """
        with self._announcing:
            with self.lock:
                self._advance_due |= always_advance
                self._announce()
                shown, self._on_announced = self._on_announced, []
            # Without `lock`: they take that of their shelf, which comes before it.
            for on_announced in shown:
                on_announced()

    def _announce(self) -> None:
        value = random_value()
        for namespace in list(self._queued):
            before = self._announced.get(namespace)
            after = (before or WriterCursor(namespace, self.writer, 0, ())).after(self._queued[namespace], counter_tag(value))
            unlogged = self._log(after, [*self._unlogged.get(namespace, ()), *self._queued[namespace]])
            self._move(before, after)
            self._announced[namespace], self._unlogged[namespace] = after, unlogged
            del self._queued[namespace]
            self._advance_due = True
        if self._advance_due:
            self._counter.advance(value)
            self._advance_due = False

    def _log(self, after: WriterCursor, events: list[Event]) -> list[Event]:
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

    def retired(self, namespace: str) -> dict[str, WriterCursor]:
        """By writer, the last markers of writers that have been collected as forgotten.

        Raises:
            OSError: they could not be listed.
        """
        names = list_directory(self._paths.retired, asks_server=self._asks_server)
        cursors = [parse_cursor(name) for name in names if name.startswith(namespace)]
        return {cursor.writer: cursor for cursor in sorted(filter(None, cursors), key=lambda cursor: cursor.sequence)}

    def collect_retired(self, namespace: str, needed: Container[str]) -> None:
        """Remove the retired markers of writers that are not needed: they have no bundle left."""
        for writer, cursor in self.retired(namespace).items():
            if writer not in needed:
                with contextlib.suppress(OSError):
                    os.unlink(f"{self._paths.retired}/{cursor}")

    def retire_idle_cursors(self, clock: ServerClock) -> None:
        """Retire the markers of writers that have long said nothing, if there are many: each costs every listing something.

        A retired marker still says that its bundles were announced. A writer that lives on makes a new one.
        """
        listed = os.listdir(self._paths.writers)
        if not any(map(is_birth, listed)):
            # Whoever made the store was killed before it could.
            self._paths.mark_birth()
        names = [name for name in listed if parse_cursor(name) is not None]
        if len(names) <= MANY_CURSORS:
            return
        idle = list[str]()
        for name in names:
            with contextlib.suppress(OSError):
                if clock.age_seconds(os.stat(f"{self._paths.writers}/{name}").st_ctime_ns) > IDLE_WRITER_SECONDS:
                    idle.append(name)
        if idle:
            os.makedirs(self._paths.retired, exist_ok=True)
        for name in idle:
            with contextlib.suppress(OSError):
                os.rename(f"{self._paths.writers}/{name}", f"{self._paths.retired}/{name}")

    def _counter_value(self) -> Attributes | None:
        with contextlib.suppress(FileNotFoundError):
            return self._counter.read()
        return None

    def _read_counter(self) -> Attributes | None:
        """The stamp's value, its tag remembered; under `_listing`."""
        value = self._counter_value()
        if value is not None:
            self._seen_tags.append(counter_tag(value.mtime_ns))
        return value

    def _list(self, value: Attributes | None) -> FeedSnapshot:
        names = list_directory(self._paths.writers, asks_server=self._asks_server) if value else []
        parsed = self._parsed
        self._parsed = {name: parsed[name] if name in parsed else parse_cursor(name) for name in names}
        cursors = dict[str, dict[str, WriterCursor]]()
        for cursor in filter(None, self._parsed.values()):
            writers = cursors.setdefault(cursor.namespace, {})
            other = writers.get(cursor.writer)
            # A listing may see a file both before and after it was renamed.
            if other is None or other.sequence < cursor.sequence:
                writers[cursor.writer] = cursor
        # Not by the inode alone: file servers, and local file systems too, give the number of a deleted directory again.
        births, before = frozenset(filter(is_birth, names)), self._births
        self._births = births
        same = self._known is not None and value is not None and self._known.inode == value.inode and before == births
        last = self._snapshot
        return FeedSnapshot(last.generation + 1, last.epoch + (not same), cursors)

    def _move(self, before: WriterCursor | None, after: WriterCursor) -> None:
        path = f"{self._paths.writers}/{after}"
        if before is not None:
            try:
                os.rename(f"{self._paths.writers}/{before}", path)
            except FileNotFoundError:
                pass  # Collected as forgotten, or the store was deleted; a new one says the same.
            else:
                return
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o666)
        except FileNotFoundError:
            self._paths.create()
            descriptor = os.open(path, flags, 0o666)
        os.close(descriptor)
