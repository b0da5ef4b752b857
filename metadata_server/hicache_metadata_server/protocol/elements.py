"""What messages are made of: ranges of numbers, names, states, and the two kinds of bodies."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, Struct

NO_SLOT: Final = -1
"""Stands in a column of slots where a key has none."""

KEY_BYTES: Final = 512
"""UTF-8 bytes that every server takes in a key; `Limits.key_bytes` may be more."""

Natural = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Checksum = Annotated[int, Meta(ge=0)]
"""64 bits without sign; xxh3 of the page's bytes."""
Key = Annotated[str, Meta(min_length=1)]
# A bare $ would let a newline through at the end.
Namespace = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,128}$(?!\n)")]
ScopeName = Annotated[str, Meta(pattern=r"^[0-9]{1,9}:[A-Za-z0-9._-]{1,128}$(?!\n)")]
"""`rank:namespace`."""
ModelName = Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]{1,512}$(?!\n)")]
"""One line for people: logs, terminals and labels of metrics show it."""
Slots = Annotated[int, Meta(ge=1, le=2**40)]


class Token(StrEnum):
    """What a bearer token permits; each includes those before it."""

    NONE = "none"
    READ = "read"
    WRITE = "write"
    ADMIN = "admin"


class StoreDurability(StrEnum):
    """What an acknowledged change survives."""

    NONE = "none"
    PROCESS = "process"
    """Kill -9 of the server."""
    MACHINE = "machine"
    """Loss of power."""


class SlotState(StrEnum):
    """Every slot is in exactly one of these."""

    FREE = "free"
    LEASED = "leased"
    LIVE = "live"
    QUARANTINED = "quarantined"


class Reserved(StrEnum):
    """What `reserve` says about a key."""

    LEASED = "leased"
    """The caller may write the slot until the lease ends."""
    EXISTS = "exists"
    """The key is live; there is nothing to write."""
    BUSY = "busy"
    """Somebody else, or the same batch further up, holds the key's lease."""
    FULL = "full"
    """No slot is free; more may be after a quarantine."""


class Settled(StrEnum):
    """What `commit`, `abort` and `renew` say about a lease."""

    DONE = "done"
    STALE = "stale"
    """There is no such lease any more; nothing has changed."""


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A body that a client sends. An unknown field is refused, so that nobody relies on an option
    that a server lacks."""


class Answer(Struct, frozen=True, kw_only=True):
    """A body that a server sends. Clients ignore fields that they do not know."""
