"""Messages about the server and for operators: limits, errors, status, checks, drains, exports."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Final

from msgspec import Meta, field

from hicache_metadata_server.protocol.elements import (
    MAX_SPARE_SHARE,
    Answer,
    Checksum,
    Key,
    Natural,
    Positive,
    Request,
    ScopeName,
    Seconds,
    SlotState,
    StoreDurability,
)

PROTOCOL: Final = "2"


class Fsck(Request, frozen=True, kw_only=True):
    """`POST /v2/fsck`: check every invariant of some scopes, or of all."""

    scopes: list[ScopeName] = field(default_factory=list[str])


class FsckReport(Answer, frozen=True, kw_only=True):
    """Response of `fsck`: violated invariants, one sentence each."""

    slots: Natural
    """Number of checked slots."""
    problems: list[str]


class Drain(Request, frozen=True, kw_only=True):
    """`POST /v2/drain`: give no new leases; all other requests are served."""

    enabled: bool


class Draining(Answer, frozen=True, kw_only=True):
    """Response of `drain`."""

    enabled: bool
    leases: Natural
    """Leases that are still held."""
    others: list[str] = field(default_factory=list[str])
    """Addresses of other servers of this store that give leases, and take the scopes of this one."""


class ScopeStatus(Answer, frozen=True, kw_only=True):
    """One scope in the response of `GET /v2/scopes`."""

    scope: str
    slots: Natural
    free: Natural
    leased: Natural
    live: Natural
    quarantined: Natural
    slot_bytes: Natural = 0
    geometry: str = ""
    identity: str = ""
    # Fields with defaults were added later: a client accepts a server without them.
    hits: Natural = 0
    """Requested keys that were live, since the server's start; 0 from a server without counts."""
    misses: Natural = 0
    evicted: Natural = 0
    """Pages evicted since the server's start."""
    tenant: str = ""
    """Tenant of the token that created it; empty for none."""
    expired_leases: Natural = 0
    """Leases that were neither committed nor given back in time."""
    model: str = ""
    """Name given by `describe`; empty for none."""
    owner: str = ""
    """Address of the server that owns it; empty for none, and where servers share no store."""
    log_bytes: Natural = 0
    """Length of its log, which a takeover replays; 0 where servers share no store."""


class ServerState(StrEnum):
    """State of one of several servers on one store."""

    SERVING = "serving"
    DRAINING = "draining"
    SILENT = "silent"
    """No heartbeat for its lease: others take its scopes."""


class ServerStatus(Answer, frozen=True, kw_only=True):
    """One server in the response of `GET /v2/scopes`, where several share a store."""

    url: str
    state: ServerState
    scopes: Natural
    """Number of listed scopes that it owns."""
    log_bytes: Natural
    """Length of their logs."""


class Scopes(Answer, frozen=True, kw_only=True):
    """Response of `GET /v2/scopes`."""

    scopes: list[ScopeStatus]
    servers: list[ServerStatus] = field(default_factory=list[ServerStatus])
    """Servers of this store; empty where servers share no store."""


class Drop(Request, frozen=True, kw_only=True):
    """`POST /v2/drop`: remove scopes all of whose slots are free, all or none."""

    scopes: list[ScopeName]


class Dropped(Answer, frozen=True, kw_only=True):
    """Response of `drop`: slots of each removed scope."""

    slots: list[Natural]


class Inspect(Request, frozen=True, kw_only=True):
    """`POST /v2/inspect`: get the state of slots, and of the slots of keys."""

    scope: ScopeName
    keys: list[Key] = field(default_factory=list[str])
    slots: list[Natural] = field(default_factory=list[int])


class SlotStatus(Answer, frozen=True, kw_only=True):
    """State of a slot."""

    slot: int
    state: SlotState
    generation: Natural
    key: str = ""
    prefix: str = ""
    length: Natural = 0
    checksum: Checksum = 0
    owner: str = ""
    """Owner of the lease."""
    seconds_left: float = 0.0
    """Seconds until the lease or the quarantine ends."""
    pins: Natural = 0


class Inspected(Answer, frozen=True, kw_only=True):
    """Requested slots in their order, then the live or leased slot of each key, or null."""

    slots: list[SlotStatus | None]


class Export(Request, frozen=True, kw_only=True):
    """`POST /v2/export`: copy some slots of a scope, for `fsck` with data files."""

    scope: ScopeName
    # In parts: a scope may have millions of slots, and the server answers others in between.
    first: Natural = 0
    count: Positive = 2048
    """Number of slots; at most the limit of keys in a request."""
    rows: bool = True
    """False for the digest only, by which a client detects changes since an earlier export."""


class Exported(Answer, frozen=True, kw_only=True):
    """Response of `export`: live pages, and used slots that are quarantined or free."""

    used: Natural
    """Slots from this number on were never used."""
    epoch: Natural
    """Number of clears of the scope."""
    next_lease: Positive
    """Leases from this number on were never given."""
    next_pin: Positive
    # A copy from a running server reads each part twice, and compares the digests.
    digest: str
    """32 hexadecimal digits over slots, generations and pages of this response."""
    tenant: str = ""
    """Tenant of the scope; empty for none."""
    slots: list[Natural] = field(default_factory=list[int])
    """Slots of live pages; the next columns belong to them."""
    generations: list[Natural] = field(default_factory=list[int])
    leases: list[Natural] = field(default_factory=list[int])
    """Lease that wrote each page, or another number that grows with use: the order of use."""
    lengths: list[Natural] = field(default_factory=list[int])
    checksums: list[Checksum] = field(default_factory=list[int])
    keys: list[str] = field(default_factory=list[str])
    prefixes: list[str] = field(default_factory=list[str])
    other_slots: list[Natural] = field(default_factory=list[int])
    other_generations: list[Natural] = field(default_factory=list[int])
    other_seconds: list[float] = field(default_factory=list[float])
    """Seconds for which each slot must not be given away: until a quarantine or a pin ends, or, for
    a leased slot, as long as any lease may last."""


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

    def sustained(self, size: float) -> float:
        """What a full scope can store a second for long.

        Args:
            size: of the scope, in pages or bytes, and so is what is returned.
        """
        quarantine = self.quarantine_seconds
        return size / MAX_SPARE_SHARE / quarantine if quarantine else math.inf


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
