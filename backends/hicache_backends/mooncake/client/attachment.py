"""One storage's share in a connection: the memory that it has registered, and its calls that are in flight."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_backends.mooncake.client.in_flight import InFlight
from hicache_backends.mooncake.client.shared import connections
from hicache_storage.spec import InvalidPoolError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.config import ClientSettings

Region = tuple[int, int]
"""Start and size."""


@dataclass(slots=True)
class _Memory:
    """Registered regions, and what keeps them mapped."""

    regions: list[Region]
    owner: object = None


class Attachment:
    """Holds a connection, and pools by their names.

    A call that the storage's caller no longer waits for may still be in the library, which then reads or writes the pools'
    memory: memory that was replaced, and at the end all of it, is let go when no call is in flight, and nobody waits for that.

    Raises:
        StorageUnavailableError: the store cannot be reached.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._connection = connections.acquire(settings)
        self._lock = threading.Lock()
        self._calls = 0
        self._closing = self._released = False
        self._pools: dict[str, _Memory] = {}
        self._blocks = _Memory([])
        self._retired = list[_Memory]()

    def call(self) -> InFlight[Connection]:
        """The connection, for one call: `with attachment.call() as connection`.

        Raises:
            StorageUnavailableError: `close` has begun.
        """
        return InFlight(self._begin, self._end)

    def register(self, pool: str, regions: Sequence[Region], owner: object) -> None:
        """Register a pool's memory, in the place of another of its name.

        Args:
            owner: kept alive for as long as a call may use the memory.

        Raises:
            InvalidPoolError: the transport refuses memory that it cannot do without; what was registered before stays.
            StorageUnavailableError: `close` has begun.
        """
        memory = _Memory(self._registered(pool, regions), owner)
        with self._lock:
            former, closing = self._pools.pop(pool, None), self._closing
            self._retired += [memory] if closing else [former] if former else []
            if not closing:
                self._pools[pool] = memory
        self._let_go()
        if closing:
            self._refuse_closed()

    def register_block(self, start: int, size: int) -> None:
        """Register memory of the storage's own, within a call. Over TCP nothing depends on it."""
        if self._connection.register(start, size):
            with self._lock:
                self._blocks.regions.append((start, size))

    def close(self) -> None:
        """Let go of everything, as soon as no call is in flight. Idempotent."""
        with self._lock:
            self._closing = True
            self._retired += self._pools.values()
            self._pools.clear()
        self._let_go()

    def _begin(self) -> Connection:
        with self._lock:
            self._refuse_closed()
            self._calls += 1
        return self._connection

    def _end(self) -> None:
        with self._lock:
            self._calls -= 1
            if self._calls or not (self._retired or self._closing):
                return
        self._let_go()

    def _registered(self, pool: str, regions: Sequence[Region]) -> list[Region]:
        done = list[Region]()
        for region in regions:
            if self._connection.register(*region):
                done.append(region)
            elif self._connection.settings.protocol != "tcp":
                self._unregister(done)
                raise InvalidPoolError(
                    f"pool {pool!r}: {region[1]} bytes of it cannot be registered for {self._connection.settings.protocol}; "
                    "allow more locked memory (ulimit -l), or use protocol 'tcp'"
                )
        return done

    def _let_go(self) -> None:
        """Of what is retired, and at the end of the connection; not while a call is in flight."""
        with self._lock:
            if self._calls:
                return
            retired, self._retired = self._retired, []
            ends = self._closing and not self._released
            self._released |= ends
        for memory in retired:
            self._unregister(memory.regions)
        if ends:
            self._unregister(self._blocks.regions)
            connections.release(self._connection)

    def _unregister(self, regions: Sequence[Region]) -> None:
        for region in regions:
            self._connection.unregister(*region)

    def _refuse_closed(self) -> None:
        if self._closing:
            raise StorageUnavailableError("mooncake: the storage is closed")
