"""Group commit: the changes of several requests are written as one group of the log.

A response is sent after its group is written, so a crash before that loses only changes that no
client was told of. docs/design/metadata-storage.md has every step.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, Literal

import structlog

from hicache_metadata_server.core.errors import FencedError, StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from hicache_metadata_server.core.changes import Changes
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.store import CompactionBatch, MetadataStore

_log = structlog.get_logger()

IDLE_SECONDS: Final = 0.05
"""Time without a write after which the server is idle, and compacts."""
PATIENCE_SECONDS: Final = 1.5
"""After this time without an answer of a store that is not quick, requests are refused with that as
the reason. Less than clients wait in one attempt, which would take the server for silent."""
RETRY_SECONDS: Final = 1.0
"""Interval at which a failing store is tried again, whether or not changes arrive."""

_Step = Literal["write", "compact"]
"""A step of the store that can fail."""


class GroupCommit:
    """Writes the changes of a service to its store, and schedules compactions.

    All methods run in one event loop. A quick store, which writes to the page cache, is written in
    the loop itself: that takes less time than waking a thread. A store that waits for the disk or
    the network is written by a task.

    The store is failing from the first step that fails until each step has succeeded again.
    Meanwhile no change is acknowledged, because a growing log would take the space that the
    compaction needs. The store is tried again every `RETRY_SECONDS`: a load balancer that has seen
    the failure sends no changes that would try it.
    """

    def __init__(
        self,
        service: MetadataService,
        store: MetadataStore,
        clock: Callable[[], float],
        on_fenced: Callable[[Sequence[str]], None] = lambda scopes: None,
        on_written: Callable[[float], object] = float,
    ) -> None:
        self._service = service
        self._store = store
        self._clock = clock
        self._on_fenced = on_fenced
        """Called with the names of scopes that this server has lost, before the next group."""
        self._on_written = on_written
        """Called with the seconds that a group took to write, successful or not."""
        self._loop = asyncio.get_running_loop()
        self._open: list[asyncio.Future[None]] = []
        """Requests that wait for the next group."""
        self._busy = False
        """A task uses the store, of which nobody else may make use."""
        self._running: asyncio.Task[StoreError | None] | None = None
        """The last step that was begun in a task."""
        self._began = 0.0
        """Start of that step."""
        self._writing: list[asyncio.Future[None]] = []
        """Requests of the group that is being written."""
        self._closed = False
        self._last_write = 0.0
        self._batch: CompactionBatch | None = None
        """Blocks to compact after the group that is being written."""
        self._failed: dict[_Step, StoreError] = {}
        """Error of each step whose last try has failed."""
        self._next_try = 0.0
        self.groups = 0
        self._idle = self._loop.call_later(IDLE_SECONDS, self._check_idle)

    @property
    def error(self) -> StoreError | None:
        """Reason that no change is acknowledged; None if the store serves."""
        return next(iter(self._failed.values()), None)

    def flush(self) -> asyncio.Future[None] | None:
        """Write all changes made before this call.

        Returns None if they are written, else a future that ends when they are. The future raises
        `StoreError` if the write fails; the changes then stay in memory, and are written with the
        next group.
        """
        if self._store.is_quick:
            # Not grouped over requests: clients whose responses come together also send their next
            # requests together, so server and clients would work in turns.
            if not (changes := self._service.take_changes()):
                return None
            self._write_group([], changes)
            if self.error is None:
                return None
            waiter = self._loop.create_future()
            waiter.set_exception(self.error)
            return waiter
        waiter = self._loop.create_future()
        if not self._open:
            # Two turns of the loop later: requests that it has read already, and those that it
            # reads in its next turn, join this group.
            self._loop.call_soon(self._loop.call_soon, self._seal)
        self._open.append(waiter)
        return waiter

    def refuse_waiting(self, error: StoreError) -> None:
        """End the requests that wait for the next group, whose changes were discarded."""
        group, self._open = self._open, []
        _resolve(group, error)

    async def close(self) -> None:
        """Write and compact the rest. No change may follow."""
        # A failing store is tried now, whatever its next try was to be.
        self._next_try = 0.0
        try:
            if (written := self.flush()) is not None:
                await written
        except StoreError as error:
            # Requests of these changes were answered with the error.
            _log.error("unwritten", error=str(error))
        finally:
            self._closed = True
            self._idle.cancel()
            while self._busy and self._running is not None:
                # A compaction, which no request waits for.
                await asyncio.wait([self._running])
            await _try_step("compaction_failed", self._compact_all())

    async def _compact_all(self) -> None:
        if self._batch is not None:
            self._store.put_back(self._batch)
        # Changes without a waiting request. They go to the log first: a compacted block must not
        # have changes that the log lacks.
        changes, error = self._service.take_changes(), None
        if changes:
            error = await _try_step("write_failed", self._store.append(changes))
        while error is None and self._store.wants_compaction(idle=True):
            batch = self._store.collect(self._service.scope_of)
            step = self._store.replace_blocks(batch, self._clock())
            error = await _try_step("compaction_failed", step)

    def _seal(self) -> None:
        if not self._open or self._busy:
            return
        group = self._open
        self._open = []
        changes = self._service.take_changes()
        if changes:
            self._write_group(group, changes)
        else:
            _resolve(group, None)

    def _write_group(self, group: list[asyncio.Future[None]], changes: Changes) -> None:
        if "compact" in self._failed and self._loop.time() < self._next_try:
            self._service.put_back(changes)
            _resolve(group, self.error)
            return
        # Between `take_changes` and the write: the blocks have exactly the changes of all groups up
        # to this one.
        self._collect(idle=False)
        begin = time.perf_counter()
        if self._store.is_quick:
            error = _try_quick("write_failed", lambda: self._store.write(changes))
            self._done(group, changes, error, time.perf_counter() - begin)
        else:
            self._writing = group
            self._begin("write_failed", self._store.append(changes)).add_done_callback(
                lambda done: self._written(group, changes, done.result(), begin)
            )

    def _written(
        self,
        group: list[asyncio.Future[None]],
        changes: Changes,
        error: StoreError | None,
        begin: float,
    ) -> None:
        self._busy = False
        self._done(group, changes, error, time.perf_counter() - begin)
        self._seal()

    def _begin(self, event: str, step: Awaitable[None]) -> asyncio.Task[StoreError | None]:
        self._busy = True
        self._began = self._loop.time()
        self._running = self._loop.create_task(_try_step(event, step))
        return self._running

    def _done(
        self,
        group: list[asyncio.Future[None]],
        changes: Changes,
        error: StoreError | None,
        seconds: float,
    ) -> None:
        self.groups += 1
        self._on_written(seconds)
        self._last_write = self._loop.time()
        self._note("write", error)
        if error is not None:
            self._service.put_back(changes)
            if self._batch is not None:
                # The blocks may have changes of the group that was not written.
                self._store.put_back(self._batch)
                self._batch = None
        _resolve(group, error or self.error)
        if isinstance(error, FencedError):
            self._on_fenced(error.scopes)
        if self._store.is_quick:
            # In a later turn of the loop: responses are sent first.
            self._loop.call_soon(self._compact)
        else:
            self._compact()

    def _note(self, step: _Step, error: StoreError | None) -> None:
        """Record the result of a step, and log when the store begins to fail or serves again."""
        was = self.error
        if error is None or isinstance(error, FencedError):
            self._failed.pop(step, None)
        else:
            self._failed[step] = error
            self._next_try = self._loop.time() + RETRY_SECONDS
        if was is None and self.error is not None:
            _log.error("store_failing", step=step, error=str(error))
        elif was is not None and self.error is None:
            _log.info("store_serving")

    # Compaction.

    def _collect(self, *, idle: bool) -> None:
        """Collect blocks to compact; called when all changes were taken for a group."""
        # A failing compaction is tried again in a busy server, too.
        idle = idle or "compact" in self._failed
        if self._batch is None and self._store.wants_compaction(idle=idle):
            self._batch = self._store.collect(self._service.scope_of)

    def _compact(self) -> None:
        batch = self._batch
        self._batch = None
        if batch is None:
            return
        now = self._clock()
        if self._store.is_quick:
            error = _try_quick("compaction_failed", lambda: self._store.compact(batch, now))
            self._note("compact", error)
        else:
            step = self._store.replace_blocks(batch, now)
            self._begin("compaction_failed", step).add_done_callback(self._compacted)

    def _compacted(self, done: asyncio.Task[StoreError | None]) -> None:
        self._busy = False
        error = done.result()
        self._note("compact", error)
        if isinstance(error, FencedError):
            self._on_fenced(error.scopes)
        # Waiting requests first.
        self._seal()
        self._compact_while_idle()

    def _check_idle(self) -> None:
        self._idle = self._loop.call_later(IDLE_SECONDS, self._check_idle)
        if self._busy and self._loop.time() - self._began > PATIENCE_SECONDS:
            # The changes stay, and may be written yet: a client that sends the request again has
            # the same answer.
            error = StoreError(f"the store has not answered within {PATIENCE_SECONDS} s")
            _resolve([*self._writing, *self._open], error)
        if self.error is not None:
            if not self._busy and self._loop.time() >= self._next_try:
                # A group without changes tries write and compaction as well.
                self._write_group([], self._service.take_changes())
        elif self._is_idle():
            self._compact_while_idle()

    def _compact_while_idle(self) -> None:
        in_use = self._busy or self._open or not self._is_idle()
        if (
            self._closed
            or in_use
            or self.error is not None
            or not self._store.wants_compaction(idle=True)
        ):
            return
        if changes := self._service.take_changes():
            # No request waits for them, but blocks must not be compacted before their changes are
            # in the log. This group compacts, too.
            self._write_group([], changes)
            return
        self._collect(idle=True)
        self._compact()
        # One batch a turn of the loop: requests that have arrived are served in between.
        self._loop.call_soon(self._compact_while_idle)

    def _is_idle(self) -> bool:
        return self._loop.time() - self._last_write >= IDLE_SECONDS


async def _try_step(event: str, step: Awaitable[None]) -> StoreError | None:
    """Run a step of the store, and return its error, or None."""
    try:
        await step
    except Exception as error:  # noqa: BLE001 - a defect must not leave requests waiting
        return _store_error(event, error)
    return None


def _try_quick(event: str, step: Callable[[], None]) -> StoreError | None:
    """Do the same with a step of a quick store."""
    try:
        step()
    except Exception as error:  # noqa: BLE001 - as above
        return _store_error(event, error)
    return None


def _store_error(event: str, error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    _log.error(event, exc_info=error)
    return StoreError(f"the store is at fault: {type(error).__name__}: {error}")


def _resolve(group: list[asyncio.Future[None]], error: StoreError | None) -> None:
    for waiter in group:
        # The request may have been cancelled meanwhile.
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
