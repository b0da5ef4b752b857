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
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

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
from hicache_metadata_server.client.splitting import check_shape, chunks_of, joined
from hicache_storage.observability.request_ids import HEADER, call_request_id
from hicache_storage.spec import StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
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
MAX_REINITIALIZATIONS: Final = 2
"""Of scopes that the server has lost, in one call."""
MAX_MOVES: Final = 4
"""Redirections of one attempt."""


class HttpMetadataClient:
    """A client of protocol 2: maps pages to slots, on several scopes with each request.

    Safe for many threads. A request runs in the thread of its caller, and every operation ends by
    the call's deadline. Initializes scopes at their first use, and again when the server has lost
    them. Splits long requests and checks the shape of responses.

    Of several servers, all on one store, it uses one. A request that fails there goes to the next
    server, within the call's deadline and under the same idempotency key.

    `urls` is one address or several (a list, or separated by commas), `http://` or `https://`.
    Without `tls`, servers are verified by the system's authorities. Calls without a deadline have
    `timeout_seconds`. `on_failover` is called for each server that is left for another one; `rng`
    draws the order of servers, backoffs and pauses.

    Raises:
        ValueError: no address, or a malformed one.
        StorageUnavailableError: from any operation that has failed.
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
        self.owner = ""
        """Name of this client, for operators."""
        self._declared: dict[str, _Declared] = {}
        self._initialized = set[str]()
        self._lock = threading.Lock()
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
        """Description of the server in use, for logs."""
        return self._servers.describe()

    def refresh(self, call: Call) -> p.About:
        """Request the server's information and limits."""
        self._about = self.send("/v2", None, p.About, call)
        if self._about.protocol != p.PROTOCOL:
            raise MetadataError(
                f"{self.endpoint} speaks protocol {self._about.protocol!r}, not {p.PROTOCOL!r}"
            )
        return self._about

    def problem(self) -> str:
        """Request the reason that the server in use takes no changes; empty if it does."""
        return self._transport.problem(self._servers.first)

    def declare(
        self,
        geometry: p.ScopeGeometry,
        lease_seconds: float = 0.0,
        is_written: Callable[[], bool] = bool,
        model: str = "",
    ) -> None:
        """Declare a scope before its first operation. Sends nothing.

        Args:
            geometry: slots, bytes and identity, equal for all clients.
            lease_seconds: length of the leases of its slots.
            is_written: called when the scope is initialized; True if any client may have written
                into its slots. The server then gives no slot until unknown leases have ended.
            model: name of the model whose pages these are, for operators; sent once the server has
                the scope.
        """
        with self._lock:
            self._declared[geometry.scope] = _Declared(geometry, lease_seconds, is_written, model)

    def initialize(self, scopes: Sequence[str], call: Call) -> None:
        """Initialize declared scopes. Sends nothing for those that a server has already."""
        if not self._initialized.issuperset(scopes):
            self._initialize(scopes, call)

    def lookup(
        self, scopes: Sequence[p.LookupScope], call: Call, *, touch: bool = True
    ) -> list[p.FoundPages]:
        """Look up the slots of pages, for each scope."""
        request = p.Lookup(scopes=list(scopes), touch=touch)
        found = self._send_split("/v2/lookup", request, p.LookedUp, call)
        for columns, part in zip(found.scopes, scopes, strict=True):
            self._check_slots(part.scope, columns.slots)
        return found.scopes

    def reserve(
        self, scopes: Sequence[p.ReserveScope], call: Call, *, lease_seconds: float
    ) -> p.Leases:
        """Lease slots."""
        request = p.Reserve(scopes=list(scopes), owner=self.owner, lease_seconds=lease_seconds)
        leased = self._send_split("/v2/reserve", request, p.Leases, call)
        for columns, part in zip(leased.scopes, scopes, strict=True):
            self._check_slots(part.scope, columns.slots)
        return leased

    def commit(self, scopes: Sequence[p.CommitScope], call: Call) -> list[list[bool]]:
        """Make pages live. False for each lease that is not held any more."""
        return self._settle("/v2/commit", p.Commit(scopes=list(scopes)), call)

    def renew(
        self, scopes: Sequence[p.LeaseScope], call: Call, *, lease_seconds: float
    ) -> list[list[bool]]:
        """Renew leases from now on. False for each lease that is not held any more."""
        return self._settle(
            "/v2/renew", p.Renew(scopes=list(scopes), lease_seconds=lease_seconds), call
        )

    def abort(self, scopes: Sequence[p.LeaseScope]) -> None:
        """Give leases back, without waiting for the response: lost ones end by themselves."""
        request = p.Abort(scopes=[part for part in scopes if part.leases])
        if request.scopes:
            for _, chunk in chunks_of(request, self.about.limits):
                self.send_later("/v2/abort", chunk)

    def delete(self, scopes: Sequence[p.DeleteScope], call: Call) -> list[list[bool]]:
        """Delete pages. False for each key that was not live."""
        request = p.Delete(scopes=list(scopes), owner=self.owner)
        marked = self._send_split("/v2/delete", request, p.Marked, call)
        return [scope.done for scope in marked.scopes]

    def inspect(
        self, scope: str, call: Call, *, slots: Sequence[int] = (), keys: Sequence[str] = ()
    ) -> list[p.SlotStatus]:
        """Request the status of slots, or of the slots of keys."""
        limit, found = self.about.limits.keys, list[p.SlotStatus]()
        for start in range(0, max(len(slots), len(keys)), limit):
            some = slice(start, start + limit)
            request = p.Inspect(scope=scope, slots=list(slots[some]), keys=list(keys[some]))
            found += filter(
                None, self._with_scopes("/v2/inspect", request, [scope], p.Inspected, call).slots
            )
        return found

    def clear(self, scopes: Sequence[str], call: Call) -> None:
        """Delete all pages of scopes."""
        limit = self.about.limits.scopes
        for start in range(0, len(scopes), limit):
            some = list(scopes[start : start + limit])
            request = p.Clear(scopes=some, owner=self.owner)
            self._with_scopes("/v2/clear", request, some, p.Cleared, call)

    def removals(
        self, cursors: dict[str, str | None], call: Call
    ) -> Iterator[tuple[str, p.RemovedPages]]:
        """Yield removals behind cursors of scopes, which it moves, until none is left."""
        left = list(cursors)
        while left:
            some = left[: self.about.limits.scopes]
            left = left[len(some) :]
            asked = [p.RemovalCursor(scope=name, cursor=cursors[name]) for name in some]
            request = p.CollectRemovals(scopes=asked)
            answer = self._with_scopes("/v2/removals", request, some, p.CollectedRemovals, call)
            for name, part in zip(some, answer.scopes, strict=True):
                cursors[name] = part.cursor
                left += [name] * part.more
                yield name, part

    def drop(self, scopes: Sequence[str], call: Call) -> None:
        """Remove empty scopes. A scope that does not exist is no error.

        Raises:
            InUseError: a slot is live, leased or quarantined.
        """
        for scope in scopes:
            with suppress(UnknownScopeError):
                self.send("/v2/drop", p.Drop(scopes=[scope]), p.Dropped, call)
            with self._lock:
                self._initialized.discard(scope)

    def close(self) -> None:
        """Release connections and threads. Idempotent."""
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

    # Requests.

    def _settle(self, path: str, request: p.Commit | p.Renew, call: Call) -> list[list[bool]]:
        settled = self._send_split(path, request, p.SettledLeases, call)
        return [[state is p.Settled.DONE for state in scope.states] for scope in settled.scopes]

    def _send_split(self, path: str, request: Any, response_type: type[A], call: Call) -> A:
        """Send a request in chunks that are within the limits; returns the response as if one
        request had been sent."""
        done = list[tuple[int, Any, A]]()
        for number, chunk in chunks_of(request, self.about.limits):
            scopes = [part.scope for part in chunk.scopes]
            response = self._with_scopes(path, chunk, scopes, response_type, call)
            check_shape(chunk, response)
            done.append((number, chunk, response))
        return done[0][2] if len(done) == 1 else joined(done)

    def _with_scopes(
        self,
        path: str,
        request: p.Request,
        scopes: Sequence[str],
        response_type: type[A],
        call: Call,
    ) -> A:
        self.initialize(scopes, call)
        # Bounded: servers with separate stores would send a client back and forth for ever.
        for _ in range(MAX_REINITIALIZATIONS):
            try:
                return self.send(path, request, response_type, call)
            except UnknownScopeError:
                logger.warning(
                    "metadata server %s does not know a scope any more: has it lost its state? If "
                    "there are several servers, are they one store?",
                    self.endpoint,
                )
                # It may have other limits now, too.
                with self._lock:
                    self._initialized.clear()
                self.refresh(call)
                self._initialize(scopes, call)
        return self.send(path, request, response_type, call)

    def _initialize(self, scopes: Iterable[str], call: Call) -> None:
        with self._lock:
            wanted = [
                self._declared[name]
                for name in dict.fromkeys(scopes)
                if name not in self._initialized
            ]
        # Without the lock: two threads may initialize a scope at once, which does no harm, and no
        # thread waits for the request of another.
        if wanted:
            geometries = [one.geometry for one in wanted]
            earlier = [
                one.lease_seconds if one.was_initialized or one.is_written() else 0.0
                for one in wanted
            ]
            request = p.Initialize(scopes=geometries, earlier_lease_seconds=earlier)
            self.send("/v2/initialize", request, p.Initialized, call)
            with self._lock:
                self._initialized.update(geometry.scope for geometry in geometries)
                self._declared |= {
                    one.geometry.scope: one._replace(was_initialized=True) for one in wanted
                }
            for one in (one for one in wanted if one.model):
                described = p.Describe(scope=one.geometry.scope, model=one.model)
                # No page depends on it.
                with suppress(MetadataError):
                    self.send_later("/v2/describe", described)

    def _check_slots(self, scope: str, slots: Sequence[int]) -> None:
        if slots and not -1 <= min(slots) <= max(slots) < self._declared[scope].geometry.slots:
            raise MetadataError(f"the metadata server names a slot outside of scope {scope!r}")

    def send(self, path: str, request: p.Request | None, response_type: type[A], call: Call) -> A:
        """Send one request that is within the limits. A change is made once, despite retries."""
        left = call.remaining()
        seconds = self._timeout_seconds if left is None else left
        try:
            return self._request(path, request, response_type, time.monotonic() + seconds)
        except TimeoutError as error:
            message = f"the metadata server {self.endpoint} has not answered within {seconds:.3g} s"
            raise StorageTimeoutError(message) from error

    def send_later(self, path: str, request: p.Request) -> None:
        """Send a request without waiting for its response. The request may be lost."""
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
        if plan.seeks_owner:
            self._owners[pending.scope] = server
        return response


class _Declared(NamedTuple):
    """A declared scope."""

    geometry: p.ScopeGeometry
    lease_seconds: float
    is_written: Callable[[], bool]
    model: str = ""
    was_initialized: bool = False
    """A server has known the scope, so other clients may have written into it since."""


def _scope_of(request: p.Request | None) -> str:
    """The first scope that a request names; empty for none."""
    named = getattr(request, "scopes", None) or [getattr(request, "scope", "")]
    first: str = getattr(named[0], "scope", named[0])
    return first
