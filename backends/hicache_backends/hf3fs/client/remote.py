"""Metadata servers somewhere in the network, spoken to by event loops behind a synchronous face."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
from multidict import CIMultiDict

from hicache_backends.hf3fs.client.addresses import addresses
from hicache_backends.hf3fs.client.callers_loop import CallersLoop
from hicache_backends.hf3fs.client.directory import Directory
from hicache_backends.hf3fs.client.failures import DrainingError, MetadataError, PassingError, UnknownScopeError
from hicache_backends.hf3fs.client.loop_thread import LoopThread
from hicache_backends.hf3fs.client.servers import Servers
from hicache_backends.hf3fs.client.tracing import name, spanned
from hicache_backends.hf3fs.client.web import Errand, Web
from hicache_metadata_server import protocol as p
from hicache_storage.spec import StorageTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from ssl import SSLContext

    from hicache_backends.hf3fs.client.servers import Server, Tour
    from hicache_storage.objects import Call

A = TypeVar("A", bound=p.Answer)
T = TypeVar("T")

logger = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 0.02
"""Before a server is asked a second time, at most; doubled for each further one."""
LONGEST_PAUSE_SECONDS: Final = 0.2
CLOSE_SECONDS: Final = 2.0
LATER_SECONDS: Final = 2.0
"""How long a request may take that nobody waits for."""
INITIALIZE: Final = "/v2/initialize"


class RemoteDirectory(Directory):
    """A client of the native part. Its thread starts with the first request and ends with `close`.

    Of several servers, all on one store, it uses one. A request that this one does not answer goes to the next, within the
    call's deadline and under the same idempotency key.

    The first attempt at a server that is well is made by the calling thread, if no other one is at it; everything else is done
    by the client's thread.

    Args:
        urls: of the server, or of several (a list, or separated by commas), `http://` or `https://`.
        token: bearer token, "" for none.
        timeout_seconds: for calls that have no deadline.
        left: told of each server that is left for another one, in the client's thread.
        chance: draws which server is used, and pauses.
        tls: what is asked of a server at `https://`, and shown to it; by default the system's authorities, and nothing.

    Raises:
        ValueError: there is no address, or one is none.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        token: str = "",
        *,
        timeout_seconds: float = 10.0,
        tls: SSLContext | None = None,
        left: Callable[[], None] = lambda: None,
        chance: random.Random | None = None,
    ) -> None:
        super().__init__()
        self._chance = chance or random.Random()
        self._web = Web(tls)
        self._servers = Servers(addresses(urls), chance=self._chance, is_ready=self._web.is_ready, left=left)
        headers = {"Content-Type": p.MSGPACK, "Accept": p.MSGPACK, "Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        # What aiohttp makes of any other mapping, for each request.
        self._headers = CIMultiDict(headers)
        self._timeout_seconds = timeout_seconds
        self._callers = CallersLoop(Web(tls))
        self._thread = LoopThread("hicache-metadata-client", end=self._end, after=lambda: self._callers.close(CLOSE_SECONDS))
        self._about: p.About | None = None
        self._made_at = ""
        """Server that has made scopes last."""

    @property
    def about(self) -> p.About:
        """What the server has said of itself; a client that has not asked yet is told to `refresh`."""
        if self._about is None:
            raise MetadataError(f"the metadata server {self.where} has not answered yet")
        return self._about

    @property
    def where(self) -> str:
        return self._servers.describe()

    def refresh(self, call: Call) -> p.About:
        self._about = self._wait("/v2", None, p.About, call)
        if self._about.protocol != p.PROTOCOL:
            raise MetadataError(f"{self.where} speaks protocol {self._about.protocol!r}, not {p.PROTOCOL!r}")
        return self._about

    def send(self, path: str, request: p.Request, kind: type[A], call: Call) -> A:
        return self._wait(path, request, kind, call)

    def send_later(self, path: str, request: p.Request) -> None:
        self._thread.post(self._unheard(path, request))

    def close(self) -> None:
        self._thread.close()

    # In the caller's thread.

    def _wait(self, path: str, request: p.Request | None, kind: type[T], call: Call) -> T:
        left = call.remaining()
        seconds = self._timeout_seconds if left is None else left
        until = time.monotonic() + seconds
        # It is what closes the callers' connections.
        self._thread.start()
        try:
            with spanned(path):
                errand, tour, error = self._errand(path, request, kind), self._servers.tour(), None
                if tour.server.is_well and self._callers.is_free():
                    try:
                        return self._callers.run(lambda web: self._attempt(web, errand, tour, seconds))
                    except (PassingError, DrainingError) as failure:
                        error = failure
                rest = max(0.0, until - time.monotonic())
                return self._thread.run(self._request(errand, tour, until, error), rest)
        except asyncio.CancelledError as error:
            raise MetadataError("the client of the metadata server was closed meanwhile") from error
        except TimeoutError as error:
            raise StorageTimeoutError(f"the metadata server {self.where} has not answered within {seconds:.3g} s") from error

    def _errand(self, path: str, request: p.Request | None, kind: type[T]) -> Errand[T]:
        headers = self._headers.copy()
        name(headers)
        if p.ROUTES[path].changes:
            headers[p.IDEMPOTENCY_HEADER] = secrets.token_hex(16)
        return Errand(path, headers, None if request is None else msgspec.msgpack.encode(request), kind)

    # In whichever thread runs the event loop.

    async def _attempt(self, web: Web, errand: Errand[T], tour: Tour, left: float) -> T:
        server = tour.server
        try:
            answer = await web.ask(server, errand, min(left, tour.patience(left)))
        except UnknownScopeError:
            self._ask_whether_one_store(server)
            raise
        if errand.path == INITIALIZE:
            self._made_at = server.url
        return answer

    def _ask_whether_one_store(self, server: Server) -> None:
        """Say what cannot be told from a store that has lost its memory: that these servers have a store each."""
        if self._made_at not in ("", server.url):
            logger.warning(
                "metadata server %s does not know the scopes that %s has made: are they one store?", server.url, self._made_at
            )

    # In the client's thread.

    async def _request(self, errand: Errand[T], tour: Tour, until: float, error: MetadataError | None) -> T:
        """Ask one server after another.

        Args:
            error: how a first attempt has ended.
        """
        longest = PAUSE_SECONDS
        while True:
            left = until - time.monotonic()
            if error is not None:
                if not tour.goes_on(error) and left > 0:
                    raise error
                if tour.waits and left > 0:
                    await asyncio.sleep(min(left, self._chance.uniform(0, longest)))
                    longest = min(2 * longest, LONGEST_PAUSE_SECONDS)
                    left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError
            server = tour.server
            try:
                answer = await self._attempt(self._web, errand, tour, left)
            except (PassingError, DrainingError) as failure:
                error = failure
            except asyncio.CancelledError:
                self._servers.is_silent(server)
                raise
            else:
                if server.failures:
                    self._servers.serves(server)
                return answer

    async def _unheard(self, path: str, request: p.Request) -> None:
        with spanned(path):
            errand = self._errand(path, request, p.Answer)
            try:
                await self._request(errand, self._servers.tour(), time.monotonic() + LATER_SECONDS, None)
            except (MetadataError, TimeoutError):
                return

    async def _end(self) -> None:
        """Let those finish that nobody waits for, for a moment; then end what is left, and the connections."""
        self._servers.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._web.close()
