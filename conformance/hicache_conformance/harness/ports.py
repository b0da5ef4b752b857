"""TCP ports of servers that are started on this machine."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import socket

LOOPBACK = "127.0.0.1"
_FIRST, _LAST = 30_000, 32_767
"""Below the range from which Linux takes the ports of outgoing connections (32768 and more), so
that none of them takes a port before its server listens, and above the one from which SGLang picks
its own (22000 to 29999)."""
_MAX_RESERVED = 256

_reserved = collections.deque[int]()
"""Descriptors of UDP sockets that are bound to the numbers of the ports that were chosen last. They
are in no server's way, and other processes see them."""


def free_ports(count: int) -> list[int]:
    """Choose ports in a row on which nothing listens, for servers that will listen there.

    No other call chooses them, in this process or another, until this one ends or has chosen 256
    more.

    Raises:
        OSError: if the machine has no such ports left.
    """
    last = _LAST + 1 - count
    # Seeded by the system: two processes may choose at the same time.
    for first in random.Random().sample(range(_FIRST, last + 1), last + 1 - _FIRST):
        ports = list(range(first, first + count))
        if _reserve(ports):
            return ports
    raise OSError(f"no {count} free ports in a row between {_FIRST} and {_LAST}")


def _reserve(ports: list[int]) -> bool:
    with contextlib.ExitStack() as stack:
        sockets = list[socket.socket]()
        try:
            for port in ports:
                sockets.append(stack.enter_context(socket.socket(type=socket.SOCK_DGRAM)))
                sockets[-1].bind((LOOPBACK, port))
                with socket.socket() as probe:
                    probe.bind((LOOPBACK, port))
        except OSError:
            return False
        stack.pop_all()
    _reserved.extend(one.detach() for one in sockets)
    while len(_reserved) > _MAX_RESERVED:
        os.close(_reserved.popleft())
    return True


def accepts(port: int) -> bool:
    """Return whether a server accepts connections there."""
    try:
        socket.create_connection((LOOPBACK, port), timeout=1.0).close()
    except OSError:
        return False
    return True
