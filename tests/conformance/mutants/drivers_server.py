"""A tiny page server for `drivers_networked`: a dictionary behind a TCP port.

A restarted server reads its log again; one without a log has lost its pages.

A message is four bytes of length, eight of checksum, and a list in msgpack. A request is an
operation and its arguments; a message that does not fit its checksum ends the connection.
"""

from __future__ import annotations

import socketserver
import struct
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

if TYPE_CHECKING:
    import socket

HEAD = struct.Struct("<IQ")
LONGEST = 64 << 20


def send(connection: socket.socket, content: object) -> None:
    """Send one message."""
    body = msgspec.msgpack.encode(content)
    connection.sendall(HEAD.pack(len(body), xxhash.xxh64_intdigest(body)) + body)


def receive(connection: socket.socket) -> Any:
    """Receive one message; None where the other side has closed between two.

    Raises:
        ConnectionError: it is damaged, or ends too early.
    """
    head = _exactly(connection, HEAD.size)
    if head is None:
        return None
    length, checksum = HEAD.unpack(head)
    body = _exactly(connection, length) if length <= LONGEST else None
    if body is None or xxhash.xxh64_intdigest(body) != checksum:
        raise ConnectionError("a damaged message")
    return msgspec.msgpack.decode(body)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = list[bytes]()
    while count:
        part = connection.recv(min(count, 1 << 20))
        if not part:
            if parts:
                raise ConnectionError("the other side has closed in the middle of a message")
            return None
        parts.append(part)
        count -= len(part)
    return b"".join(parts)


class Pages:
    """All pages by name; what is stored is in the log, if there is one, before anybody is told."""

    def __init__(self, log: Path | None) -> None:
        self._pages = dict[str, bytes]()
        self._lock = threading.Lock()
        self._log = self._replayed(log).open("ab", buffering=0) if log else None

    def answer(self, operation: str, *arguments: Any) -> object:
        with self._lock:
            match operation, arguments:
                case "exists", [names]:
                    return [name in self._pages for name in names]
                case "get", [names]:
                    return [self._pages.get(name) for name in names]
                case "put", [pages, replace]:
                    return [self._put(name, page, name in replace) for name, page in pages]
                case "delete", [names]:
                    return [self._remove(name) for name in names]
                case "drop", [pages]:
                    return [
                        self._pages.get(name) == page and self._remove(name) for name, page in pages
                    ]
                case "clear", [prefix]:
                    return [
                        self._remove(name) for name in list(self._pages) if name.startswith(prefix)
                    ]
        raise ValueError(f"unknown operation {operation!r}")

    def _put(self, name: str, page: bytes, replaces: bool) -> bool:
        if replaces or name not in self._pages:
            self._write([name, page])
            self._pages[name] = page
        return True

    def _remove(self, name: str) -> bool:
        if name not in self._pages:
            return False
        self._write([name, None])
        del self._pages[name]
        return True

    def _write(self, record: list[Any]) -> None:
        if self._log is None:
            return
        body = msgspec.msgpack.encode(record)
        self._log.write(HEAD.pack(len(body), xxhash.xxh64_intdigest(body)) + body)

    def _replayed(self, log: Path) -> Path:
        """Read the log, and cut off what a killed server has left half-written."""
        content, start = log.read_bytes() if log.exists() else b"", 0
        while start + HEAD.size <= len(content):
            length, checksum = HEAD.unpack_from(content, start)
            body = content[start + HEAD.size : start + HEAD.size + length]
            if len(body) < length or xxhash.xxh64_intdigest(body) != checksum:
                break
            name, page = msgspec.msgpack.decode(body)
            self._pages[name] = page
            if page is None:
                del self._pages[name]
            start += HEAD.size + length
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(content[:start])
        return log


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        try:
            while (request := receive(self.request)) is not None:
                send(self.request, self.server.pages.answer(*request))
        except (OSError, TypeError, ValueError, msgspec.DecodeError):
            # The client finds its connection closed.
            return


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def main() -> None:
    port, *log = sys.argv[1:]
    with _Server(("127.0.0.1", int(port)), _Handler, bind_and_activate=False) as server:
        server.pages = Pages(Path(*log) if log else None)
        server.server_bind()
        server.server_activate()
        server.serve_forever()


if __name__ == "__main__":
    main()
