"""Request ids: one for each call, logged by storage and metadata server."""

from __future__ import annotations

import os
import re
import secrets
from contextvars import ContextVar, Token
from itertools import count
from typing import Final

HEADER: Final = "X-Request-Id"
MAX_CHARACTERS: Final = 64

_LEGAL: Final = re.compile(r"[A-Za-z0-9._:@/+=-]{1,64}")
_ILLEGAL: Final = re.compile(r"[^A-Za-z0-9._:@/+=-]")
# A context variable follows a call into worker threads, which run in a copy of its context.
_current: Final = ContextVar("hicache_request_id", default="")


_prefix: str
_numbers: count[int]


def _restart() -> None:
    """Draw a new prefix and count from 1: a forked child would repeat its parent's ids."""
    global _prefix, _numbers
    _prefix = secrets.token_hex(4)
    _numbers = count(1)


_restart()
os.register_at_fork(after_in_child=_restart)


def new_request_id() -> str:
    """Return a unique id, such as `5f0c21ab-1f`."""
    return f"{_prefix}-{next(_numbers):x}"


def current_request_id() -> str:
    """Return the id of the call that this thread or task works for; empty outside of calls."""
    return _current.get()


def cleaned(text: str) -> str:
    """Sanitize a caller's id for logs and headers.

    It is cut to 64 characters; each that is neither a letter, a digit nor one of `._:@/+=-` becomes
    `_`.
    """
    # Ids get into headers and log lines: a line feed would forge another one.
    return text if _LEGAL.fullmatch(text) else _ILLEGAL.sub("_", text[:MAX_CHARACTERS])


def call_request_id(given: str | None) -> str:
    """Return the id of a call: the given one, that of the context, or a new one."""
    return (cleaned(given) if given else _current.get()) or new_request_id()


def adopt(given: bytes | None) -> str:
    """Set the context's id to that of a received request, and return it.

    That is its header's id, or a new one.
    """
    request_id = (cleaned(given.decode("latin-1")) if given else "") or new_request_id()
    _current.set(request_id)
    return request_id


class RequestScope:
    """Context manager that sets the request id of the calls within, in this thread or task.

    A call whose `extra_info` has an id keeps its own.
    """

    __slots__ = ("_token", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = cleaned(request_id)

    def __enter__(self) -> str:
        self._token: Token[str] = _current.set(self.request_id)
        return self.request_id

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
