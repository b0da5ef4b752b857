"""Request handlers of a server on a shared store."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, cast

import structlog

from hicache_metadata_server.core.errors import StoreError
from hicache_metadata_server.http.handlers import (
    DecodedRequest,
    Endpoint,
    Handlers,
    Response,
    Result,
)
from hicache_metadata_server.shared.fsck import fsck
from hicache_metadata_server.shared.scripts import IdempotencyKey
from hicache_metadata_server.shared.sglang import SharedSglangCompat

if TYPE_CHECKING:
    from hicache_metadata_server import protocol as p
    from hicache_metadata_server.core.service import MetadataService
    from hicache_metadata_server.core.tenants import Caller
    from hicache_metadata_server.shared.service import SharedService

# Every server visits every scope in turn, so that a few at a time are enough.
SCOPES_A_TICK: Final = 32

_log = structlog.get_logger()


class SharedHandlers(Handlers):
    """Answers requests when Redis has. It has no group commit: what Redis has answered holds as Redis
    promises."""

    def __init__(self, service: SharedService) -> None:
        self.shared = service
        # The base class is typed for the service in memory; the two have the same methods.
        super().__init__(cast("MetadataService", service), time.time)

    def start(self, request: DecodedRequest) -> Result | None:
        """Nothing is done at once but what needs no Redis."""
        if request.endpoint.name == "/v2":
            return Result(self._response(self.shared.about, request.content_type), False)
        return None

    async def run_in_slices(self, request: DecodedRequest) -> Response:
        """Do what is asked for.

        Raises:
            RequestError: it was not executed; of a confirm of SGLang's protocol, the valid part
                was.
            StoreError: it may have been executed, or not.
        """
        endpoint, message, key, caller = (
            request.endpoint,
            request.message,
            IdempotencyKey(request.idempotency_key, request.digest),
            request.caller,
        )
        if endpoint.names is not None and not caller.sees_all:
            # Another server may have made the scopes since this one read the list, so their tenants
            # are read from Redis.
            await self.shared.check_tenant(caller, *endpoint.names(message))
        if endpoint.do_as is not None:
            answer = await cast("Any", endpoint.do_as)(message, key, caller)
        else:
            answer = await cast("Any", endpoint.do)(message, key)
        return self._response(answer, request.content_type)

    def commit(self) -> None:
        """Nothing waits to be written."""

    async def tick(self, slots: int) -> bool:
        """Run due work of some scopes: the server that served them last may have been killed."""
        was = self.shared.problem
        try:
            return await self.shared.tick(SCOPES_A_TICK)
        finally:
            # Logged at the change of state: during an outage every tick fails anew.
            if self.shared.problem and not was:
                _log.error("store_failing", error=self.shared.problem)
            elif was and not self.shared.problem:
                _log.info("store_serving")

    async def refresh(self) -> None:
        """See how the scopes are, or leave what is known while Redis does not answer."""
        with contextlib.suppress(StoreError):
            await self.shared.look()

    async def close(self) -> None:
        """Close the connections."""
        await self.shared.connection.close()

    def problem(self) -> str:
        """Return the reason why the server is not ready, or ""."""
        return self.shared.problem or super().problem()

    def store_problem(self) -> str:
        """Return the last error of Redis, or ""."""
        return self.shared.problem

    def _native_endpoint(self, path: str, route: p.Route) -> Endpoint:
        endpoint = super()._native_endpoint(path, route)
        special: dict[str, Any] = {"/v2/scopes": self._list, "/v2/fsck": self._check}
        if path not in special:
            return endpoint
        return replace(endpoint, do_as=special[path])

    async def _list(self, _: None, idempotency_key: IdempotencyKey, caller: Caller) -> p.Scopes:
        await self.shared.look()
        return self.shared.list_scopes(caller)

    async def _check(
        self, request: p.Fsck, idempotency_key: IdempotencyKey, caller: Caller
    ) -> p.FsckReport:
        return await fsck(self.shared, request, caller)

    def _sglang_service(self) -> SharedSglangCompat:
        return SharedSglangCompat(self.shared)
