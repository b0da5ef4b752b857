"""Failover between metadata servers on one store: addresses, attempt plan, backoff and probes."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from hicache_metadata_server.client.errors import (
    BusyError,
    DrainingError,
    NoOwnerError,
    NoResponseError,
)

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from hicache_metadata_server.client.errors import MetadataError

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""Attempts of a request at one server; each further server adds one."""
MAX_ATTEMPT_SECONDS: Final = 2.0
"""A restarted server gets a further attempt, even if the attempt before the restart never ends."""
MIN_ATTEMPT_SECONDS: Final = 0.25
"""A server that has been silent for so long counts as failed. A server that shared two cores with
eight busy clients answered half of its lookups in 2 ms, and 99.9 % of them within 234 ms."""
FIRST_BACKOFF_SECONDS: Final = 0.25
MAX_BACKOFF_SECONDS: Final = 16.0
OWNER_SECONDS: Final = 4.0
"""A lease, and the time in which the other servers notice its end."""
MAX_SERVERS: Final = 64
MAX_DOUBLINGS: Final = 10
"""Bound of the exponent: a server that is down for a day fails thousands of times."""


@dataclass(slots=True, eq=False)
class ServerEndpoint:
    """One address and its state.

    `ServerPool` changes it, under its lock. The exception is `silent_since`, which the thread of
    a request sets.
    """

    url: str
    failures: int = 0
    """Failures since the last answered request."""
    in_backoff: bool = False
    """The server has failed. Only its probe asks it, unless no other server is healthy."""
    failed_at: float = 0.0
    was_silent: bool = False
    """The last failure was no response, which costs a request an attempt's time."""
    failed_over: bool = False
    """The failover was logged, so the return is logged too."""
    silent_since: float | None = None
    """Start of the first request since the last response."""
    probe: threading.Timer | None = None

    @property
    def may_own(self) -> bool:
        """True if it is worth asking where another server names it as an owner.

        A server that is down is named for a lease more. One that refused or reset connections
        refuses at once if it still does.
        """
        is_old = time.monotonic() - self.failed_at > OWNER_SECONDS
        return not self.in_backoff or not self.was_silent or is_old


class ServerPool:
    """The servers of one client, in an order of its own, so that clients spread over servers.

    A client uses the first healthy server of its order. A server that fails is in backoff. The
    backoff doubles with each failure in a row and is drawn, so that clients do not return at once.
    After it a thread probes the server, beside the requests. A single server is never in backoff.

    `rng` draws the order and the backoffs. `problem_of` asks one server why it is not ready, and
    returns "" if it is. `on_failover` is called for each server that is left for another one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        rng: random.Random,
        problem_of: Callable[[ServerEndpoint], str],
        on_failover: Callable[[], None],
    ) -> None:
        self._all = [ServerEndpoint(url) for url in urls]
        # Drawn once: a client that changed servers at each request would find no warm connection.
        rng.shuffle(self._all)
        self._rng = rng
        self._problem_of = problem_of
        self._on_failover = on_failover
        self._lock = threading.RLock()
        self._closed = False

    def __len__(self) -> int:
        return len(self._all)

    @property
    def first(self) -> ServerEndpoint:
        """The server of the next request's first attempt."""
        return self.after(()) or self._all[0]

    def after(self, asked: Sequence[ServerEndpoint]) -> ServerEndpoint | None:
        """The next server for a request that has asked some; None if it has asked all.

        Servers in backoff come last.
        """
        others = [server for server in self._all if server not in asked]
        return min(others, key=lambda server: server.in_backoff, default=None)

    def plan(self, owner: ServerEndpoint | None = None) -> AttemptPlan:
        """An attempt plan for one request, which begins with the owner of its scopes."""
        return AttemptPlan(self, self.first if owner is None or owner.in_backoff else owner)

    def at(self, url: str) -> ServerEndpoint:
        """The server at an address. An owner may be a server that the client was not told of."""
        with self._lock:
            for server in self._all:
                if server.url == url:
                    return server
            found = ServerEndpoint(url)
            # Bounded: the address comes from a server.
            if len(self._all) < MAX_SERVERS:
                self._all.append(found)
            return found

    def describe(self) -> str:
        """The server in use, and the number of servers in backoff."""
        away = sum(server.in_backoff for server in self._all)
        return (
            f"{self.first.url}, {away} of {len(self._all)} servers away" if away else self.first.url
        )

    def record_success(self, server: ServerEndpoint) -> None:
        """Reset a server's failures and end its backoff, after an answered request."""
        with self._lock:
            server.failures = 0
            if server.in_backoff:
                self._end_backoff(server)
            if server.probe is not None:
                server.probe.cancel()
                server.probe = None

    def record_timeout(self, server: ServerEndpoint) -> None:
        """Record a request without response: a failure if all requests have been silent for
        long."""
        silent_since = server.silent_since
        # One short deadline says nothing about the server; silence over several requests does.
        if silent_since is not None and time.monotonic() - silent_since >= MIN_ATTEMPT_SECONDS:
            self.record_failure(server, NoResponseError("it does not answer"))

    def record_failure(self, server: ServerEndpoint, reason: object) -> None:
        """Put a server in backoff and start its probe."""
        with self._lock:
            server.failed_at = time.monotonic()
            server.was_silent = isinstance(reason, NoResponseError)
            if server.in_backoff or len(self._all) == 1 or self._closed:
                return
            if not self._begin_backoff(server) or self.first.in_backoff:
                return
            server.failed_over = True
        self._on_failover()
        logger.warning("metadata server %s is left for %s: %s", server.url, self.first.url, reason)

    def close(self) -> None:
        """End all probes. From now on no server goes into backoff."""
        with self._lock:
            self._closed = True
            probes = [server.probe for server in self._all if server.probe is not None]
        for probe in probes:
            probe.cancel()
            probe.join()

    def _begin_backoff(self, server: ServerEndpoint) -> bool:
        """Put a server in backoff; False if no thread can be started to end it."""
        doubled = FIRST_BACKOFF_SECONDS * 2 ** min(server.failures, MAX_DOUBLINGS)
        bound = min(MAX_BACKOFF_SECONDS, doubled)
        server.failures += 1
        # Drawn, so that clients that failed together do not probe together.
        seconds = self._rng.uniform(bound / 2, bound)
        server.probe = threading.Timer(seconds, self._probe, (server,))
        server.probe.name = "hicache-metadata-probe"
        server.probe.daemon = True
        try:
            server.probe.start()
            server.in_backoff = True
        except RuntimeError:
            server.probe = None
            server.in_backoff = False
        return server.in_backoff

    def _probe(self, server: ServerEndpoint) -> None:
        is_ready = not self._problem_of(server)
        with self._lock:
            if not server.in_backoff or self._closed:
                return
            if is_ready:
                # `failures` stays until a request is answered: a server that answers probes only
                # must not get short backoffs again.
                server.probe = None
                self._end_backoff(server)
            else:
                self._begin_backoff(server)

    def _end_backoff(self, server: ServerEndpoint) -> None:
        server.in_backoff = False
        server.silent_since = None
        if server.failed_over:
            server.failed_over = False
            logger.info("metadata server %s serves again", server.url)


class AttemptPlan:
    """Order and timeouts of one request's attempts."""

    def __init__(self, servers: ServerPool, first: ServerEndpoint) -> None:
        self._servers = servers
        self.server = first
        """The server of the current attempt, which may go on at the owner of the scopes."""
        self._asked = list[ServerEndpoint]()
        self._attempts = 1
        self._all_asked = False
        self.needs_pause = False
        """The next attempt is at a server that was asked before, and follows a pause."""
        self.seeks_owner = False
        """A server has refused that is not, or not any more, the owner of the scopes. One that is
        cut off from the store cannot name the new owner."""

    def timeout(self, left: float) -> float:
        """Seconds for the current attempt: an equal share of `left` for each server not asked yet.

        The last server may use the maximum; the call's deadline ends it.
        """
        not_asked = len(self._servers) - len(self._asked)
        if not_asked <= 1:
            return MAX_ATTEMPT_SECONDS
        return min(MAX_ATTEMPT_SECONDS, max(MIN_ATTEMPT_SECONDS, left / not_asked))

    def advance(self, error: MetadataError) -> bool:
        """Record a failed attempt and select the next server. False if no attempt is left."""
        if self._attempts == ATTEMPTS + len(self._servers) - 1:
            self._record(error)
            return False
        self._attempts += 1
        if isinstance(error, BusyError):
            # Every server of the store would refuse alike, so there is no reason to change.
            self.needs_pause = True
            return True
        self._record(error)
        if self.server not in self._asked:
            self._asked.append(self.server)
        following = self._servers.after(self._asked)
        if following is None:
            # A second round, after a pause, that does not begin with the server that failed last.
            self._all_asked = True
            self._asked = [self.server]
            following = self._servers.after(self._asked) or self.server
        if self._all_asked and isinstance(error, DrainingError):
            return False
        self.server = following
        self.seeks_owner = self.seeks_owner or isinstance(error, NoOwnerError)
        # Owners change within seconds, not at once.
        self.needs_pause = self._all_asked or self.seeks_owner
        return True

    def _record(self, error: MetadataError) -> None:
        if isinstance(error, NoResponseError):
            self._servers.record_timeout(self.server)
        # A server whose store takes no changes answers lookups.
        elif not isinstance(error, (BusyError, NoOwnerError)):
            self._servers.record_failure(self.server, error)


def addresses(given: str | Sequence[str]) -> tuple[str, ...]:
    """Parse one address, several separated by commas, or a list.

    Raises:
        ValueError: no address, or one that is malformed or repeated; the message names it.
    """
    urls = tuple(
        url.strip().rstrip("/") for url in (given.split(",") if isinstance(given, str) else given)
    )
    if not urls:
        raise ValueError("an empty list names no server")
    for url in urls:
        # Before any other message, which would print the password.
        if "@" in url:
            raise ValueError(
                f"{url.rpartition('@')[2]!r} is given with a user; servers take tokens"
            )
        if not _is_address(url):
            raise ValueError(f"{url!r} is no http or https address")
        if urls.count(url) > 1:
            raise ValueError(f"{url!r} is named twice")
    return urls


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        # `urlsplit` checks the port only when it is read.
        _ = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)
