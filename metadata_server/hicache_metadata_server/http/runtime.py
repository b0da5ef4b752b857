"""The parts of one running server, and its lifespan: what runs beside the requests."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final

import structlog

from hicache_metadata_server import protocol as p
from hicache_metadata_server.http.handlers import Desk
from hicache_metadata_server.http.metrics import Metrics
from hicache_metadata_server.http.request_log import Watch
from hicache_metadata_server.http.timeseries import HistoryRecorder
from hicache_metadata_server.storage.group_commit import Journal
from hicache_metadata_server.storage.store import StoreError
from hicache_storage.observability import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from fastapi import FastAPI

    from hicache_metadata_server.auth.security import Security
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.storage.store import Store

TICK_SECONDS: Final = 0.1
"""How often the server looks for what is due where nobody asks for it."""
TICK_SLOTS: Final = 1024

_log = structlog.get_logger()


class Server:
    """A service with its store, while the application runs."""

    def __init__(
        self,
        service: MetadataService,
        store: Store,
        security: Security,
        clock: Callable[[], float],
        desk: Desk | None = None,
        slow_seconds: float = 0.0,
    ) -> None:
        self.service, self.store, self.clock = service, store, clock
        self.metrics = Metrics(service, self.problem)
        self.recorder = HistoryRecorder(service, self.metrics.so_far, clock)
        self.security = self.metrics.security = security
        self.metrics.store_sizes = store.sizes
        self.desk = desk or Desk(service, clock)
        if desk is not None:
            self.metrics.store_problem = desk.store_problem
        spans = tracing.spans()
        self.watch = (
            Watch(self.metrics, slow_seconds, spans) if slow_seconds or spans is not None else None
        )

    @contextlib.asynccontextmanager
    async def running(self, app: FastAPI | None = None) -> AsyncGenerator[None]:
        """What stands around the requests: the journal, and the clock's work."""
        if self.store.durability is not p.Durability.NONE:
            self.desk.journal = self.metrics.journal = Journal(self.service, self.store, self.clock)
        ticking = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ticking
            await self.desk.close()
            await asyncio.to_thread(self.store.close)
            if (spans := tracing.spans()) is not None:
                await asyncio.to_thread(spans.flush)
            _log.info("stopped", scopes=len(self.service.scopes))

    def problem(self) -> str:
        """Why it is not ready, or ""."""
        return self.desk.problem()

    async def _tick(self) -> None:
        while True:
            try:
                self.security.reloads.look()
                more = await self.desk.tick(TICK_SLOTS)
            except StoreError:
                # The desk's problem tells.
                more = False
            except Exception:  # noqa: BLE001 - the clock must go on, and the log must tell
                _log.exception("tick_failed")
                more = False
            self._record()
            await asyncio.sleep(0.002 if more else TICK_SECONDS)

    def _record(self) -> None:
        try:
            self.recorder.tick()
        except Exception:  # noqa: BLE001 - as above
            _log.exception("record_failed")
