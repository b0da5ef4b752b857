"""Pipelined commands on a connection that redis-py has opened.

redis-py connects, logs in and finds the primary. Its streams, its encoder and its timeouts take more
of a server's time than the rest of a write to the log of a scope, so commands bypass them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, cast

import hiredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# The type that it declares has a tuple of one part.
_PACK: Final[Callable[[tuple[bytes | int | str, ...]], bytes]] = cast("Any", hiredis.pack_command)


class Pipeline(asyncio.Protocol):
    """Sends commands together and collects their replies, one batch at a time.

    Args:
        connection: of redis-py, connected with protocol 2; used by nobody else until it is
            disconnected.
        reply_seconds: timeout of the replies to a batch, in seconds.
    """

    def __init__(self, connection: Any, reply_seconds: float) -> None:
        self.connection = connection
        self.is_closed = False
        """Whether the peer has closed the connection, or has sent what nobody waits for."""
        self._reply_seconds = reply_seconds
        self._loop = asyncio.get_running_loop()
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=connection._parser.parse_error
        )
        self._replies = list[Any]()
        self._expected = 0
        self._waiter: asyncio.Future[list[Any]] | None = None
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None
        """One at a time, for the deadline of the first batch since the last one ended."""
        self._transport: asyncio.Transport = connection._writer.transport
        self._transport.set_protocol(self)

    async def send(self, commands: Sequence[tuple[bytes | int | str, ...]]) -> list[Any]:
        """Send commands and return their replies; an error that one is answered with is its reply.

        There must be a command. After an exception a reply may be under way: the connection has to
        be disconnected.

        Raises:
            ConnectionError: of redis-py; the connection is closed.
            InvalidResponse: of redis-py; the replies are not those of a Redis.
            TimeoutError: not all replies have come in time.
        """
        if self.is_closed:
            raise RedisConnectionError("the connection is closed")
        waiter: asyncio.Future[list[Any]] = self._loop.create_future()
        self._waiter = waiter
        self._expected = len(commands)
        self._transport.write(b"".join(map(_PACK, commands)))
        self._deadline = self._loop.time() + self._reply_seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        try:
            return await waiter
        finally:
            self._waiter = None

    async def disconnect(self) -> None:
        """Close the connection, without waiting for its end."""
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        await self.connection.disconnect(nowait=True)

    # `asyncio.Protocol`

    def data_received(self, data: bytes) -> None:
        """Take replies."""
        self._reader.feed(data)
        try:
            while (reply := self._reader.gets()) is not False:
                self._replies.append(reply)
        except InvalidResponse as error:
            self._fail(error)
            return
        if self._waiter is None or len(self._replies) > self._expected:
            self._fail(InvalidResponse("a reply that nobody has asked for"))
        elif len(self._replies) == self._expected and not self._waiter.done():
            replies = self._replies
            self._replies = []
            self._waiter.set_result(replies)

    def eof_received(self) -> None:
        """Fail what waits; the transport closes itself."""
        self._fail(RedisConnectionError("the connection was closed by Redis"))

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail what waits."""
        self._fail(exc or RedisConnectionError("the connection is closed"))

    def _check_deadline(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return
        if self._loop.time() < self._deadline:
            # Of a later batch.
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)
        else:
            self._fail(TimeoutError("no reply in time"))

    def _fail(self, error: Exception) -> None:
        self.is_closed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error)
