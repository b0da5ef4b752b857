"""Messages for operators: status of scopes and slots, checks, drains, exports."""

from __future__ import annotations

from msgspec import field

from hicache_metadata_server.protocol.elements import (
    Answer,
    Checksum,
    Key,
    Natural,
    Positive,
    Request,
    ScopeName,
    SlotState,
)


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
    """Response of `drain`: leases that are still held."""

    enabled: bool
    leases: Natural


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


class Scopes(Answer, frozen=True, kw_only=True):
    """Response of `GET /v2/scopes`."""

    scopes: list[ScopeStatus]


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
    """`POST /v2/export`: copy some slots of a scope, for backups and copies."""

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
