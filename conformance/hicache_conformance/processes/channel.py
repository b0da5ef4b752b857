"""Messages over a socket, each a line of JSON.

What has been sent is in the kernel, and arrives also if the sender is killed in the next instant.
"""

from __future__ import annotations

import select
import threading
import time
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import msgspec

if TYPE_CHECKING:
    import socket

MessageT = TypeVar("MessageT")

CHUNK_BYTES: Final = 1 << 16


class Channel(Generic[MessageT]):
    """One end. Many threads may send; one receives.

    Args:
        connection: its socket, which is closed with it.
        incoming: the type of the messages that arrive.
    """

    def __init__(self, connection: socket.socket, incoming: Any) -> None:
        self._connection = connection
        self._decoder = msgspec.json.Decoder(incoming)
        self._lock = threading.Lock()
        self._rest = b""
        self._arrived = list[MessageT]()

    def fileno(self) -> int:
        """The descriptor, for `select`."""
        return self._connection.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send a message; waits while the other side does not read.

        Raises:
            OSError: the other side has gone.
        """
        # Options of a driver may be paths, or whatever else its config model converts.
        line = msgspec.json.encode(message, enc_hook=str) + b"\n"
        # One line at a time: without the lock two threads of a workload could send their lines into
        # each other.
        with self._lock:
            self._connection.sendall(line)

    def receive(self, seconds: float | None = None) -> MessageT:
        """The next message.

        Raises:
            TimeoutError: none has come in this time.
            EOFError: the other side has gone, and everything it had sent has been received.
        """
        limit = None if seconds is None else time.monotonic() + seconds
        while not self._arrived:
            wait = None if limit is None else max(0.0, limit - time.monotonic())
            if not select.select([self._connection], [], [], wait)[0]:
                raise TimeoutError
            self._read()
        return self._arrived.pop(0)

    def pending(self) -> list[MessageT]:
        """All messages that have arrived, after `select` has said that there is something to read.

        Raises:
            EOFError: as `receive`.
        """
        if not self._arrived:
            self._read()
        arrived = self._arrived
        self._arrived = []
        return arrived

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def _read(self) -> None:
        try:
            chunk = self._connection.recv(CHUNK_BYTES)
        except ConnectionError:
            chunk = b""
        if not chunk:
            # A last line that is not whole is what its sender was killed in.
            raise EOFError
        lines = (self._rest + chunk).split(b"\n")
        self._rest = lines.pop()
        self._arrived += [self._decoder.decode(line) for line in lines]
