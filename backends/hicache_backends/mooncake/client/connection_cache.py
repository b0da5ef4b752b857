"""Process-wide cache of connections: storages with equal settings share one.

A client has some twenty threads, and the library holds the GIL for a second while it closes one. So
unused clients that lend no memory are kept for later storages, up to `MAX_IDLE`, until the process
ends.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from hicache_backends.mooncake.client.connection import Connection
from hicache_storage.spec import StorageForkedError

if TYPE_CHECKING:
    from hicache_backends.mooncake.config import ClientSettings

MAX_IDLE: Final = 2
"""Clients that are kept without a user."""


@dataclass(slots=True)
class _Entry:
    connection: Connection
    users: int = 0


class _Connections:
    """Connections of a process, by settings.

    The lock is held during a set-up, so that concurrent storages get the same connection.
    """

    def __init__(self) -> None:
        self._inherited = list[object]()
        self._used = False
        self._reset()
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def acquire(self, settings: ClientSettings) -> Connection:
        """Return the connection with these settings, and count one more user.

        Raises:
            StorageForkedError: the library was used before this process was forked.
            StorageUnavailableError: the connection cannot be set up.
        """
        self._check_not_forked()
        with self._lock:
            entry = self._entries.get(settings)
            if entry is None:
                # Also if the set-up fails: the library may have started threads by then.
                self._used = True
                entry = self._entries[settings] = _Entry(Connection(settings))
            entry.users += 1
            return entry.connection

    def replace(self, connection: Connection) -> Connection:
        """Return a newer connection with the same settings, and count one more user of it.

        `connection` keeps its users, and is closed when the last of them has released it.

        Raises:
            StorageForkedError: the library was used before this process was forked.
            StorageUnavailableError: the new connection cannot be set up.
        """
        self._check_not_forked()
        settings = connection.settings
        with self._lock:
            entry = self._entries.get(settings)
            if entry is None or entry.connection is connection:
                newer = _Entry(
                    Connection(settings, connection.next_stale_seconds, connection.stores)
                )
                if entry is not None:
                    self._replaced[connection] = entry.users
                entry = self._entries[settings] = newer
            entry.users += 1
            return entry.connection

    def release(self, connection: Connection) -> None:
        """Count one user less. Ignores connections that a forked child has inherited."""
        evicted = list[Connection]()
        with self._lock:
            entry = self._entries.get(connection.settings)
            if entry is not None and entry.connection is connection:
                entry.users -= 1
                evicted = self._evict(entry)
            elif connection in self._replaced:
                self._replaced[connection] -= 1
                if not self._replaced[connection]:
                    del self._replaced[connection]
                    evicted = [connection]
        for former in evicted:
            former.close()

    def _evict(self, released: _Entry) -> list[Connection]:
        """Remove connections that are not kept any more. The caller holds the lock."""
        settings = released.connection.settings
        # Reinserted at the end: the dictionary is in the order of the last use.
        self._entries[settings] = self._entries.pop(settings)
        idle = [settings for settings, entry in self._entries.items() if not entry.users]
        lending = [settings for settings in idle if settings.global_segment_size]
        spare = [settings for settings in idle if not settings.global_segment_size]
        # Lent memory is the cluster's to fill: a client without a user must not go on lending it.
        return [self._entries.pop(settings).connection for settings in lending + spare[:-MAX_IDLE]]

    def _check_not_forked(self) -> None:
        if self._inherited:
            raise StorageForkedError(
                "mooncake: the process that this one was forked from has used Mooncake, whose "
                "threads are not here: a client would "
                "hang. Start processes by spawn, or before the first storage is opened"
            )

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[ClientSettings, _Entry] = {}
        self._replaced: dict[Connection, int] = {}

    def _reset_after_fork(self) -> None:
        """Set the parent's connections aside in a forked child."""
        # Their threads do not exist here, so they can neither be used nor closed. The references
        # keep the library from closing them.
        if self._used:
            self._inherited += [self._entries, self._replaced]
        self._reset()


connections: Final = _Connections()
