"""Servers of a few lines with programmed answers."""

from __future__ import annotations

import contextlib
import http.client
import socketserver
import threading
from contextlib import contextmanager


class Server(socketserver.ThreadingTCPServer):
    daemon_threads = True


@contextmanager
def listening(answer):
    """A server that answers every request by a function of its connection; yields its address and
    the requests it has read."""
    requests = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self):
            # A client that goes away is none of the server's business.
            with contextlib.suppress(OSError):
                while line := self.rfile.readline():
                    headers = http.client.parse_headers(self.rfile)
                    body = self.rfile.read(int(headers.get("Content-Length", 0)))
                    requests.append(line + headers.as_bytes() + body)
                    answer(self.request)

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}", requests
        server.shutdown()


def reply(status, body, content_type=b"application/msgpack"):
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (
        status,
        content_type,
        len(body),
    )
    return lambda connection: connection.sendall(head + body)
