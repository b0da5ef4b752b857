"""TCP ports of servers that are started on this machine."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"
_FIRST, _LAST = 20_000, 32_767
"""Below the range from which Linux takes the ports of outgoing connections (32768 and more), so
that none of them takes a port before its server listens."""

_given = set[int]()


def free_ports(count: int) -> list[int]:
    """Choose ports on which nothing listens, none of them twice in one process.

    Raises:
        OSError: if the machine has no free port left.
    """
    ports = list[int]()
    # Seeded by the system: two processes may choose at the same time.
    candidates = random.Random().sample(range(_FIRST, _LAST + 1), _LAST + 1 - _FIRST)
    for port in candidates:
        if len(ports) == count:
            return ports
        if port not in _given and _is_free(port):
            _given.add(port)
            ports.append(port)
    raise OSError(f"no {count} free ports between {_FIRST} and {_LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as one:
        try:
            one.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def accepts(port: int) -> bool:
    """Return whether a server accepts connections there."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True
