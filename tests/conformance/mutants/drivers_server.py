"""A tiny page server for `drivers_network`: a dictionary behind a TCP port.

A restarted server reads its log again.

A message is four bytes of length, eight of checksum, and a list in msgpack. A request is an
operation and its arguments; a message that does not fit its checksum ends the connection.
"""

from __future__ import annotations

import contextlib
import socketserver
import struct
import sys
import threading
from pathlib import Path

import msgspec
import xxhash

HEAD = struct.Struct("<IQ")
LONGEST = 64 << 20


def message(content):
    """The bytes of one message."""
    body = msgspec.msgpack.encode(content)
    return HEAD.pack(len(body), xxhash.xxh64_intdigest(body)) + body


def received(read):
    """Read one message; None where the other side has closed between two.

    Raises:
        ConnectionError: it is damaged, or ends too early.
    """
    head = _exactly(read, HEAD.size)
    if not head:
        return None
    length, checksum = HEAD.unpack(head.ljust(HEAD.size))
    body = _exactly(read, length) if length <= LONGEST else b""
    if len(body) < length or xxhash.xxh64_intdigest(body) != checksum:
        raise ConnectionError("a message that is damaged or ends too early")
    return msgspec.msgpack.decode(body)


def _exactly(read, count):
    content = bytearray()
    while part := read(min(count - len(content), 1 << 20)):
        content += part
    return content


class Pages:
    """All pages by name; what is stored is in the log before anybody is told."""

    def __init__(self, log):
        self._pages = dict[str, bytes]()
        self._lock = threading.Lock()
        self._log = self._replayed(log)

    def answer(self, operation, *arguments):
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

    def _put(self, name, page, replaces):
        if replaces or name not in self._pages:
            self._log.write(message([name, page]))
            self._pages[name] = page
        return True

    def _remove(self, name):
        if name not in self._pages:
            return False
        self._log.write(message([name, None]))
        del self._pages[name]
        return True

    def _replayed(self, log):
        """Read the log, and cut off what a killed server has left half-written."""
        log.parent.mkdir(parents=True, exist_ok=True)
        log.touch()
        file, whole = log.open("rb+", buffering=0), 0
        with contextlib.suppress(ConnectionError):
            while record := received(file.read):
                name, self._pages[name] = record
                if record[1] is None:
                    del self._pages[name]
                whole = file.tell()
        file.truncate(whole)
        file.seek(whole)
        return file


class _Handler(socketserver.BaseRequestHandler):
    def handle(self):
        # The client finds its connection closed.
        with contextlib.suppress(OSError, TypeError, ValueError, msgspec.DecodeError):
            while (request := received(self.request.recv)) is not None:
                self.request.sendall(message(self.server.pages.answer(*request)))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def main():
    port, log = sys.argv[1:]
    with _Server(("127.0.0.1", int(port)), _Handler, bind_and_activate=False) as server:
        server.pages = Pages(Path(log))
        server.server_bind()
        server.server_activate()
        server.serve_forever()


if __name__ == "__main__":
    main()
