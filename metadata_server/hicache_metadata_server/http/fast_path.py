"""Fast path of the protocol's requests: a subclass of uvicorn's HTTP/1.1 protocol.

It answers from uvicorn's parser callbacks, without a task, ASGI messages or a second system call
for the body. `server.py` uses plain uvicorn where `missing_internals` finds that an internal
attribute of uvicorn, on which this module relies, is missing.
"""

# Relying on uvicorn's internals is a burden, and is worth it only while it brings 1.25x or more in
# the same run. Lookups, most of a cache's requests: 1.33x to 1.49x calls a second of plain uvicorn;
# writes, which wait for their commit: 1.09x (docs/metadata-server.md, "Measured"; run
# benchmarks/http_fast_path.py after an update of uvicorn). If lookups gain less one day, delete
# this module: `ProtocolApp` answers the same requests without it.

from __future__ import annotations

import asyncio
import inspect
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, cast

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.http.asgi import ProtocolApp, RequestHead, response_headers
from hicache_metadata_server.http.connections import BoundedProtocol
from hicache_metadata_server.http.handlers import Result

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable

    from hicache_metadata_server.http.handlers import Response

INTERNALS: Final[tuple[tuple[type, tuple[str, ...]], ...]] = (
    (
        HttpToolsProtocol,
        (
            "app",
            "client",
            "cycle",
            "expect_100_continue",
            "flow",
            "headers",
            "loop",
            "on_response_complete",
            "parser",
            "tasks",
            "transport",
            "url",
        ),
    ),
    (
        RequestResponseCycle,
        ("disconnected", "keep_alive", "message_event", "response_complete"),
    ),
    (FlowControl, ("write_paused",)),
)
"""Internal attributes of uvicorn that this module reads or sets, by class."""
_OVERRIDDEN: Final = (
    "connection_made",
    "on_message_begin",
    "on_headers_complete",
    "on_body",
    "on_message_complete",
)
_STATUS_LINES: Final = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus
}


def missing_internals() -> list[str]:
    """List the internals that this module needs and the installed uvicorn lacks."""
    missing = [name for name in _OVERRIDDEN if not hasattr(HttpToolsProtocol, name)]
    # Most of them are set in `__init__` only, so that the class itself does not have them: an
    # attribute counts as present if any method of the class mentions it.
    for kind, names in INTERNALS:
        mentioned = set(_names_in_methods(kind))
        missing += [f"{kind.__name__}.{name}" for name in names if name not in mentioned]
    return missing


def _names_in_methods(kind: type) -> Iterable[str]:
    for name, member in vars(kind).items():
        yield name
        method = member.fget if isinstance(member, property) else member
        if inspect.isfunction(method):
            yield from method.__code__.co_names


class FastPathProtocol(BoundedProtocol):
    """HTTP/1.1 protocol of one connection.

    A request takes the fast path if its path is known, and its length announced and within the
    limit. Pages, refusals by the head, chunked bodies and requests pipelined behind an unanswered
    one take uvicorn's own path, on the same connection.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Wrap the transport, so that uvicorn's own responses take one write too."""
        self._coalescer = _WriteCoalescer(transport)
        super().connection_made(cast("asyncio.Transport", self._coalescer))
        self._protocol_app = self.app if isinstance(self.app, ProtocolApp) else None
        self._exchange: _Exchange | None = None
        """The last request, if it took the fast path."""

    def on_message_begin(self) -> None:
        """Reset the request; uvicorn's part of it follows in `on_headers_complete`."""
        # Not `super()`: uvicorn builds its ASGI scope there, which the fast path does not need.
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self.is_partial = True

    def on_headers_complete(self) -> None:
        """Choose the path of the request."""
        self._exchange = self._new_exchange()
        if self._exchange is not None:
            # uvicorn looks at `cycle` to see whether the connection is busy or idle: when it shuts
            # down, when a client disconnects, and when the next request arrives.
            self.cycle = cast("RequestResponseCycle", self._exchange)
            return
        # uvicorn's own start of a request empties these; they were parsed already.
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        # In place: the ASGI scope has a reference to uvicorn's list.
        self.headers += headers
        self.url = url
        self.expect_100_continue = expects
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Collect a part of the body."""
        if self._exchange is not None:
            self._exchange.parts.append(body)
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Answer the request, which is complete."""
        if self._exchange is not None:
            self.is_partial = False
            self._answer(self._exchange)
        else:
            super().on_message_complete()

    def _new_exchange(self) -> _Exchange | None:
        """The exchange of a request that takes the fast path, or None."""
        app, last = self._protocol_app, cast("RequestResponseCycle | None", self.cycle)
        # uvicorn sets the parser to None, but only when the connection is lost.
        parser, busy = cast("Any", self.parser), last is not None and not last.response_complete
        # Responses have to leave in the order of their requests: behind one that is not answered
        # yet, uvicorn queues. It also waits for clients that do not read (`write_paused`).
        if (
            app is None
            or busy
            or self.expect_100_continue
            or self.flow.write_paused
            or parser.should_upgrade()
        ):
            return None
        headers = dict(self.headers)
        length = headers.get(b"content-length", b"")
        if not length.isdigit() or int(length) > app.max_body or b"transfer-encoding" in headers:
            return None
        try:
            # The raw target, not decoded: with a query or an escape it is no known path, is refused
            # here, and uvicorn decodes it.
            head = app.read_head(
                self.url.decode("latin-1"), parser.get_method().decode("ascii"), headers
            )
        except RequestError:
            # Refusals are rare: they are built, counted and audited in one place, `ProtocolApp`.
            return None
        return _Exchange(head, parser.should_keep_alive() and parser.get_http_version() != "1.0")

    def _answer(self, exchange: _Exchange) -> None:
        app = self._protocol_app
        assert app is not None, "an exchange has an application"
        parts = exchange.parts
        exchange.begin = perf_counter()
        body = exchange.body = parts[0] if len(parts) == 1 else b"".join(parts)
        started = app.start(exchange.head, body)
        if not isinstance(started, Result):
            # In uvicorn's own set, so that a graceful shutdown waits for the response.
            task = self.loop.create_task(self._answer_later(app, exchange, started))
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)
            return
        response, changes = started
        committed = app.commit() if changes else None
        if committed is None:
            self._respond(app, exchange, response)
        else:
            # A callback, not a task: many requests share the future of one commit group.
            committed.add_done_callback(partial(self._respond_committed, app, exchange, response))

    async def _answer_later(
        self, app: ProtocolApp, exchange: _Exchange, answer: Coroutine[Any, Any, Response]
    ) -> None:
        self._respond(app, exchange, await answer)

    def _respond_committed(
        self,
        app: ProtocolApp,
        exchange: _Exchange,
        response: Response,
        committed: asyncio.Future[None],
    ) -> None:
        error = committed.exception()
        if error is not None:
            response = app.commit_failed(exchange.head, error)
        self._respond(app, exchange, response)

    def _respond(self, app: ProtocolApp, exchange: _Exchange, response: Response) -> None:
        app.record(exchange.head, response, exchange.begin, self.client, exchange.body)
        exchange.response_complete = True
        # The client may have disconnected during the commit.
        if exchange.disconnected or self.transport.is_closing():
            return
        headers = response_headers(response, exchange.head.request_id)
        ends = not exchange.keep_alive or response.ends_connection
        if not exchange.keep_alive and not response.ends_connection:
            headers.append((b"connection", b"close"))
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        self._coalescer.write_now(
            b"%b%b\r\n%b" % (_STATUS_LINES[response.status], lines, response.body)
        )
        if ends:
            self.transport.close()
        # uvicorn starts the next pipelined request, or arms the keep-alive timeout.
        self.on_response_complete()


class _Exchange:
    """Request and response on the fast path; replaces uvicorn's `RequestResponseCycle`.

    `disconnected`, `keep_alive`, `message_event` and `response_complete` are what uvicorn reads and
    sets in a cycle.
    """

    __slots__ = (
        "begin",
        "body",
        "disconnected",
        "head",
        "keep_alive",
        "message_event",
        "parts",
        "response_complete",
    )

    def __init__(self, head: RequestHead, keep_alive: bool) -> None:
        self.head = head
        self.keep_alive = keep_alive
        self.parts: list[bytes] = []
        self.body = b""
        self.begin = 0.0
        self.disconnected = False
        self.response_complete = False
        self.message_event = _NULL_EVENT


class _NullEvent:
    """An event without waiters: uvicorn sets it when the connection is lost."""

    def set(self) -> None:
        pass


_NULL_EVENT: Final = _NullEvent()


class _WriteCoalescer:
    """A transport that joins all writes of one iteration of the event loop into one.

    uvicorn writes head and body of a response apart, which costs two system calls and, with Nagle's
    algorithm off, two packets.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self.is_closing = transport.is_closing
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Buffer data until the end of the iteration."""
        if not self._parts:
            self._loop.call_soon(self._send)
        self._parts.append(data)

    def write_now(self, data: bytes) -> None:
        """Send data at once, behind the buffered data."""
        if self._parts:
            self._send()
        self._transport.write(data)

    def close(self) -> None:
        """Send the buffered data, and close."""
        self._send()
        self._transport.close()

    def _send(self) -> None:
        parts = self._parts
        self._parts = []
        # The client may have disconnected in the same iteration.
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))
