"""TCP ports of servers that are started on this machine."""

from __future__ import annotations

import contextlib
import socket

LOOPBACK = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports that nobody has just now."""
    with contextlib.ExitStack() as held:
        # All at once, so that none is given out twice.
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]


def accepts(port: int) -> bool:
    """Return whether a server accepts connections there."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True
