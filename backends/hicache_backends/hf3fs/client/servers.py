"""Several metadata servers on one store: which of them a request asks, and when one that has failed is asked again."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from yarl import URL

from hicache_backends.hf3fs.client.failures import BusyError, DrainingError, SilentError
from hicache_metadata_server import protocol as p

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Sequence

    from hicache_backends.hf3fs.client.failures import MetadataError

logger = logging.getLogger(__name__)

ATTEMPTS: Final = 3
"""Of a request at one server, each with the same idempotency key; every further server makes one more."""
ATTEMPT_SECONDS: Final = 2.0
"""A server that was restarted is asked again, though the one before it does not answer any more."""
LEAST_PATIENCE_SECONDS: Final = 0.25
"""A server that has said nothing for so long may be taken for hanging. One that shared two cores with eight busy clients and more
answered half of its lookups in 2 ms, and all but one in a thousand in 234 ms."""
FIRST_REST_SECONDS: Final = 0.25
LONGEST_REST_SECONDS: Final = 16.0
MOST_DOUBLINGS: Final = 10
"""A server that is away for a day fails thousands of times."""


class Server:
    """One address, and how it fares. Changed by the client's thread alone, but for `silent_since`, which whoever asks sets."""

    __slots__ = ("failures", "left", "resting", "rests_until", "routes", "silent_since", "url", "watcher")

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.routes = {path: (route.method, URL(self.url + path)) for path, route in p.ROUTES.items()}
        self.failures = 0
        """Since a request was last answered."""
        self.resting = False
        """It has failed, and is asked by its watcher alone while there is another one."""
        self.rests_until = 0.0
        self.left = False
        """The log says that it was left, and is to say when it is back."""
        self.silent_since: float | None = None
        """When the first request began since it has last said anything."""
        self.watcher: asyncio.Task[None] | None = None

    @property
    def is_well(self) -> bool:
        """It has answered the last request, and is not resting."""
        return not self.failures and not self.resting


class Servers:
    """The servers that one client knows, in an order of its own, so that many clients are spread over them.

    A client stays with the first of its order that is well. One that fails rests, for a time that doubles with each failure in a
    row and is drawn, so that many clients do not come back at once; then it is asked whether it is ready, beside the requests,
    and nobody's request waits for that. A server that is alone never rests.

    Args:
        urls: at least one.
        chance: draws the order and the times.
        is_ready: asks one server whether it serves; false for whatever goes wrong.
        left: told of each server that is left for another one.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        chance: random.Random,
        is_ready: Callable[[Server], Awaitable[bool]],
        left: Callable[[], None],
    ) -> None:
        self._all = [Server(url) for url in urls]
        chance.shuffle(self._all)
        self._chance, self._is_ready, self._left = chance, is_ready, left
        self._closed = False

    def __len__(self) -> int:
        return len(self._all)

    @property
    def first(self) -> Server:
        """The one that the next request asks first."""
        return next((server for server in self._all if not server.resting), None) or min(self._all, key=_end_of_rest)

    def after(self, asked: Sequence[Server]) -> Server | None:
        """The next one for a request that has asked some: one that is well, or else that has rested longest; None after all."""
        others = [server for server in self._all if server not in asked]
        return next((server for server in others if not server.resting), None) or min(others, key=_end_of_rest, default=None)

    def tour(self) -> Tour:
        """The way of one request."""
        return Tour(self)

    def describe(self) -> str:
        """Which server is used, and how many are away."""
        away = sum(server.resting for server in self._all)
        return f"{self.first.url}, {away} of {len(self._all)} servers away" if away else self.first.url

    def serves(self, server: Server) -> None:
        """A request was answered."""
        server.failures = 0
        if server.resting:
            self._well(server)
        if server.watcher is not None:
            server.watcher.cancel()
            server.watcher = None

    def is_silent(self, server: Server) -> None:
        """A request to a server was given up: too long without a word, and it has failed."""
        if server.silent_since is not None and time.monotonic() - server.silent_since >= LEAST_PATIENCE_SECONDS:
            self.fails(server, "it does not answer")

    def fails(self, server: Server, why: object) -> None:
        """Let a server rest."""
        if server.resting or len(self._all) == 1 or self._closed:
            return
        self._rest(server)
        server.resting = True
        server.watcher = asyncio.get_running_loop().create_task(self._watch(server))
        if not self.first.resting:
            server.left = True
            self._left()
            logger.warning("metadata server %s is left for %s: %s", server.url, self.first.url, why)

    def close(self) -> None:
        """Watch no more; from now on no server rests."""
        self._closed = True
        for server in self._all:
            if server.watcher is not None:
                server.watcher.cancel()
                server.watcher = None

    def _rest(self, server: Server) -> None:
        longest = min(LONGEST_REST_SECONDS, FIRST_REST_SECONDS * 2 ** min(server.failures, MOST_DOUBLINGS))
        server.failures += 1
        server.rests_until = time.monotonic() + self._chance.uniform(longest / 2, longest)

    async def _watch(self, server: Server) -> None:
        while server.resting:
            await asyncio.sleep(server.rests_until - time.monotonic())
            if await self._is_ready(server):
                # What it did wrong before is forgotten with the first request that it answers.
                self._well(server)
            else:
                self._rest(server)
        server.watcher = None

    def _well(self, server: Server) -> None:
        server.resting, server.silent_since = False, None
        if server.left:
            server.left = False
            logger.info("metadata server %s serves again", server.url)


class Tour:
    """The servers that one request asks, one after another."""

    __slots__ = ("_all_asked", "_asked", "_attempts", "_now", "_servers", "waits")

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._now = servers.first
        self._asked = list[Server]()
        self._attempts = 1
        self._all_asked = False
        self.waits = False
        """Whether the next attempt is at a server that has been asked before, and comes after a pause."""

    @property
    def server(self) -> Server:
        """Whose turn it is."""
        return self._now

    def patience(self, left: float) -> float:
        """Seconds that this attempt may take of those that are left: an equal share for each server that was not asked yet.

        The last one may take all; the call's deadline ends it.
        """
        not_asked = len(self._servers) - len(self._asked)
        if not_asked <= 1:
            return ATTEMPT_SECONDS
        return min(ATTEMPT_SECONDS, max(LEAST_PATIENCE_SECONDS, left / not_asked))

    def goes_on(self, error: MetadataError) -> bool:
        """Take note of how an attempt has ended, and turn to the next server; whether there is to be another attempt."""
        if self._attempts == ATTEMPTS + len(self._servers) - 1:
            self._blame(error)
            return False
        self._attempts += 1
        if isinstance(error, BusyError):
            self.waits = True
            return True
        self._blame(error)
        if self._now not in self._asked:
            self._asked.append(self._now)
        following = self._servers.after(self._asked)
        if following is None:
            # All once more, but not at once.
            self._all_asked, self._asked = True, [self._now]
            following = self._servers.after(self._asked) or self._now
        if self._all_asked and isinstance(error, DrainingError):
            return False
        self._now, self.waits = following, self._all_asked
        return True

    def _blame(self, error: MetadataError) -> None:
        if isinstance(error, SilentError):
            self._servers.is_silent(self._now)
        elif not isinstance(error, BusyError):
            self._servers.fails(self._now, error)


def _end_of_rest(server: Server) -> float:
    return server.rests_until
