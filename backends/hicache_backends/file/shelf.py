"""Which bundles a namespace has: kept in memory, and up to date with what every writer has announced."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from hicache_backends.file.attributes import list_directory
from hicache_backends.file.names import Added, BundleId, BundleName, Event, Removed, bundles_among
from hicache_storage.objects import ENVELOPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from hicache_backends.file.board import Board, Notices
    from hicache_backends.file.names import Marker
    from hicache_backends.file.tree import Tree


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
        self.modified = name.created_ms * 1_000_000
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
    """The bundles of one namespace. Safe for many threads: `lock` is held while they change."""

    def __init__(self, namespace: str, tree: Tree, board: Board, *, asks_server: bool) -> None:
        self.namespace = namespace
        self.lock = threading.RLock()
        self.bundles: dict[BundleId, Bundle] = {}
        self.used = 0
        """Bytes in all of them."""
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

    def catch_up(self, notices: Notices) -> None:
        """Take in what has been announced.

        Raises:
            OSError: the bundles could not be listed.
        """
        if self._generation >= notices.generation:
            return
        with self.lock:
            if self._generation >= notices.generation:
                return
            markers = notices.of(self.namespace)
            events = None if self._epoch != notices.epoch else self._events(markers)
            if events is None:
                self._list()
            else:
                self._apply(events)
            self._seen = {writer: marker.sequence for writer, marker in markers.items()}
            self._generation, self._epoch = notices.generation, notices.epoch

    def distrust(self) -> None:
        """List the bundles the next time, to find also what nobody has announced.

        That is a bundle whose writer was killed before it could, or a file deleted by hand.
        """
        with self.lock:
            self._generation = self._epoch = -1

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
        with self.lock:
            known = [bundle for bundle in bundles if self.bundles.pop(bundle.name.id, None) is not None]
            for bundle in known:
                bundle.gone = True
                self.used -= bundle.name.size
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

    def _apply(self, events: Sequence[Event]) -> None:
        # By all writers together: one's bundle may have been removed by another, whose marker came first.
        removed = {event.bundle for event in events if isinstance(event, Removed)}
        added = [event.bundle for event in events if isinstance(event, Added)]
        self._add_names(name for name in added if name.id not in removed)
        self.remove([self.bundles[id] for id in removed if id in self.bundles])

    def _list(self) -> None:
        listed = bundles_among(list_directory(self._tree.bundles(self.namespace), asks_server=self._asks_server))
        there = {name.id for name in listed}
        self.remove([bundle for id, bundle in self.bundles.items() if id not in there])
        self._add_names(listed)

    def _add_names(self, names: Iterable[BundleName]) -> None:
        self.add([self.bundle(name) for name in names if name.id not in self.bundles])
