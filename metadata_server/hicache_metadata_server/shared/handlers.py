"""The same routes, each done in Redis."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import structlog

from hicache_metadata_server.http.handlers import Desk, Endpoint, Request, Said, Started
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.script_results import Once
from hicache_metadata_server.shared.sglang import SharedCompatible
from hicache_metadata_server.storage.store import StoreError

if TYPE_CHECKING:
    from hicache_metadata_server import protocol as p
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.core.tenants import Caller
    from hicache_metadata_server.shared.service import SharedService

SCOPES_A_TICK: Final = 32

_log = structlog.get_logger()


class SharedDesk(Desk):
    """Answers requests when Redis has. It has no group commit: what Redis has answered holds as
    Redis promises."""

    def __init__(self, service: SharedService) -> None:
        self.shared = service
        # What the application asks of a service, this one has too.
        super().__init__(cast("MetadataService", service), time.time)

    def start(self, request: Request) -> Started | None:
        """Nothing is done at once but what needs no Redis."""
        if request.endpoint.name == "/v2":
            return Started(self._said(self.shared.about, request.content_type), False)
        return None

    async def in_turns(self, request: Request) -> Said:
        """Do what is asked for.

        Raises:
            RequestError: it was not done; of a confirm of the compatible part, the rest was.
            StoreError: it may have been done, or not.
        """
        endpoint, message, once, caller = (
            request.endpoint,
            request.message,
            Once(request.once, request.digest),
            request.caller,
        )
        if endpoint.names is not None and not caller.sees_all:
            # Another server may have made them, so that this one did not know whose they are.
            await self.shared.check_tenant(caller, *endpoint.names(message))
        if endpoint.do_as is not None:
            answer = await cast("Any", endpoint.do_as)(message, once, caller)
        else:
            answer = await cast("Any", endpoint.do)(message, once)
        return self._said(answer, request.content_type)

    def join(self) -> None:
        """Nothing waits to be written."""

    async def tick(self, slots: int) -> bool:
        """Do what is due in some scopes: another server may have been killed that was asked
        last."""
        was = self.shared.problem
        try:
            return await self.shared.tick(SCOPES_A_TICK)
        finally:
            if self.shared.problem and not was:
                _log.error("store_failing", error=self.shared.problem)
            elif was and not self.shared.problem:
                _log.info("store_serving")

    async def look(self) -> None:
        """See how the scopes are, or leave what is known while Redis does not answer."""
        with contextlib.suppress(StoreError):
            await self.shared.look()

    async def close(self) -> None:
        """End the connections."""
        await self.shared.link.close()

    def problem(self) -> str:
        """Why it is not ready, or ""."""
        return self.shared.problem or super().problem()

    def store_problem(self) -> str:
        """Why Redis could not be asked, or ""."""
        return self.shared.problem

    def _native_endpoint(self, path: str, route: p.Route) -> Endpoint:
        endpoint = super()._native_endpoint(path, route)
        special: dict[str, Any] = {"/v2/scopes": self._list, "/v2/fsck": self._check}
        if path not in special:
            return endpoint
        return replace(endpoint, do_as=special[path])

    async def _list(self, _: None, once: Once, caller: Caller) -> p.Scopes:
        await self.shared.look()
        return self.shared.list_scopes(caller)

    async def _check(self, request: p.Fsck, once: Once, caller: Caller) -> p.FsckReport:
        return await fsck(self.shared, request, caller)

    def _compatible_part(self) -> SharedCompatible:
        return SharedCompatible(self.shared)
