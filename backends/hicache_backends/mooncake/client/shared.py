"""The clients of this process: one for equal settings, however many storages use it.

A client costs some twenty threads, and the library holds the interpreter's lock for a second while it closes one. So one that lends
no memory is kept for the next storage, a few of them at most, and ends with the process.
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

MOST_IDLE: Final = 2
"""Clients that are kept though no storage uses them."""


@dataclass(slots=True)
class _Entry:
    connection: Connection
    users: int = 0


class _Connections:
    """All connections of a process. The lock is held while one is set up: the second who asks gets the same."""

    def __init__(self) -> None:
        self._inherited = list[object]()
        self._begun = False
        self._begin()
        os.register_at_fork(after_in_child=self._begin_anew)

    def acquire(self, settings: ClientSettings) -> Connection:
        """The connection with these settings, one user more.

        Raises:
            StorageForkedError: the library was used before this process was forked.
            StorageUnavailableError: the connection cannot be set up.
        """
        if self._inherited:
            raise StorageForkedError(
                "mooncake: the process that this one was forked from has used Mooncake, whose threads are not here: a client would "
                "hang. Start processes by spawn, or before the first storage is opened"
            )
        with self._lock:
            entry = self._entries.get(settings)
            if entry is None:
                self._begun = True
                entry = self._entries[settings] = _Entry(Connection(settings))
            entry.users += 1
            return entry.connection

    def release(self, connection: Connection) -> None:
        """One user less. Nothing happens to a connection that a forked child has inherited."""
        with self._lock:
            entry = self._entries.get(connection.settings)
            if entry is None or entry.connection is not connection:
                return
            entry.users -= 1
            going = self._dispensable(entry)
        for gone in going:
            gone.close()

    def _dispensable(self, released: _Entry) -> list[Connection]:
        """Take out the connections that are kept no longer; the lock is held."""
        settings = released.connection.settings
        # Put back last: the order is that of the last use.
        self._entries[settings] = self._entries.pop(settings)
        idle = [settings for settings, entry in self._entries.items() if not entry.users]
        lending = [settings for settings in idle if settings.global_segment_size]
        spare = [settings for settings in idle if not settings.global_segment_size]
        return [self._entries.pop(settings).connection for settings in lending + spare[:-MOST_IDLE]]

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._entries: dict[ClientSettings, _Entry] = {}

    def _begin_anew(self) -> None:
        """In a forked child: its parent's clients have no threads here, so that they can neither be used nor ended."""
        if self._begun:
            self._inherited.append(self._entries)
        self._begin()


connections: Final = _Connections()
