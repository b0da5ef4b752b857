"""One storage's share in a connection: the memory that it has registered, and its calls that are in flight."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_backends.mooncake.client.shared import connections
from hicache_storage.spec import InvalidPoolError

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from hicache_backends.mooncake.client.connection import Connection
    from hicache_backends.mooncake.config import ClientSettings

Region = tuple[int, int]
"""Start and size."""


class Attachment:
    """Holds a connection, and pools by their names.

    A call that the storage's caller no longer waits for may still be in the library, which then reads or writes the pools'
    memory: they are let go when the last call has come back, and `close` waits for none.

    Raises:
        StorageUnavailableError: the store cannot be reached.
    """

    def __init__(self, settings: ClientSettings) -> None:
        self._connection = connections.acquire(settings)
        self._lock = threading.Lock()
        self._calls = 0
        self._closing = False
        self._regions: dict[str, list[Region]] = {}
        self._kept = list[object]()

    @contextmanager
    def call(self) -> Generator[Connection]:
        """The connection, for one call."""
        with self._lock:
            self._calls += 1
        try:
            yield self._connection
        finally:
            with self._lock:
                self._calls -= 1
                last = self._closing and not self._calls
            if last:
                self._let_go()

    def register(self, pool: str, regions: Sequence[Region], owner: object) -> None:
        """Register a pool's memory, in the place of another of its name.

        Raises:
            InvalidPoolError: the transport refuses memory that it cannot do without.
        """
        with self._lock:
            former, self._regions[pool] = self._regions.get(pool, []), []
            self._kept.append(owner)
        for region in former:
            self._connection.unregister(*region)
        for region in regions:
            if self._connection.register(*region):
                self._regions[pool].append(region)
            elif self._connection.settings.protocol != "tcp":
                raise InvalidPoolError(
                    f"pool {pool!r}: {region[1]} bytes of it cannot be registered for {self._connection.settings.protocol}"
                )

    def register_block(self, start: int, size: int) -> None:
        """Register memory of the storage's own. Over TCP nothing depends on it."""
        if self._connection.register(start, size):
            with self._lock:
                self._regions.setdefault("", []).append((start, size))

    def close(self) -> None:
        """Let go of everything, as soon as no call is in flight."""
        with self._lock:
            self._closing = True
            idle = not self._calls
        if idle:
            self._let_go()

    def _let_go(self) -> None:
        for region in [region for regions in self._regions.values() for region in regions]:
            self._connection.unregister(*region)
        self._regions.clear()
        self._kept.clear()
        connections.release(self._connection)
