"""HTTP/1.1 as uvicorn speaks it, with a short way for the protocol's own requests: no task, no
messages, one system call an answer."""

from __future__ import annotations

import asyncio
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.http.asgi import Asked, Front, headers_of
from hicache_metadata_server.http.handlers import Started

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

    from hicache_metadata_server.http.handlers import Said

_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


class DirectProtocol(HttpToolsProtocol):
    """Of one connection.

    What is whole with its head and body and about a known path is answered from here, at once or
    when its changes are written. Everything else (pages, refusals by the head, chunked bodies,
    requests sent before the last was answered) goes uvicorn's way.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Put the joining in between, for what goes uvicorn's way."""
        self._joined = _Joined(transport)
        super().connection_made(cast("asyncio.Transport", self._joined))
        self._front = self.app if isinstance(self.app, Front) else None
        self._exchange: _Exchange | None = None
        """The last request, if it went the short way."""

    def on_message_begin(self) -> None:
        """A request begins; what uvicorn needs of it is made when it goes uvicorn's way."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        """Choose the way."""
        self._exchange = self._short_way()
        if self._exchange is not None:
            self.cycle = cast("RequestResponseCycle", self._exchange)
            return
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.headers += headers
        self.url, self.expect_100_continue = url, expects
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Some of the body."""
        if self._exchange is not None:
            self._exchange.parts.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        if self._exchange is not None:
            self._answer(self._exchange)
        else:
            super().on_message_complete()

    def _short_way(self) -> _Exchange | None:
        front, last = self._front, cast("RequestResponseCycle | None", self.cycle)
        # Of a connection that is there, it is there; uvicorn forgets it with the connection.
        parser, busy = cast("Any", self.parser), last is not None and not last.response_complete
        if (
            front is None
            or busy
            or self.expect_100_continue
            or self.flow.write_paused
            or parser.should_upgrade()
        ):
            return None
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > front.max_body or b"transfer-encoding" in headers:
            return None
        try:
            # One with a query or an escape is no path that is known.
            asked = front.asked(
                self.url.decode("latin-1"), parser.get_method().decode("ascii"), headers
            )
        except RequestError:
            return None
        return _Exchange(asked, parser.should_keep_alive() and parser.get_http_version() != "1.0")

    def _answer(self, exchange: _Exchange) -> None:
        front = self._front
        assert front is not None, "an exchange is with it"
        parts, exchange.begin = exchange.parts, perf_counter()
        body = exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        started = front.start(exchange.asked, body)
        if not isinstance(started, Started):
            task = self.loop.create_task(self._answer_in_turns(front, exchange, started))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
            return
        said, changes = started
        written = front.join() if changes else None
        if written is None:
            self._tell(front, exchange, said)
        else:
            written.add_done_callback(partial(self._tell_written, front, exchange, said))

    async def _answer_in_turns(
        self, front: Front, exchange: _Exchange, answer: Coroutine[Any, Any, Said]
    ) -> None:
        self._tell(front, exchange, await answer)

    def _tell_written(
        self, front: Front, exchange: _Exchange, said: Said, written: asyncio.Future[None]
    ) -> None:
        error = written.exception()
        self._tell(
            front, exchange, said if error is None else front.unwritten(exchange.asked, error)
        )

    def _tell(self, front: Front, exchange: _Exchange, said: Said) -> None:
        front.count(exchange.asked, said, exchange.begin, self.client, exchange.body)
        exchange.response_complete = True
        # The client may have gone away meanwhile.
        if exchange.disconnected or self.transport.is_closing():
            return
        headers = headers_of(said, exchange.asked.request_id)
        ends = not exchange.keep_alive or said.ends_connection
        if not exchange.keep_alive and not said.ends_connection:
            headers.append((b"connection", b"close"))
        head = b"".join([b"%b: %b\r\n" % header for header in headers])
        self._joined.write_now(b"%b%b\r\n%b" % (_STATUS_LINES[said.status], head, said.body))
        if ends:
            self.transport.close()
        self.on_response_complete()


class _Exchange:
    """A request that goes the short way, with what uvicorn asks of any: whether it is answered, and
    whether the connection stays."""

    __slots__ = (
        "asked",
        "begin",
        "body",
        "disconnected",
        "keep_alive",
        "message_event",
        "parts",
        "response_complete",
    )

    def __init__(self, asked: Asked, keep_alive: bool) -> None:
        self.asked, self.keep_alive = asked, keep_alive
        self.parts: list[bytes] = []
        self.body = b""
        self.begin = 0.0
        self.disconnected = self.response_complete = False
        self.message_event = _NOBODY_WAITS


class _NobodyWaits:
    """For uvicorn, which tells of a lost connection by an event that here nobody waits for."""

    def set(self) -> None:
        pass


_NOBODY_WAITS: Final = _NobodyWaits()


class _Joined:
    """A transport that sends at the end of the event loop's turn what was written in it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self.is_closing = transport.is_closing
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send it soon, with what follows at once."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def write_now(self, data: bytes) -> None:
        """Send it, behind what was to be sent."""
        if self._parts:
            self._send()
        self._transport.write(data)

    def close(self) -> None:
        """Send what is left, and close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts, self._parts = self._parts, []
        # The client may have gone away in the same turn.
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))
