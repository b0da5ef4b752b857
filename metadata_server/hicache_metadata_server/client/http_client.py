"""Synchronous HTTP client of one or several metadata servers on one store."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from multidict import CIMultiDict

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.addresses import addresses
from hicache_metadata_server.client.errors import (
    BusyError,
    DrainingError,
    MetadataError,
    MovedError,
    RetryableError,
    UnknownScopeError,
)
from hicache_metadata_server.client.failover import ServerPool
from hicache_metadata_server.client.http_transport import (
    PROBE_SECONDS,
    HttpTransport,
    PendingRequest,
    add_trace_headers,
    request_span,
)
from hicache_metadata_server.client.inline_loop import InlineLoop
from hicache_metadata_server.client.loop_thread import LoopThread
from hicache_metadata_server.client.metadata_client import MetadataClient
from hicache_storage.spec import StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from ssl import SSLContext

    from hicache_metadata_server.client.failover import AttemptPlan, ServerEndpoint
    from hicache_storage.objects import Call

A = TypeVar("A", bound=p.Answer)
T = TypeVar("T")

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 0.02
"""Bound of the pause before a server is asked again; it doubles with each further attempt."""
MAX_PAUSE_SECONDS: Final = 0.2
CLOSE_SECONDS: Final = 2.0
UNAWAITED_SECONDS: Final = 2.0
"""Deadline of requests that no caller waits for."""
INITIALIZE: Final = "/v2/initialize"
MAX_MOVES: Final = 4
"""Redirections of one attempt."""


class HttpMetadataClient(MetadataClient):
    """A client of protocol 2. Its thread starts with the first request and ends with `close`.

    Of several servers, all on one store, it uses one. A request that fails there goes to the next
    server, within the call's deadline and under the same idempotency key.

    The first attempt at a healthy server runs in the calling thread, if no other thread is in the
    inline loop. Everything else runs in the client's loop thread.

    Args:
        urls: one address or several (a list, or separated by commas), `http://` or `https://`.
        token: bearer token, "" for none.
        timeout_seconds: deadline of calls without one.
        on_failover: called for each server that is left for another one, in the loop thread.
        rng: draws the order of servers, backoffs and pauses.
        tls: TLS context for `https://` servers; by default the system's authorities and no client
            certificate.

    Raises:
        ValueError: no address, or a malformed one.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str = "",
        *,
        timeout_seconds: float = 10.0,
        tls: SSLContext | None = None,
        on_failover: Callable[[], None] = lambda: None,
        rng: random.Random | None = None,
    ) -> None:
        super().__init__()
        self._rng = rng or random.Random()
        self._transport = HttpTransport(tls)
        self._servers = ServerPool(
            addresses(urls),
            rng=self._rng,
            problem_of=self._transport.problem,
            on_failover=on_failover,
        )
        headers = {"Content-Type": p.MSGPACK, "Accept": p.MSGPACK, "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # aiohttp would convert any other mapping to this type for each request.
        self._headers = CIMultiDict(headers)
        self._timeout_seconds = timeout_seconds
        self._inline_loop = InlineLoop(HttpTransport(tls))
        self._loop_thread = LoopThread(
            "hicache-metadata-client",
            end=self._end,
            after=lambda: self._inline_loop.close(CLOSE_SECONDS),
        )
        self._about: p.About | None = None
        self._initialized_at = ""
        """URL of the server that has initialized scopes last."""
        self._owners: dict[str, ServerEndpoint] = {}
        """Owners of scopes, as servers have named them. One that is wrong by now names another."""

    @property
    def about(self) -> p.About:
        """ServerEndpoint information of the last `refresh`.

        Raises:
            MetadataError: `refresh` has not succeeded yet.
        """
        if self._about is None:
            raise MetadataError(f"the metadata server {self.endpoint} has not answered yet")
        return self._about

    @property
    def endpoint(self) -> str:
        return self._servers.describe()

    def refresh(self, call: Call) -> p.About:
        self._about = self._call("/v2", None, p.About, call)
        if self._about.protocol != p.PROTOCOL:
            raise MetadataError(
                f"{self.endpoint} speaks protocol {self._about.protocol!r}, not {p.PROTOCOL!r}"
            )
        return self._about

    def problem(self) -> str:
        work = self._transport.problem(self._servers.first)
        return self._loop_thread.run(work, PROBE_SECONDS)

    def send(self, path: str, request: p.Request, response_type: type[A], call: Call) -> A:
        return self._call(path, request, response_type, call)

    def send_later(self, path: str, request: p.Request) -> None:
        self._loop_thread.post(self._send_unawaited(path, request))

    def close(self) -> None:
        self._loop_thread.close()

    # In the caller's thread.

    def _call(self, path: str, request: p.Request | None, response_type: type[T], call: Call) -> T:
        left = call.remaining()
        seconds = self._timeout_seconds if left is None else left
        until = time.monotonic() + seconds
        # Also for inline attempts: this thread probes servers, and it closes the inline loop.
        self._loop_thread.start()
        try:
            with request_span(path):
                pending = self._pending(path, request, response_type)
                plan = self._servers.plan(self._owners.get(pending.scope))
                first_error: MetadataError | None = None
                if plan.server.is_healthy and self._inline_loop.try_acquire():
                    try:
                        return self._inline_loop.run(
                            lambda transport: self._attempt(transport, pending, plan, seconds)
                        )
                    except (RetryableError, DrainingError) as failure:
                        first_error = failure
                rest = max(0.0, until - time.monotonic())
                return self._loop_thread.run(self._request(pending, plan, until, first_error), rest)
        except asyncio.CancelledError as error:
            raise MetadataError("the client of the metadata server was closed meanwhile") from error
        except TimeoutError as error:
            message = f"the metadata server {self.endpoint} has not answered within {seconds:.3g} s"
            raise StorageTimeoutError(message) from error

    def _pending(
        self, path: str, request: p.Request | None, response_type: type[T]
    ) -> PendingRequest[T]:
        headers = self._headers.copy()
        add_trace_headers(headers)
        if p.ROUTES[path].changes:
            # One key for all attempts: servers make the change once, whichever of them has seen it.
            headers[p.IDEMPOTENCY_HEADER] = secrets.token_hex(16)
        body = None if request is None else msgspec.msgpack.encode(request)
        return PendingRequest(path, headers, body, response_type, _scope_of(request))

    # In either event loop.

    async def _attempt(
        self, transport: HttpTransport, pending: PendingRequest[T], plan: AttemptPlan, left: float
    ) -> T:
        until, moves = time.monotonic() + min(left, plan.timeout(left)), 0
        while True:
            server = plan.server
            try:
                response = await transport.send(server, pending, until - time.monotonic())
                break
            except MovedError as moved:
                # Servers that disagree about the owner would send the client back and forth.
                if moves == MAX_MOVES:
                    raise BusyError(str(moved)) from moved
                moves += 1
                owner = self._servers.at(moved.url)
                # Its scopes get another owner once its lease has ended.
                if not owner.may_own:
                    raise BusyError(str(moved)) from moved
                plan.move_to(owner)
                self._owners[pending.scope] = owner
            except UnknownScopeError:
                self._warn_of_separate_stores(server)
                raise
        if plan.seeks_owner:
            self._owners[pending.scope] = server
        # Remembered for the warning above only.
        if pending.path == INITIALIZE:
            self._initialized_at = server.url
        return response

    def _warn_of_separate_stores(self, server: ServerEndpoint) -> None:
        """Log that servers may have separate stores: a client cannot tell that from a lost
        state."""
        if self._initialized_at not in ("", server.url):
            logger.warning(
                "metadata server %s does not know the scopes that %s has made: are they one store?",
                server.url,
                self._initialized_at,
            )

    # In the loop thread.

    async def _request(
        self,
        pending: PendingRequest[T],
        plan: AttemptPlan,
        until: float,
        error: MetadataError | None,
    ) -> T:
        """Ask one server after another.

        Args:
            error: the failure of the inline attempt; None if there was none.
        """
        max_pause = PAUSE_SECONDS
        while True:
            left = until - time.monotonic()
            if error is not None:
                if not plan.advance(error) and left > 0:
                    raise error
                if plan.needs_pause and left > 0:
                    await asyncio.sleep(min(left, self._rng.uniform(0, max_pause)))
                    max_pause = min(2 * max_pause, MAX_PAUSE_SECONDS)
                    left = until - time.monotonic()
            # After the pause: an attempt without time would count as a silent server.
            if left <= 0:
                raise TimeoutError
            server = plan.server
            try:
                response = await self._attempt(self._transport, pending, plan, left)
            except (RetryableError, DrainingError) as failure:
                error = failure
            except asyncio.CancelledError:
                # The caller's deadline has ended. Such attempts count towards the server's silence,
                # or a server that hangs would keep all calls with short deadlines.
                self._servers.record_timeout(server)
                raise
            else:
                if server.failures:
                    self._servers.record_success(server)
                return response

    async def _send_unawaited(self, path: str, request: p.Request) -> None:
        with request_span(path):
            pending = self._pending(path, request, p.Answer)
            try:
                await self._request(
                    pending,
                    self._servers.plan(self._owners.get(pending.scope)),
                    time.monotonic() + UNAWAITED_SECONDS,
                    None,
                )
            except (MetadataError, TimeoutError):
                return

    async def _end(self) -> None:
        """Wait for requests under way, for a time; then cancel them and close the connections."""
        self._servers.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._transport.close()


def _scope_of(request: p.Request | None) -> str:
    """The first scope that a request names; empty for none."""
    named = getattr(request, "scopes", None) or [getattr(request, "scope", "")]
    first: str = getattr(named[0], "scope", named[0])
    return first
