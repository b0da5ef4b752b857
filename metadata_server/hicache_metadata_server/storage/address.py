"""Addresses of stores: `memory:`, `sqlite:///FILE`, or a Redis or Valkey that servers share."""

from __future__ import annotations

import re
from typing import Final

MEMORY: Final = "memory:"
SQLITE: Final = "sqlite:///"
SHARED: Final = re.compile(r"(?:redis|valkey)(s?)(?:\+(cluster|sentinel))?|unix")
"""Schemes of shared stores: whether with TLS, and the kind."""


def is_shared(url: str) -> bool:
    """Return True for an address of Redis or Valkey."""
    return "://" in url and SHARED.fullmatch(url.partition("://")[0]) is not None


def redacted(url: str) -> str:
    """Return an address without credentials and options, as logs and messages may show it."""
    scheme, mark, rest = url.partition("://")
    login, at, place = rest.rpartition("@")
    return scheme + mark + ("***@" if login or at else "") + place.partition("?")[0]


def sqlite_file(url: str) -> str:
    """Return the file of a SQLite store; an absolute one makes four slashes.

    Raises:
        ValueError: it is the address of something else.
    """
    file = url.removeprefix(SQLITE)
    if file and file != url:
        return file
    raise ValueError(
        f"{redacted(url)!r} is not the address of a store of one server; {SQLITE}FILE is, and for a "
        f"server {MEMORY} and redis://HOST:PORT/DB"
    )
