"""A storage's handle on a shared connection: its registered memory and calls in flight."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.mooncake.client.connection import Connection
from hicache_backends.mooncake.client.connection_cache import connections
from hicache_backends.mooncake.client.in_flight import InFlight
from hicache_storage.spec import InvalidPoolError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.mooncake.config import ClientSettings

Region = tuple[int, int]
"""Start address and size in bytes."""


@dataclass(slots=True)
class _Memory:
    """Regions that are registered with a connection, and the object that keeps them mapped."""

    connection: Connection
    regions: list[Region]
    owner: object = None

    def give_up(self) -> _Memory:
        """Return the registrations, of which this memory knows no more."""
        given = _Memory(self.connection, self.regions)
        self.regions = []
        return given

    def unregister(self) -> None:
        """Undo the registrations."""
        for region in self.regions:
            self.connection.unregister(*region)


class ConnectionHandle:
    """A reference to a shared connection, with the registered memory of one storage.

    A call whose caller has returned may still be in the library, which then accesses the pools'
    memory. Replaced memory, and at the end all of it, is released when no call is in flight. No
    caller waits for that.

    Raises:
        StorageUnavailableError: the store cannot be reached.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._connection = connections.acquire(settings)
        self._replacing = threading.Lock()
        """Held by the one thread that replaces the connection; nobody waits for it."""
        self._lock = threading.Lock()
        # The lock guards all that follows. It is never held during a call of the library, which
        # takes long to pin or release the memory of a large pool.
        self._calls = 0
        self._closing = False
        self._released = False
        self._pools: dict[str, _Memory] = {}
        self._blocks = list[_Memory]()
        self._retired = list[_Memory]()
        self._former = list[Connection]()
        """Replaced connections, which calls in flight may still use."""

    def call(self) -> InFlight[Connection]:
        """Use the connection for one call: `with handle.call() as connection`.

        Raises:
            StorageUnavailableError: `close` has begun.
        """
        return InFlight(self._begin, self._end)

    def replace_stale(self) -> None:
        """Use a newer connection from the next call on, if this one is stale.

        Raises:
            StorageUnavailableError: `close` has begun, or the master does not answer.
        """
        if not self._connection.is_stale:
            return
        with self.call() as connection:
            if not self._replacing.acquire(blocking=False):
                return
            try:
                # Another thread may have been faster.
                if connection is self._connection:
                    newer = connections.replace(connection)
                    with self._lock:
                        self._connection = newer
                        self._former.append(connection)
            finally:
                self._replacing.release()

    def register(self, pool: str, regions: Sequence[Region], owner: object) -> None:
        """Register a pool's memory, and retire the memory that was registered under its name.

        Args:
            owner: kept alive for as long as a call may use the memory.

        Raises:
            InvalidPoolError: the transport refuses memory that it needs; the former memory stays.
            StorageUnavailableError: `close` has begun.
        """
        # In a call, so that no replacement closes the connection meanwhile.
        with self.call() as connection:
            # Before the lock, and before the former memory is given up: a refusal changes nothing.
            memory = _Memory(connection, _registered(connection, pool, regions), owner)
            with self._lock:
                former = self._pools.pop(pool, None)
                closing = self._closing
                # After a `close` that began meanwhile nobody else would release the new memory.
                self._retired += [memory] if closing else [former] if former else []
                if not closing:
                    self._pools[pool] = memory
        if closing:
            self._check_open()

    def register_block(self, start: int, size: int) -> None:
        """Register memory of the storage itself, within a call. Not needed over TCP."""
        connection = self._connection
        if connection.register(start, size):
            with self._lock:
                self._blocks.append(_Memory(connection, [(start, size)]))

    def close(self) -> None:
        """Release memory and connection as soon as no call is in flight. Idempotent."""
        with self._lock:
            self._closing = True
            self._retired += self._pools.values()
            self._pools.clear()
        self._release_retired()

    def _begin(self) -> Connection:
        with self._lock:
            self._check_open()
            self._calls += 1
            return self._connection

    def _end(self) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls or not (self._retired or self._former or self._closing):
                return
        self._release_retired()

    def _release_retired(self) -> None:
        """Release what is retired, and after `close` the connection; nothing during a call."""
        with self._lock:
            if self._calls:
                return
            retired = self._retired
            self._retired = []
            former = self._former
            self._former = []
            # Replaced over TCP only, where a connection transfers memory that is not registered.
            kept = [*self._pools.values(), *self._blocks]
            retired += [memory.give_up() for memory in kept if memory.connection in former]
            # Decided within the lock, so that one thread releases the connection, and once.
            ends = self._closing and not self._released
            self._released |= ends
            if ends:
                retired += self._blocks
                former.append(self._connection)
        # Before the release, which may close the client.
        for memory in retired:
            memory.unregister()
        for connection in former:
            connections.release(connection)

    def _check_open(self) -> None:
        if self._closing:
            raise StorageUnavailableError("mooncake: the storage is closed")


def _registered(connection: Connection, pool: str, regions: Sequence[Region]) -> list[Region]:
    """Register a pool's memory. Returns the regions that are registered: over TCP perhaps none.

    Raises:
        InvalidPoolError: the transport refuses memory that it needs.
    """
    done = list[Region]()
    for region in regions:
        if connection.register(*region):
            done.append(region)
        elif connection.settings.protocol != "tcp":
            _Memory(connection, done).unregister()
            raise InvalidPoolError(
                f"pool {pool!r}: {region[1]} bytes of it cannot be registered for "
                f"{connection.settings.protocol}; "
                "allow more locked memory (ulimit -l), or use protocol 'tcp'"
            )
    return done
