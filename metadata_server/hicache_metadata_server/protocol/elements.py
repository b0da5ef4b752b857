"""Elements of messages: ranges of numbers, names, states, the base classes of bodies, encoding."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, TypeVar

import msgspec
from msgspec import Meta, Struct

NO_SLOT: Final = -1
"""Value in a column of slots for a key without a slot."""
MAX_SPARE_SHARE: Final = 2
"""A full scope keeps at most one of this many slots free or in quarantine."""

KEY_BYTES: Final = 512
"""UTF-8 bytes of a key that every server accepts; `Limits.key_bytes` may be more."""

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
# No upper bound here: bounds of msgspec are signed 64-bit integers. `core.limits` checks it.
Checksum = Annotated[int, Meta(ge=0)]
"""Unsigned 64 bits; xxh3 of the page's bytes."""
# Only the minimum: the limit of bytes is the server's own, and is not one of characters.
Key = Annotated[str, Meta(min_length=1)]
# A bare $ also matches before a newline at the end, and names are part of log lines.
Namespace = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$(?!\n)")]
ScopeName = Annotated[str, Meta(pattern=r"^[0-9]{1,9}:[A-Za-z0-9._-]{1,128}$(?!\n)")]
"""`rank:namespace`."""
ModelName = Annotated[
    str,
    Meta(
        pattern=r"^[^\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]{1,512}$(?!\n)"
    ),
]
"""One line without control characters, and without those of Unicode that are invisible or turn text
around: logs, terminals and labels of metrics show it."""
# The bound keeps slot numbers and byte offsets far below 2**63.
Slots = Annotated[int, Meta(ge=1, le=2**40)]
T = TypeVar("T")

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"


class Token(StrEnum):
    """Rights of a bearer token; each includes those before it."""

    NONE = "none"
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class StoreDurability(StrEnum):
    """Events that an acknowledged change survives."""

    NONE = "none"
    PROCESS = "process"
    """`kill -9` of the server."""
    MACHINE = "machine"
    """Loss of power, too."""


class SlotState(StrEnum):
    """State of a slot."""

    FREE = "free"
    LEASED = "leased"
    LIVE = "live"
    QUARANTINED = "quarantined"


class Reserved(StrEnum):
    """Result of `reserve` for a key."""

    LEASED = "leased"
    """The caller may write the slot until the lease ends."""
    EXISTS = "exists"
    """The key is live; there is nothing to write."""
    BUSY = "busy"
    """Another client, or an earlier entry of the same batch, holds the key's lease."""
    FULL = "full"
    """No slot is free; a quarantine may end soon."""


class Settled(StrEnum):
    """Result of `commit`, `abort` and `renew` for a lease."""

    DONE = "done"
    STALE = "stale"
    """The lease is not held any more; nothing has changed."""


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of a request."""

    # Unknown fields are refused, so that no client relies on an option that the server lacks.


class Answer(Struct, frozen=True, kw_only=True):
    """Body of a response."""

    # Unknown fields are ignored: a newer server may send more.


def encode(message: object, content_type: str = JSON) -> bytes:
    """Encode a message.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
    """
    if content_type == JSON:
        return msgspec.json.encode(message)
    if content_type == MSGPACK:
        return msgspec.msgpack.encode(message)
    raise ValueError(f"unknown content type {content_type!r}; use {JSON} or {MSGPACK}")


def decode(body: bytes, kind: type[T], content_type: str = JSON) -> T:
    """Decode a message.

    Raises:
        ValueError: the content type is neither JSON nor msgpack.
        msgspec.DecodeError: the body is not JSON, or not msgpack.
        msgspec.ValidationError: the body is another message.
    """
    if content_type == JSON:
        return msgspec.json.decode(body, type=kind)
    if content_type == MSGPACK:
        return msgspec.msgpack.decode(body, type=kind)
    # Never guessed: some bodies are valid in both, with different contents.
    raise ValueError(f"unknown content type {content_type!r}; use {JSON} or {MSGPACK}")
