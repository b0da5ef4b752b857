"""Servers of a few lines with programmed answers."""

from __future__ import annotations

import contextlib
import socket
import threading
from contextlib import contextmanager


@contextmanager
def listening(answer):
    """A server that answers every connection by a function of its own; yields its address and the
    requests it has read."""
    requests = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(connection,), daemon=True).start()

        def one(connection):
            # A client that goes away is none of the server's business.
            with connection, contextlib.suppress(OSError):
                data = b""
                while chunk := connection.recv(65536):
                    data += chunk
                    head, _, body = data.partition(b"\r\n\r\n")
                    length = next(
                        (
                            int(line[15:])
                            for line in head.split(b"\r\n")
                            if line.lower().startswith(b"content-length:")
                        ),
                        0,
                    )
                    if b"\r\n\r\n" in data and len(body) >= length:
                        requests.append(data)
                        data = b""
                        answer(connection)

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        listener.shutdown(socket.SHUT_RDWR)


def reply(status, body, content_type=b"application/msgpack"):
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (
        status,
        content_type,
        len(body),
    )
    return lambda connection: connection.sendall(head + body)
