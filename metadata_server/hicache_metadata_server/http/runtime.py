"""Parts of one running server: what requests cost, and the work beside them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.core.limits import request_size
from hicache_metadata_server.http.handlers import Handlers
from hicache_metadata_server.http.metrics import HistoryRecorder, Metrics
from hicache_metadata_server.storage.group_commit import GroupCommit
from hicache_storage.observability import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from starlette.applications import Starlette

    from hicache_metadata_server.auth.security import Security
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.store import MetadataStore
    from hicache_storage.observability.otel import ServerSpan

TICK_SECONDS: Final = 0.1
"""Interval of the timers; a lease or quarantine ends at most this much late."""
BUSY_TICK_SECONDS: Final = 0.002
"""Interval while more slots are due than one tick handles."""
TICK_SLOTS: Final = 1024

_log = structlog.get_logger()


class ServerRuntime:
    """A service with its store, metrics, handlers and logs."""

    def __init__(
        self,
        service: MetadataService,
        store: MetadataStore,
        security: Security,
        clock: Callable[[], float],
        handlers: Handlers | None = None,
    ) -> None:
        self.service = service
        self.store = store
        self.clock = clock
        self.security = security
        self.handlers = handlers or Handlers(service, clock)
        self.metrics = Metrics(self.handlers, store, security)
        self.recorder = HistoryRecorder(service, self.metrics, clock)
        self._stopping = False
        self._next_second = 0.0
        self._slowest = self.recorder.slow_log

    def record(
        self,
        route: str,
        status: int,
        seconds: float,
        request_id: str,
        message: object,
        span: ServerSpan | None,
    ) -> None:
        """Record a request that is answered.

        Args:
            seconds: from the last byte of its body.
            message: the decoded body; None for a route without one, and if it cannot be decoded.
        """
        self.metrics.observe(route, status, seconds)
        is_slow = seconds > self._slowest.floor
        # Entries are counted here and not before: most requests are neither slow nor traced.
        if not (is_slow or span is not None):
            return
        size = request_size(message)
        if is_slow:
            self.recorder.add(route, status, seconds, request_id, size)
        if span is not None:
            span.end(status, size.scopes, size.entries)

    @contextlib.asynccontextmanager
    async def running(self, app: Starlette | None = None) -> AsyncGenerator[None]:
        """Lifespan of the application: starts the group commit and the timers, and ends them."""
        # Here and not in `__init__`: both need the running event loop.
        if self.store.durability is not p.StoreDurability.NONE:
            self.handlers.group_commit = GroupCommit(
                self.service, self.store, self.clock, self.handlers.fenced
            )
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            # Timers first, because they make changes; then the commit of the last changes; then the
            # store, which that commit needs.
            self._stopping = True
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await self.handlers.close()
            await asyncio.to_thread(self.store.close)
            if (spans := tracing.spans()) is not None:
                await asyncio.to_thread(spans.flush)
            _log.info("stopped", scopes=len(self.service.scopes))

    async def _tick(self) -> None:
        # A cancellation may be lost on its way: `asyncio.wait_for`, in which redis-py sends, returns
        # its result instead if that is there in the same turn of the loop (CPython before 3.12).
        while not self._stopping:
            more = False
            try:
                self._work_of_a_second()
                more = await self.handlers.tick(TICK_SLOTS)
            except StoreError:
                # Not logged ten times a second: the group commit has logged it, and `/readyz` and the
                # metrics show it for as long as it lasts.
                pass
            except Exception:  # noqa: BLE001 - without timers no lease would ever expire
                _log.exception("tick_failed")
            await asyncio.sleep(BUSY_TICK_SECONDS if more else TICK_SECONDS)

    def _work_of_a_second(self) -> None:
        """Reload changed files and take samples, at the first tick of each second."""
        # Looking at files and summing all scopes ten times a second would be work for nothing.
        now = self.clock()
        if now >= self._next_second:
            self._next_second = now // 1.0 + 1.0
            self.security.reload()
            self.recorder.sample()
