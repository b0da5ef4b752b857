"""Group commit: requests that arrive together, or while a transaction is being written, share the next one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from hicache_metadata_server.stores.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_metadata_server.service.changes import Changes
    from hicache_metadata_server.service.service import MetadataService
    from hicache_metadata_server.stores.store import Store

IDLE_SECONDS: Final = 0.05
"""After so long without a write the store does what it has put off."""


class Journal:
    """Writes a service's changes to its store; used from the event loop that it was opened in.

    A store that writes to memory of the operating system is written from the loop itself: that takes less time than waking a thread.
    What waits for a disk is done in a thread, and so is everything while a checkpoint keeps the file busy.
    """

    def __init__(self, service: MetadataService, store: Store, clock: Callable[[], float]) -> None:
        self._service, self._store, self._clock = service, store, clock
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._open: list[asyncio.Future[None]] = []
        """Those who wait for the group that is collected."""
        self._busy = self._checkpointing = False
        """The thread has the store."""
        self._closed = False
        self._last_write = 0.0
        self.error: StoreError | None = None
        """Why the last group could not be written."""
        self.groups = 0
        self.recent_seconds: deque[float] = deque(maxlen=1024)
        """How long the last groups took."""
        self._idle = self._loop.call_later(IDLE_SECONDS, self._see_idle)

    async def written(self) -> None:
        """Return when everything that was changed before this call is in the store.

        Raises:
            StoreError: it could not be written. It stays changed in memory, and is written with the next group.
        """
        waiter = self._loop.create_future()
        if not self._open:
            # Whatever the event loop has read already joins this group, and so does what it reads in its next turn.
            self._loop.call_soon(self._loop.call_soon, self._seal)
        self._open.append(waiter)
        await waiter

    async def close(self) -> None:
        """Write what is left, and end the threads."""
        try:
            await self.written()
        finally:
            self._closed = True
            self._idle.cancel()
            await asyncio.to_thread(self._thread.shutdown)
            await asyncio.to_thread(self._aside.shutdown)

    def _seal(self) -> None:
        if not self._open or self._busy:
            return
        group, self._open = self._open, []
        changes = self._service.take_changes()
        if not changes:
            _tell(group, None)
        elif self._store.is_quick and not self._checkpointing:
            self._done(group, changes, *self._write(changes))
        else:
            self._busy = True
            writing = self._loop.run_in_executor(self._thread, self._write, changes)
            writing.add_done_callback(lambda done: self._written_aside(group, changes, *done.result()))

    def _write(self, changes: Changes) -> tuple[StoreError | None, float]:
        begin, error = time.perf_counter(), None
        try:
            self._store.write(changes, self._clock())
        except StoreError as failed:
            error = failed
        return error, time.perf_counter() - begin

    def _written_aside(
        self, group: list[asyncio.Future[None]], changes: Changes, error: StoreError | None, seconds: float
    ) -> None:
        self._busy = False
        self._done(group, changes, error, seconds)
        self._seal()

    def _done(self, group: list[asyncio.Future[None]], changes: Changes, error: StoreError | None, seconds: float) -> None:
        self.groups += 1
        self.recent_seconds.append(seconds)
        self._last_write = self._loop.time()
        self.error = error
        if error is not None:
            self._service.put_back(changes)
        _tell(group, error)
        self._see_to_store(idle=False)

    # What the store has put off.

    def _see_idle(self) -> None:
        if self._is_idle():
            self._see_to_store(idle=True)
        self._idle = self._loop.call_later(IDLE_SECONDS, self._see_idle)

    def _see_to_store(self, *, idle: bool) -> None:
        if self._closed:
            return
        if self._store.wants_checkpoint(idle=idle) and not self._checkpointing:
            self._checkpointing = True
            self._loop.run_in_executor(self._aside, self._checkpoint).add_done_callback(self._checkpointed)
        if self._busy or self.error is not None or not self._store.wants_tidying(idle=idle):
            return
        if not self._store.is_quick or self._checkpointing:
            self._busy = True
            self._loop.run_in_executor(self._thread, self._tidy).add_done_callback(self._tidied)
            return
        self._tidy()
        if idle and self._store.wants_tidying(idle=True):
            # Requests that have come meanwhile are served first.
            self._loop.call_soon(self._go_on_tidying)

    def _go_on_tidying(self) -> None:
        if self._is_idle() and not self._open:
            self._see_to_store(idle=True)

    def _is_idle(self) -> bool:
        return self._loop.time() - self._last_write >= IDLE_SECONDS

    def _tidy(self) -> None:
        try:
            self._store.tidy()
        except StoreError as error:
            self.error = error

    def _tidied(self, _: object) -> None:
        self._busy = False
        # Those who wait come first.
        self._seal()
        self._see_to_store(idle=self._is_idle())

    def _checkpoint(self) -> None:
        try:
            self._store.checkpoint()
        except StoreError as error:
            self.error = error

    def _checkpointed(self, _: object) -> None:
        self._checkpointing = False


def _tell(group: list[asyncio.Future[None]], error: StoreError | None) -> None:
    for waiter in group:
        # Somebody may have gone away meanwhile.
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
