"""Messages about the server: information, limits, and errors."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from hicache_metadata_server.protocol.elements import Answer, Positive, Seconds, StoreDurability

PROTOCOL: Final = "2"


class Problem(Answer, frozen=True, kw_only=True):
    """Body of every response with a status of 400 or more."""

    code: str
    """Stable code for programs: `malformed`, `invalid`, `unknown_scope`, `mismatch`, `too_large`,
    `unauthorized`, `forbidden`, `quota`, ..."""
    message: str
    """Text for people."""
    field: str = ""
    """Field with the error, such as `scopes[0].keys[3]`; empty if it is not about a field."""


class Limits(Answer, frozen=True, kw_only=True):
    """Limits of one request, and times of the server."""

    body_bytes: Positive
    keys: Positive
    """Keys in all scopes of a request together."""
    scopes: Positive
    key_bytes: Positive
    lease_seconds: Seconds
    """Length of a lease without a wanted length, and of every lease by SGLang's protocol."""
    # The names on the wire are older than the attributes.
    min_lease_seconds: Seconds = field(name="least_lease_seconds")
    max_lease_seconds: Seconds = field(name="most_lease_seconds")
    """Longer wanted times are reduced to this, shorter ones raised to the minimum."""
    max_pin_seconds: Seconds = field(name="most_pin_seconds")
    quarantine_seconds: Annotated[float, Meta(ge=0)]
    idempotency_seconds: Seconds
    """Seconds for which an idempotency key is remembered."""


class About(Answer, frozen=True, kw_only=True):
    """Response of `GET /v2`: identity, durability and limits of the server."""

    protocol: str
    server: str
    """Name and version."""
    # A client that sees another instance knows that the server was restarted.
    instance: str
    """Random text that changes with each start of the server."""
    durability: StoreDurability
    limits: Limits
