"""Group commit: requests that arrive while a transaction is being written share the next one."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hicache_metadata_server.stores.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hicache_metadata_server.service.changes import Changes
    from hicache_metadata_server.service.service import MetadataService
    from hicache_metadata_server.stores.store import Store


class Journal:
    """Writes a service's changes to its store, in a thread of its own; used from the event loop that it was opened in."""

    def __init__(self, service: MetadataService, store: Store, clock: Callable[[], float]) -> None:
        self._service, self._store, self._clock = service, store, clock
        self._loop = asyncio.get_running_loop()
        self._groups: queue.SimpleQueue[Changes | None] = queue.SimpleQueue()
        self._open: asyncio.Future[None] | None = None
        """Of the group that is collected."""
        self._writing: asyncio.Future[None] | None = None
        self._holds = 0
        self.error: StoreError | None = None
        """Why the last group could not be written."""
        self.groups = 0
        self.recent_seconds: deque[float] = deque(maxlen=1024)
        """How long the last groups took."""
        self._thread = threading.Thread(target=self._write_groups, name="journal", daemon=True)
        self._thread.start()

    async def written(self) -> None:
        """Return when everything that was changed before this call is in the store.

        Raises:
            StoreError: it could not be written. It stays changed in memory, and is written with the next group.
        """
        if self._open is None:
            self._open = self._loop.create_future()
            # Whatever the event loop has read already joins this group.
            self._loop.call_soon(self._seal)
        await asyncio.shield(self._open)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Changes made inside are one group, however often others are served in between."""
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
            self._seal()

    async def close(self) -> None:
        """Write what is left, and end the thread."""
        try:
            await self.written()
        finally:
            self._groups.put(None)
            await asyncio.to_thread(self._thread.join)

    def _seal(self) -> None:
        if self._open is None or self._writing is not None or self._holds:
            return
        group, self._open = self._open, None
        changes = self._service.take_changes()
        if changes:
            self._writing = group
            self._groups.put(changes)
        else:
            group.set_result(None)

    def _write_groups(self) -> None:
        while (changes := self._groups.get()) is not None:
            begin, error = self._clock(), None
            try:
                self._store.write(changes, begin)
            except StoreError as failed:
                error = failed
            self._loop.call_soon_threadsafe(self._done, changes, error, self._clock() - begin)

    def _done(self, changes: Changes, error: StoreError | None, seconds: float) -> None:
        group, self._writing = self._writing, None
        assert group is not None, "only what is being written gets done"
        self.groups += 1
        self.recent_seconds.append(seconds)
        self.error = error
        if error is None:
            group.set_result(None)
        else:
            self._service.put_back(changes)
            group.set_exception(error)
            # Somebody may have gone away meanwhile; then nobody asks.
            group.exception()
        self._seal()
