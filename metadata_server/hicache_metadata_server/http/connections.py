"""Connections of a server: how much each may have outstanding, how long it may be silent, how many
there are.

uvicorn parses whatever it reads, and reads on whenever a request is answered: pipelined requests
pile up as long as a client sends, whether it reads or not. Here uvicorn's protocol stands behind a
transport that delivers bytes up to the next end of a head. uvicorn pauses its transport while a
request waits behind another one, so that a connection has two requests in memory at most.
"""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

SILENT_SECONDS: Final = 90.0
"""Time without a byte in either direction after which a connection is closed. Clients wait for an
answer for 60 s at most."""
SWEEP_SECONDS: Final = 1.0
LATE_SECONDS: Final = 0.05
"""Time in which a connection that a stopping server has accepted late may send a request."""
MAX_CONNECTIONS: Final = 16_384
OWN_DESCRIPTORS: Final = 256
"""Descriptors for store, log and files; half of them all where there are few."""
HEAD_END: Final = b"\r\n\r\n"
MAX_PARTS: Final = 64
"""Parts that are delivered before other connections have their turn."""


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


def part_end(last: bytes, data: bytes, begin: int) -> int:
    """Return the end of a part of `data` from `begin`, in which one head of a request ends at most.

    `last` has the three bytes before: the end of a head may lie across.
    """
    across = (last + data[begin : begin + 3]).find(HEAD_END) if data[begin] in HEAD_END else -1
    found = data.find(HEAD_END, begin) if across < 0 else begin + across - len(last)
    if found < 0 and across < 0:
        return len(data)
    end = found + len(HEAD_END)
    # One byte first: it is found ten times as fast, and few bodies have it.
    more = data.find(b"\r", end)
    return end if more >= 0 and data.find(HEAD_END, more) >= 0 else len(data)


class Connections:
    """Open connections, the one that has been silent for longest first.

    Beyond the limit, the first one is closed for each new one: first of those that never had a
    response, which cost an attacker nothing. The order is that of the last sweep: a connection sets
    a flag when it is active, and requests do no more.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.is_stopping = False
        """The server stops: connections end after the response that they wait for."""
        self._new = OrderedDict[HttpConnection, None]()
        self._served = OrderedDict[HttpConnection, None]()

    def add(self, connection: HttpConnection) -> None:
        """Add a connection, and close another one if there are too many."""
        if len(self._new) + len(self._served) >= self._limit:
            self._end(self._first_silent(self._new) or self._first_silent(self._served))
        self._new[connection] = None

    def remove(self, connection: HttpConnection) -> None:
        """Forget a connection."""
        self._new.pop(connection, None)
        self._served.pop(connection, None)

    async def sweep(self) -> None:
        """Close silent connections, until it is cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            self.end_silent(asyncio.get_running_loop().time())

    def end_silent(self, now: float) -> None:
        """Close connections that are silent for too long."""
        for connection in (*self._new, *self._served):
            if connection.is_active:
                self._move(connection)
                connection.active_at = now
            elif now - connection.active_at > SILENT_SECONDS:
                self._end(connection)

    def _first_silent(self, group: OrderedDict[HttpConnection, None]) -> HttpConnection | None:
        # Each step clears a flag, and the flags of all are set by requests alone.
        while group:
            first = next(iter(group))
            if not first.is_active:
                return first
            self._move(first)
        return None

    def _move(self, connection: HttpConnection) -> None:
        """Clear the flag of a connection, and put it behind the others of its group."""
        connection.is_active = False
        self.remove(connection)
        group = self._served if connection.is_served else self._new
        group[connection] = None

    def _end(self, connection: HttpConnection | None) -> None:
        if connection is not None:
            self.remove(connection)
            connection.abort()


class HttpConnection(asyncio.Protocol):
    """One connection: protocol of the network's transport, and transport of uvicorn's protocol.

    Both are interfaces of asyncio; nothing here depends on how uvicorn works inside.
    """

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        self._connections = connections
        self._http = HttpToolsProtocol(**arguments)
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._unread = b""
        self._at = 0
        """Index of the first byte of `_unread` that is not delivered."""
        self._last = b""
        """The last bytes that were delivered: the end of a head may come in two parts."""
        self._is_paused = False
        """uvicorn takes no more for now."""
        self._has_ended = False
        """The client sends no more."""
        self._unsent = list[bytes]()
        """Bytes of this turn of the loop: head and body of a response are one system call."""
        self.is_active = False
        """True if there were bytes in either direction since the last sweep."""
        self.is_served = False
        """True if there was a response."""
        self.active_at = self._loop.time()

    # Protocol of the network's transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to count the connection."""
        self._transport = cast("asyncio.Transport", transport)
        self._connections.add(self)
        self._http.connection_made(cast("asyncio.Transport", self))
        if self._connections.is_stopping:
            # uvicorn ends those that it has when it begins to stop. One that was accepted in that
            # moment would keep the server from stopping until its client closes it.
            self._loop.call_later(LATE_SECONDS, self._end_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._connections.remove(self)
        self._unread = b""
        self._unsent = []
        self._http.connection_lost(exc)
        # Each refers to the other: the server collects such cycles after thousands of connections.
        del self._http

    def data_received(self, data: bytes) -> None:
        """Deliver what uvicorn takes now."""
        self.is_active = True
        if self._unread:
            data = self._unread[self._at :] + data
        self._unread = data
        self._at = 0
        if not self._is_paused:
            self._deliver()

    def eof_received(self) -> bool:
        """Answer what was asked for by a client that has shut down its sending side."""
        self._has_ended = True
        self._resume()
        # With TLS the connection ends in any case.
        return self.get_extra_info("sslcontext") is None

    def pause_writing(self) -> None:
        """Make uvicorn wait for a client that does not read."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """End that wait."""
        self._http.resume_writing()

    # Transport of uvicorn's protocol.

    def write(self, data: bytes) -> None:
        """Send bytes, at the end of this turn of the loop."""
        if not self._unsent:
            self._loop.call_soon(self._send)
        self._unsent.append(data)

    def pause_reading(self) -> None:
        """Deliver nothing until `resume_reading`."""
        self._is_paused = True
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Deliver more, once the caller has done what it is at."""
        self._is_paused = False
        self._loop.call_soon(self._resume)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the network's transport."""
        return self._transport.get_extra_info(name, default)

    def is_closing(self) -> bool:
        """True if the connection is closed or about to be."""
        return self._transport.is_closing()

    def close(self) -> None:
        """Close the connection once everything is sent."""
        self._send()
        self._transport.close()

    def abort(self) -> None:
        """Close the connection at once: `close` waits for a client that does not read."""
        self._transport.abort()

    def _send(self) -> None:
        if self._unsent:
            self.is_active = True
            self.is_served = True
            self._transport.writelines(self._unsent)
            self._unsent = []

    def _end_late(self) -> None:
        if not self.is_closing():
            self._http.shutdown()

    def _deliver(self) -> None:
        """Deliver parts with the end of one head at most each, until uvicorn pauses."""
        for _ in range(MAX_PARTS):
            begin, self._at = self._at, part_end(self._last, self._unread, self._at)
            part = self._unread[begin : self._at]
            self._last = part[-3:] if len(part) > 2 else (self._last + part)[-3:]
            if self._at == len(self._unread):
                self._unread = b""
            self._http.data_received(part)
            if not self._unread or self._is_paused or self.is_closing():
                return
        self._transport.pause_reading()
        self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        """Deliver the rest, and read on when there is none."""
        if self._unread and not self._is_paused and not self.is_closing():
            self._deliver()
        if self._unread or self.is_closing():
            return
        if self._has_ended:
            # Closes the connection after the last response.
            self._http.shutdown()
        elif not self._is_paused:
            self._transport.resume_reading()
