"""Synchronous HTTP client of one or several metadata servers on one store."""

from __future__ import annotations

import contextvars
import logging
import queue
import random
import secrets
import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from hicache_metadata_server import protocol as p
from hicache_metadata_server.client.errors import (
    BusyError,
    DrainingError,
    MetadataError,
    MovedError,
    RetryableError,
    UnknownScopeError,
)
from hicache_metadata_server.client.failover import ServerPool, addresses
from hicache_metadata_server.client.http_transport import HttpTransport, PendingRequest
from hicache_metadata_server.client.metadata_client import MetadataClient
from hicache_storage.observability.request_ids import HEADER, call_request_id
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
    """A client of protocol 2. A request runs in the thread of its caller.

    Of several servers, all on one store, it uses one. A request that fails there goes to the next
    server, within the call's deadline and under the same idempotency key.

    `urls` is one address or several (a list, or separated by commas), `http://` or `https://`.
    Without `tls`, servers are verified by the system's authorities. Calls without a deadline have
    `timeout_seconds`. `on_failover` is called for each server that is left for another one; `rng`
    draws the order of servers, backoffs and pauses.

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
        self._probing = HttpTransport(tls)
        self._servers = ServerPool(
            addresses(urls),
            rng=self._rng,
            problem_of=self._probing.problem,
            on_failover=on_failover,
        )
        self._headers = {
            "Content-Type": p.MSGPACK,
            "Accept": p.MSGPACK,
            "Accept-Encoding": "identity",
        }
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._timeout_seconds = timeout_seconds
        self._about: p.About | None = None
        self._initialized_at = ""
        """URL of the server that has initialized scopes last."""
        self._owners: dict[str, ServerEndpoint] = {}
        """Owners of scopes, as servers have named them. One that is wrong by now names another."""
        self._unawaited: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._sender: threading.Thread | None = None
        """Sends `_unawaited`; started with the first."""
        self._closed = False

    @property
    def about(self) -> p.About:
        """Server information of the last `refresh`.

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
        self._about = self.send("/v2", None, p.About, call)
        if self._about.protocol != p.PROTOCOL:
            raise MetadataError(
                f"{self.endpoint} speaks protocol {self._about.protocol!r}, not {p.PROTOCOL!r}"
            )
        return self._about

    def problem(self) -> str:
        return self._transport.problem(self._servers.first)

    def send(self, path: str, request: p.Request | None, response_type: type[A], call: Call) -> A:
        left = call.remaining()
        seconds = self._timeout_seconds if left is None else left
        try:
            return self._request(path, request, response_type, time.monotonic() + seconds)
        except TimeoutError as error:
            message = f"the metadata server {self.endpoint} has not answered within {seconds:.3g} s"
            raise StorageTimeoutError(message) from error

    def send_later(self, path: str, request: p.Request) -> None:
        until = time.monotonic() + UNAWAITED_SECONDS
        # With the request id of this call.
        context = contextvars.copy_context()
        with self._lock:
            if self._closed:
                raise MetadataError("the client of the metadata server is closed")
            if self._sender is None:
                sender = threading.Thread(
                    target=self._send_unawaited, name="hicache-metadata-client", daemon=True
                )
                try:
                    sender.start()
                except RuntimeError as error:
                    raise MetadataError(
                        f"the client's thread cannot be started: {error}"
                    ) from error
                self._sender = sender
            ask = partial(self._request, path, request, p.Answer, until)
            self._unawaited.put(partial(context.run, ask))

    def close(self) -> None:
        with self._lock:
            self._closed = True
            sender, self._sender = self._sender, None
        self._probing.close(0.0)
        self._servers.close()
        until = time.monotonic() + CLOSE_SECONDS
        if sender is not None:
            self._unawaited.put(None)
            sender.join(CLOSE_SECONDS)
        self._transport.close(max(0.0, until - time.monotonic()))
        if sender is not None:
            sender.join()

    def _send_unawaited(self) -> None:
        while (send := self._unawaited.get()) is not None:
            with suppress(MetadataError, TimeoutError):
                send()

    def _request(
        self, path: str, request: p.Request | None, response_type: type[T], until: float
    ) -> T:
        """Ask one server after another; TimeoutError if none has answered by `until`."""
        pending = self._pending(path, request, response_type)
        plan = self._servers.plan(self._owners.get(pending.scope))
        max_pause = PAUSE_SECONDS
        while True:
            # After the pause: an attempt without time would count as a silent server.
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            server = plan.server
            try:
                response = self._attempt(pending, plan, left)
            except (RetryableError, DrainingError) as error:
                left = until - time.monotonic()
                if not plan.advance(error) and left > 0:
                    raise
                if plan.needs_pause and left > 0:
                    time.sleep(min(left, self._rng.uniform(0, max_pause)))
                    max_pause = min(2 * max_pause, MAX_PAUSE_SECONDS)
            else:
                if server.failures:
                    self._servers.record_success(server)
                return response

    def _pending(
        self, path: str, request: p.Request | None, response_type: type[T]
    ) -> PendingRequest[T]:
        headers = {**self._headers, HEADER: call_request_id(None)}
        if p.ROUTES[path].changes:
            # One key for all attempts: servers make the change once, whichever of them has seen it.
            headers[p.IDEMPOTENCY_HEADER] = secrets.token_hex(16)
        body = None if request is None else msgspec.msgpack.encode(request)
        return PendingRequest(path, headers, body, response_type, _scope_of(request))

    def _attempt(self, pending: PendingRequest[T], plan: AttemptPlan, left: float) -> T:
        until, moves = time.monotonic() + min(left, plan.timeout(left)), 0
        while True:
            server = plan.server
            try:
                response = self._transport.send(server, pending, until - time.monotonic())
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
                plan.server = owner
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


def _scope_of(request: p.Request | None) -> str:
    """The first scope that a request names; empty for none."""
    named = getattr(request, "scopes", None) or [getattr(request, "scope", "")]
    first: str = getattr(named[0], "scope", named[0])
    return first
