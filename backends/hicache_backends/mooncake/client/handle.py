"""Shared connections: a process-wide cache, and a storage's handle on one of them.

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
from hicache_backends.mooncake.memory import address_of
from hicache_storage.spec import InvalidPoolError, StorageForkedError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.mooncake.config import ClientSettings

Region = tuple[int, int]
"""Start address and size in bytes."""

MAX_IDLE: Final = 2
"""Clients that are kept without a user."""


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
        if self._inherited:
            raise StorageForkedError(
                "mooncake: the process that this one was forked from has used Mooncake, whose "
                "threads are not here: a client would "
                "hang. Start processes by spawn, or before the first storage is opened"
            )
        with self._lock:
            present = next((one for one in self._open if one.settings == settings), None)
            if present is None:
                # Also if the set-up fails: the library may have started threads by then.
                self._used = True
                present = Connection(settings)
                self._open.append(present)
            present.users += 1
            return present

    def release(self, connection: Connection) -> None:
        """Count one user less. Ignores connections that a forked child has inherited."""
        with self._lock:
            if connection not in self._open:
                return
            connection.users -= 1
            # Moved to the end: the list is in the order of the last use.
            self._open.remove(connection)
            self._open.append(connection)
            idle = [one for one in self._open if not one.users]
            # Lent memory is the cluster's to fill: a client without a user must not go on lending.
            spare = [one for one in idle if not one.settings.global_segment_size]
            closing = [one for one in idle if one not in spare[-MAX_IDLE:]]
            for one in closing:
                self._open.remove(one)
        for one in closing:
            one.close()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._open = list[Connection]()

    def _reset_after_fork(self) -> None:
        """Set the parent's connections aside in a forked child."""
        # Their threads do not exist here, so they can neither be used nor closed. The references
        # keep the library from closing them.
        if self._used:
            self._inherited.append(self._open)
        self._reset()


connections: Final = _Connections()


@dataclass(slots=True)
class _Memory:
    """Registered regions of a pool, none over TCP, and the object that keeps the pool mapped."""

    regions: list[Region]
    owner: object = None


class ConnectionHandle:
    """A reference to a shared connection, with the registered memory of one storage.

    `with handle as connection` uses the connection for one call; reentrant, for many threads.

    A call whose caller has returned may still be in the library, which then accesses the pools'
    memory. Replaced memory, and at the end all of it, is released when no call is in flight. No
    caller waits for that.

    Raises:
        StorageUnavailableError: the store cannot be reached.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._connection = connections.acquire(settings)
        self._lock = threading.Lock()
        # The lock guards all that follows. It is never held during a call of the library, which
        # takes long to pin or release the memory of a large pool.
        self._calls = 0
        self._closing = False
        self._released = False
        self._pools: dict[str, _Memory] = {}
        self._buffers = _Memory([])
        self._retired = list[_Memory]()

    def __enter__(self) -> Connection:
        """Begin a call.

        Raises:
            StorageUnavailableError: `close` has begun.
        """
        with self._lock:
            if self._closing:
                raise StorageUnavailableError("mooncake: the storage is closed")
            self._calls += 1
            return self._connection

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls or not (self._retired or self._closing):
                return
        self._release_retired()

    def register(self, pool: str, regions: Sequence[Region], owner: object) -> None:
        """Register a pool's memory, and retire the memory that was registered under its name.

        Args:
            owner: kept alive for as long as a call may use the memory.

        Raises:
            InvalidPoolError: the transport refuses the memory; the former memory stays.
            StorageUnavailableError: `close` has begun.
        """
        with self as connection:
            memory = _Memory(_registered(connection, pool, regions), owner)
            with self._lock:
                self._retired += [self._pools.pop(pool)] if pool in self._pools else []
                self._pools[pool] = memory

    def register_buffer(self, buffer: memoryview) -> None:
        """Register memory of the storage itself, within a call. Not needed over TCP."""
        region = (address_of(buffer), len(buffer))
        if self._connection.settings.protocol != "tcp" and self._connection.register(*region):
            with self._lock:
                self._buffers.regions.append(region)

    def close(self) -> None:
        """Release memory and connection as soon as no call is in flight. Idempotent."""
        with self._lock:
            self._closing = True
        self._release_retired()

    def _release_retired(self) -> None:
        """Release what is retired, and after `close` the connection; nothing during a call."""
        with self._lock:
            if self._calls:
                return
            retired = self._retired
            self._retired = []
            # Decided within the lock, so that one thread releases the connection, and once.
            ends = self._closing and not self._released
            if ends:
                self._released = True
                retired += [*self._pools.values(), self._buffers]
                self._pools.clear()
        # Before the release, which may close the client.
        for memory in retired:
            for region in memory.regions:
                self._connection.unregister(*region)
        if ends:
            connections.release(self._connection)


def _registered(connection: Connection, pool: str, regions: Sequence[Region]) -> list[Region]:
    """Register memory. Returns its regions: none over TCP, which transfers any memory.

    Raises:
        InvalidPoolError: the transport refuses.
    """
    done = list[Region]()
    for region in regions if connection.settings.protocol != "tcp" else ():
        if not connection.register(*region):
            for other in done:
                connection.unregister(*other)
            raise InvalidPoolError(
                f"pool {pool!r}: {region[1]} bytes of it cannot be registered for "
                f"{connection.settings.protocol}; allow more locked memory (ulimit -l), or use "
                "protocol 'tcp'"
            )
        done.append(region)
    return done
