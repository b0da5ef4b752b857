"""When changes are written: at once where that takes no waiting; else those that arrive while
others are written share the next write."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, Literal

import structlog

from hicache_metadata_server.storage.store import StoreError
from hicache_storage.spec.stats import Latency

if TYPE_CHECKING:
    from collections.abc import Callable

    from hicache_metadata_server.core.changes import Changes
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.compaction import CompactionBatch
    from hicache_metadata_server.storage.store import MetadataStore

_log = structlog.get_logger()

IDLE_SECONDS: Final = 0.05
"""After so long without a write the store does what it has put off."""
RETRY_SECONDS: Final = 1.0
"""The interval at which a failing store is tried again, whether or not changes arrive."""

_Step = Literal["write", "compact", "checkpoint"]
"""A step whose failure makes the store a failing one."""


class GroupCommit:
    """Writes a service's changes to its store; used from the event loop that it was opened in.

    A store that writes to memory of the operating system is written from the loop itself, before
    the request is answered: that takes less time than waking a thread. What waits for a disk is
    done in a thread, and so are checkpoints, beside all else.

    A store fails from the first write, fold or checkpoint that does not succeed until each of them
    has succeeded again. Until then no change is acknowledged: a log that goes on growing would take
    the space that the fold needs. The store is tried again every `RETRY_SECONDS`, because a load
    balancer that has seen the failure sends no changes that would try it.
    """

    def __init__(
        self, service: MetadataService, store: MetadataStore, clock: Callable[[], float]
    ) -> None:
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
        self._batch: CompactionBatch | None = None
        """What is folded after the group that is being written."""
        self._failed: dict[_Step, StoreError] = {}
        """Why the last try of a step did not succeed."""
        self._next_try = 0.0
        self.groups = 0
        self.durations = Latency()
        """How long the groups took."""
        self._idle = self._loop.call_later(IDLE_SECONDS, self._check_idle)

    @property
    def error(self) -> StoreError | None:
        """The reason why no change is acknowledged, or None."""
        return next(iter(self._failed.values()), None)

    def flush(self) -> asyncio.Future[None] | None:
        """See that everything that was changed before this call is in the store: None if it is,
        else done when it is.

        It ends with a `StoreError` if that could not be written: it stays changed in memory, and is
        written with the next group.
        """
        if self._store.is_quick:
            return self._write_now()
        waiter = self._loop.create_future()
        if not self._open:
            # Whatever the event loop has read already joins this group, and so does what it reads
            # in its next turn.
            self._loop.call_soon(self._loop.call_soon, self._seal)
        self._open.append(waiter)
        return waiter

    def _write_now(self) -> asyncio.Future[None] | None:
        # Clients whose answers waited for each other would all be busy, and then all idle, while
        # the server is the other.
        changes = self._service.take_changes()
        if changes:
            self._write_group([], changes)
        if not changes or self.error is None:
            return None
        waiter = self._loop.create_future()
        waiter.set_exception(self.error)
        return waiter

    async def close(self) -> None:
        """Write and fold what is left, and end the threads; nothing may change any more."""
        # The last try: it cannot be put off.
        self._next_try = 0.0
        try:
            if (written := self.flush()) is not None:
                await written
        except StoreError as error:
            # Who asked for these changes was told so.
            _log.error("unwritten", error=str(error))
        finally:
            self._closed = True
            self._idle.cancel()
            await asyncio.to_thread(self._thread.shutdown)
            await asyncio.to_thread(self._aside.shutdown)
        await asyncio.to_thread(_try_step, "compaction_failed", self._compact_all)

    def _compact_all(self) -> None:
        if self._batch is not None:
            self._store.put_back(self._batch)
        # A change that nobody waited for: without it in the journal, what is folded would be ahead.
        if changes := self._service.take_changes():
            self._store.write(changes)
        while self._store.wants_compaction(idle=True):
            self._store.compact(self._store.collect(self._service.scope_of), self._clock())

    def _seal(self) -> None:
        if not self._open or self._busy:
            return
        group, self._open = self._open, []
        changes = self._service.take_changes()
        if changes:
            self._write_group(group, changes)
        else:
            _resolve(group, None)

    def _write_group(self, group: list[asyncio.Future[None]], changes: Changes) -> None:
        if self._failed.keys() - {"write"} and self._loop.time() < self._next_try:
            self._service.put_back(changes)
            _resolve(group, self.error)
            return
        self._collect(idle=False)
        if self._store.is_quick:
            self._done(group, changes, *self._write(changes))
        else:
            self._busy = True
            writing = self._loop.run_in_executor(self._thread, self._write, changes)
            writing.add_done_callback(
                lambda done: self._written_aside(group, changes, *done.result())
            )

    def _write(self, changes: Changes) -> tuple[StoreError | None, float]:
        begin = time.perf_counter()
        error = _try_step("write_failed", lambda: self._store.write(changes))
        return error, time.perf_counter() - begin

    def _written_aside(
        self,
        group: list[asyncio.Future[None]],
        changes: Changes,
        error: StoreError | None,
        seconds: float,
    ) -> None:
        self._busy = False
        self._done(group, changes, error, seconds)
        self._seal()

    def _done(
        self,
        group: list[asyncio.Future[None]],
        changes: Changes,
        error: StoreError | None,
        seconds: float,
    ) -> None:
        self.groups += 1
        self.durations.observe(seconds)
        self._last_write = self._loop.time()
        self._note("write", error)
        if error is not None:
            self._service.put_back(changes)
            if self._batch is not None:
                # It has what the store has not.
                self._store.put_back(self._batch)
                self._batch = None
        _resolve(group, self.error)
        self._checkpoint_if_due(idle=False)
        if self._store.is_quick:
            # Whoever waits is answered first.
            self._loop.call_soon(self._compact)
        else:
            self._compact()

    def _note(self, step: _Step, error: StoreError | None) -> None:
        """Keep how a step went; the log says when the store begins to fail, and when it serves
        again."""
        was = self.error
        if error is None:
            self._failed.pop(step, None)
        else:
            self._failed[step] = error
            self._next_try = self._loop.time() + RETRY_SECONDS
        if was is None and error is not None:
            _log.error("store_failing", step=step, error=str(error))
        elif was is not None and self.error is None:
            _log.info("store_serving")

    # What the store has put off.

    def _collect(self, *, idle: bool) -> None:
        """Take down what is to be folded, now that all changes are taken: once they are written,
        the store may have it."""
        # A checkpoint keeps the file busy.
        may = self._batch is None and not self._checkpointing
        if may and self._store.wants_compaction(idle=idle or "compact" in self._failed):
            self._batch = self._store.collect(self._service.scope_of)

    def _compact(self) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        if self._store.is_quick:
            self._note("compact", self._compact_batch(batch))
        else:
            self._busy = True
            self._loop.run_in_executor(self._thread, self._compact_batch, batch).add_done_callback(
                self._compacted
            )

    def _compact_batch(self, batch: CompactionBatch) -> StoreError | None:
        return _try_step("compaction_failed", lambda: self._store.compact(batch, self._clock()))

    def _compacted(self, done: asyncio.Future[StoreError | None]) -> None:
        self._busy = False
        self._note("compact", done.result())
        # Those who wait come first.
        self._seal()
        self._compact_while_idle()

    def _check_idle(self) -> None:
        self._idle = self._loop.call_later(IDLE_SECONDS, self._check_idle)
        if self.error is not None:
            if not self._busy and not self._checkpointing and self._loop.time() >= self._next_try:
                # It makes room for the write and the fold that follow it.
                self._begin_checkpoint()
        elif self._is_idle():
            self._checkpoint_if_due(idle=True)
            self._compact_while_idle()

    def _compact_while_idle(self) -> None:
        served = self._busy or self._checkpointing or self._open or not self._is_idle()
        if (
            self._closed
            or served
            or self.error is not None
            or not self._store.wants_compaction(idle=True)
        ):
            return
        if changes := self._service.take_changes():
            # Nobody waits for them; what is folded must not be ahead of the journal.
            self._write_group([], changes)
            return
        self._collect(idle=True)
        self._compact()
        # Requests that have come meanwhile are served first.
        self._loop.call_soon(self._compact_while_idle)

    def _is_idle(self) -> bool:
        return self._loop.time() - self._last_write >= IDLE_SECONDS

    def _checkpoint_if_due(self, *, idle: bool) -> None:
        if not self._closed and not self._checkpointing and self._store.wants_checkpoint(idle=idle):
            self._begin_checkpoint()

    def _begin_checkpoint(self) -> None:
        self._checkpointing = True
        checkpoint = self._loop.run_in_executor(
            self._aside, _try_step, "checkpoint_failed", self._store.checkpoint
        )
        checkpoint.add_done_callback(self._checkpointed)

    def _checkpointed(self, done: asyncio.Future[StoreError | None]) -> None:
        self._checkpointing = False
        self._note("checkpoint", done.result())
        if self.error is None:
            self._compact_while_idle()
        elif not self._closed and not self._busy:
            # A group without changes is a try as well.
            self._write_group([], self._service.take_changes())


def _try_step(event: str, step: Callable[[], None]) -> StoreError | None:
    """Run a step of the store; returns why it has failed, or None."""
    try:
        step()
    except StoreError as error:
        return error
    except Exception as error:  # noqa: BLE001 - a fault of ours is an answer of its own, and not one that never comes
        _log.exception(event)
        return StoreError(f"the store is at fault: {type(error).__name__}: {error}")
    return None


def _resolve(group: list[asyncio.Future[None]], error: StoreError | None) -> None:
    for waiter in group:
        # Somebody may have gone away meanwhile.
        if waiter.done():
            continue
        if error is None:
            waiter.set_result(None)
        else:
            waiter.set_exception(error)
