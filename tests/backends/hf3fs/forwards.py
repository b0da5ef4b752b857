"""Further addresses of one server, each of which can fail for itself."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from enum import StrEnum
from functools import partial

from hicache_conformance.harness.ports import free_ports

RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends a reset."""


class Manner(StrEnum):
    WELL = "well"
    REFUSES = "refuses"
    RESETS = "resets"
    """Connections, as soon as something is asked."""
    MUTE = "mute"
    """Hands on requests, and resets instead of an answer."""
    HANGS = "hangs"


class Forward:
    """Hands connections on to a port of this machine. Each connection is one thread's in each
    direction."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._manner, self._lock = Manner.WELL, threading.Lock()
        self._open = set[socket.socket]()
        self._healed = threading.Event()
        self.asked = 0
        """Pieces of requests that have come; of a small request there is one."""
        # Of nobody else, also while it refuses.
        [self.port] = free_ports(1)
        self._listen()
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def manner(self) -> Manner:
        return self._manner

    @manner.setter
    def manner(self, manner: Manner) -> None:
        before, self._manner = self._manner, manner
        if manner is Manner.REFUSES:
            self._shut()
        elif before is Manner.REFUSES:
            self._listen()
        if manner is Manner.HANGS:
            self._healed.clear()
        else:
            self._healed.set()

    def lead_to(self, port: int) -> None:
        """Hand on to another port from now on, as an address does that is moved; connections to the
        old one stay open."""
        self._to = port

    def close(self) -> None:
        self.manner = Manner.REFUSES

    def _listen(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    near.close()
                    continue
                with self._lock:
                    self._open |= {near, far}
                for one, other in ((near, far), (far, near)):
                    pump = partial(self._pump, one, other, asks=one is near)
                    threading.Thread(target=pump, daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, *, asks: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                self.asked += asks
                if self._manner is Manner.HANGS:
                    self._healed.wait()
                if self._manner is Manner.RESETS or (self._manner is Manner.MUTE and not asks):
                    break
                other.sendall(data)
        self._end(one, other)

    def _end(self, *ends: socket.socket) -> None:
        with self._lock:
            self._open -= set(ends)
        for end in ends:
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._healed.set()
        with self._lock:
            ends = list(self._open)
        self._end(*ends)
