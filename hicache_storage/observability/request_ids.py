"""One id for each call of a storage: from the engine through the driver to the metadata server's log, and back."""

from __future__ import annotations

import os
import re
import secrets
from contextvars import ContextVar, Token
from itertools import count
from typing import Final

HEADER: Final = "X-Request-Id"
MOST_CHARACTERS: Final = 64

_LEGAL: Final = re.compile(r"[A-Za-z0-9._:@/+=-]{1,64}")
_ILLEGAL: Final = re.compile(r"[^A-Za-z0-9._:@/+=-]")
_current: Final = ContextVar("hicache_request_id", default="")


class _Numbers:
    """Ids of this process: its own eight hex digits and a number."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin anew; a child that was forked would give its parent's ids."""
        self.prefix, self.numbers = secrets.token_hex(4), count(1)


_numbers: Final = _Numbers()
os.register_at_fork(after_in_child=_numbers.restart)


def new_request_id() -> str:
    """An id that no other call has, such as `5f0c21ab-1f`."""
    return f"{_numbers.prefix}-{next(_numbers.numbers):x}"


def current_request_id() -> str:
    """The id of the call that this thread or task works for; empty outside of calls."""
    return _current.get()


def cleaned(text: str) -> str:
    """A caller's id as it is logged and sent: at most 64 characters, and `_` for each that is no letter, digit or one of `._:@/+=-`."""
    return text if _LEGAL.fullmatch(text) else _ILLEGAL.sub("_", text[:MOST_CHARACTERS])


def call_request_id(given: str | None) -> str:
    """The id of a call: the caller's own, that of the context, or a new one."""
    return (cleaned(given) if given else _current.get()) or new_request_id()


def adopt(given: bytes | None) -> str:
    """The id of a request that was received, which becomes the context's: its header's, or a new one."""
    request_id = (cleaned(given.decode("latin-1")) if given else "") or new_request_id()
    _current.set(request_id)
    return request_id


class RequestScope:
    """`with RequestScope(request_id):` what is called within, in this thread or task, has this id, unless it is given another."""

    __slots__ = ("_token", "request_id")

    def __init__(self, request_id: str) -> None:
        self.request_id = cleaned(request_id)

    def __enter__(self) -> str:
        self._token: Token[str] = _current.set(self.request_id)
        return self.request_id

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)
