"""Who answers, what it takes, and what it refuses."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta, field

from hicache_metadata_server.protocol.elements import Answer, Positive, Seconds, StoreDurability

PROTOCOL: Final = "2"


class Problem(Answer, frozen=True, kw_only=True):
    """The body of every answer with a status of 400 or more."""

    code: str
    """Stable, for programs: `malformed`, `invalid`, `unknown_scope`, `mismatch`, `too_large`,
    `unauthorized`, `forbidden`, `quota`, ..."""
    message: str
    """For people."""
    field: str = ""
    """The field that is to blame, such as `scopes[0].keys[3]`; empty where it is not about one."""


class Limits(Answer, frozen=True, kw_only=True):
    """What a server takes in one request."""

    body_bytes: Positive
    keys: Positive
    """In all scopes of a request together."""
    scopes: Positive
    key_bytes: Positive
    lease_seconds: Seconds
    """Of a reservation that asks for no time of its own, and of every reservation of the compatible
    part."""
    min_lease_seconds: Seconds = field(name="least_lease_seconds")
    max_lease_seconds: Seconds = field(name="most_lease_seconds")
    """Longer wishes are cut to this, shorter ones raised to the least."""
    max_pin_seconds: Seconds = field(name="most_pin_seconds")
    quarantine_seconds: Annotated[float, Meta(ge=0)]
    idempotency_seconds: Seconds
    """How long an idempotency key is remembered."""


class About(Answer, frozen=True, kw_only=True):
    """`GET /v2`: who answers, and what it promises."""

    protocol: str
    server: str
    """Name and version."""
    instance: str
    """Another one after each start of the server."""
    durability: StoreDurability
    limits: Limits
