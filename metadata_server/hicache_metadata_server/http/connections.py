"""Connections of a server: how much each may have outstanding, how long it may be silent, how many
there are.
"""

from __future__ import annotations

import resource
from typing import TYPE_CHECKING, Any, Final

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

if TYPE_CHECKING:
    import asyncio

PARSED_BYTES: Final = 4096
"""Bytes that are parsed at a time. All requests in them are queued behind the first."""
SILENT_SECONDS: Final = 60.0
"""Time without a byte after which a connection is closed, unless a response to it is being made."""
MAX_CONNECTIONS: Final = 16_384
OWN_DESCRIPTORS: Final = 256
"""Descriptors for store, log and files; half of them all where there are few."""


def raise_descriptor_limit() -> None:
    """Raise the soft limit of descriptors to the hard one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> int:
    """Number of connections for the limit of descriptors."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return min(MAX_CONNECTIONS, descriptors - min(OWN_DESCRIPTORS, descriptors // 2))


class Connections:
    """Open connections, in the order in which they were last heard of.

    Beyond the limit, the one that has been silent for longest is closed for each new one: first of
    those that never had a response, which cost an attacker nothing.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._new: dict[BoundedProtocol, None] = {}
        self._served: dict[BoundedProtocol, None] = {}

    def add(self, connection: BoundedProtocol) -> None:
        """Add a connection, and close another one if there are too many."""
        if len(self._new) + len(self._served) >= self._limit:
            waiting = (one for group in (self._new, self._served) for one in group if one.waits)
            self._end(next(waiting, connection))
            if connection.transport.is_closing():
                return
        self._new[connection] = None

    def heard(self, connection: BoundedProtocol) -> None:
        """Note that a connection has sent something."""
        group = self._served if connection in self._served else self._new
        if group.pop(connection, connection) is None:
            group[connection] = None

    def serve(self, connection: BoundedProtocol) -> None:
        """Note that a connection has had a response."""
        if self._new.pop(connection, connection) is None:
            self._served[connection] = None

    def remove(self, connection: BoundedProtocol) -> None:
        """Forget a connection."""
        self._new.pop(connection, None)
        self._served.pop(connection, None)

    def end_silent(self, now: float) -> None:
        """Close connections that are silent for too long."""
        for group in (self._new, self._served):
            for connection in list(group):
                if now - connection.heard_at > SILENT_SECONDS and connection.waits:
                    self._end(connection)

    def _end(self, connection: BoundedProtocol) -> None:
        self.remove(connection)
        # Not `close`, which waits for a client that does not read.
        connection.transport.abort()


class _HeldFlow(FlowControl):
    """Flow control that does not resume reading while there is something to parse."""

    holds = False

    def resume_reading(self) -> None:
        if not self.holds:
            super().resume_reading()


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 protocol of a client that may neither read nor send.

    uvicorn parses all that it reads, and reads on whenever a request is answered: pipelined requests
    pile up as long as the client sends, whether it reads or not. Here the next ones are parsed when
    those before them are answered.
    """

    def __init__(self, all_connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._all = all_connections
        self._unparsed = memoryview(b"")
        self._is_parsing = False
        self._has_ended = False
        """The client sends no more."""
        self.is_partial = False
        """A request has begun and not all of it has arrived."""
        self.heard_at = self.loop.time()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn narrows it
        """Begin to count the connection."""
        super().connection_made(transport)
        self.flow = self._held = _HeldFlow(self.transport)
        self._all.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._all.remove(self)
        self._unparsed = memoryview(b"")
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes a bool
        """Answer what was asked for by a client that has shut down its sending side."""
        self._has_ended = True
        if self.waits:
            # By this transport, which may still have a response to send.
            self.transport.close()
        # With TLS the connection ends in any case.
        return self.scheme == "http"

    @property
    def waits(self) -> bool:
        """True if the next step is the client's: to send, or to read."""
        is_idle = self.cycle is None or self.cycle.response_complete  # type: ignore[redundant-expr]  # None at first
        return is_idle or self.is_partial or self.flow.write_paused

    def data_received(self, data: bytes) -> None:
        """Parse what is not to wait."""
        self.heard_at = self.loop.time()
        self._all.heard(self)
        if len(data) <= PARSED_BYTES and not self._unparsed and not self.pipeline:
            super().data_received(data)
            return
        self._unparsed = memoryview(b"".join((self._unparsed, data)))
        self._parse()

    def on_message_begin(self) -> None:
        """Note the begin of a request."""
        self.is_partial = True
        super().on_message_begin()

    def on_message_complete(self) -> None:
        """Note the end of a request."""
        self.is_partial = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the next requests."""
        self.heard_at = self.loop.time()
        self._all.serve(self)
        super().on_response_complete()
        if self._unparsed:
            self._parse()
        elif self._has_ended and not self.pipeline:
            self.transport.close()

    def _parse(self) -> None:
        # A response that is made at once comes here again.
        if self._is_parsing:
            return
        self._is_parsing = True
        try:
            while self._unparsed and not self.pipeline and not self.transport.is_closing():
                part = self._unparsed[:PARSED_BYTES]
                self._unparsed = self._unparsed[PARSED_BYTES:]
                super().data_received(part)  # type: ignore[arg-type]  # its parser takes any buffer
        finally:
            self._is_parsing = False
        if self._unparsed:
            self._held.holds = True
            self.flow.pause_reading()
        elif self._held.holds:
            self._held.holds = False
            self.flow.resume_reading()
