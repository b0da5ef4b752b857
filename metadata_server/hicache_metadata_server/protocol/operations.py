"""What operators and their programs ask: scopes and slots as they are, checks, drains, copies."""

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
    """What is wrong, a sentence for each."""

    slots: Natural
    """That were looked at."""
    problems: list[str]


class Drain(Request, frozen=True, kw_only=True):
    """`POST /v2/drain`: give no new leases, while all else goes on."""

    enabled: bool


class Draining(Answer, frozen=True, kw_only=True):
    """Leases that are still out."""

    enabled: bool
    leases: Natural


class ScopeStatus(Answer, frozen=True, kw_only=True):
    """One scope as `GET /v2/scopes` lists it."""

    scope: str
    slots: Natural
    free: Natural
    leased: Natural
    live: Natural
    quarantined: Natural
    slot_bytes: Natural = 0
    geometry: str = ""
    identity: str = ""
    hits: Natural = 0
    """Keys that clients have asked for and that were live, since the server's start; 0 from a
    server that does not count."""
    misses: Natural = 0
    evicted: Natural = 0
    """Pages that went to make room."""
    tenant: str = ""
    """Whose token has made it; empty for none."""
    expired_leases: Natural = 0
    """Leases that were neither committed nor given back in time."""
    model: str = ""
    """As `describe` has named it; empty where nobody has."""


class Scopes(Answer, frozen=True, kw_only=True):
    """Answer of `GET /v2/scopes`."""

    scopes: list[ScopeStatus]


class Drop(Request, frozen=True, kw_only=True):
    """`POST /v2/drop`: remove scopes all of whose slots are free, all or none."""

    scopes: list[ScopeName]


class Dropped(Answer, frozen=True, kw_only=True):
    """Slots that each of the scopes had."""

    slots: list[Natural]


class Inspect(Request, frozen=True, kw_only=True):
    """`POST /v2/inspect`: what is known about some slots or keys."""

    scope: ScopeName
    keys: list[Key] = field(default_factory=list[str])
    slots: list[Natural] = field(default_factory=list[int])


class SlotStatus(Answer, frozen=True, kw_only=True):
    """All that is known about a slot."""

    slot: int
    state: SlotState
    generation: Natural
    key: str = ""
    prefix: str = ""
    length: Natural = 0
    checksum: Checksum = 0
    owner: str = ""
    """Of the lease."""
    seconds_left: float = 0.0
    """Of the lease or the quarantine."""
    pins: Natural = 0


class Inspected(Answer, frozen=True, kw_only=True):
    """The slots asked for in their order, then the live or leased slot of each key, or null."""

    slots: list[SlotStatus | None]


class Export(Request, frozen=True, kw_only=True):
    """`POST /v2/export`: what some slots of a scope hold, for copies and backups, which ask piece
    by piece."""

    scope: ScopeName
    first: Natural = 0
    count: Positive = 2048
    """Slots; at most as many as a request may have keys."""
    rows: bool = True
    """Without, only the digest is told, which says whether anything has changed."""


class Exported(Answer, frozen=True, kw_only=True):
    """The used slots among those asked for: live pages, and others, which rest or are free."""

    used: Natural
    """Nobody has ever used the slots from here on."""
    epoch: Natural
    """Times that the scope was cleared."""
    next_lease: Positive
    """No lease from here on was given."""
    next_pin: Positive
    digest: str
    """32 hexadecimal digits over slots, generations and pages of this piece."""
    tenant: str = ""
    """Whose scope it is."""
    slots: list[Natural] = field(default_factory=list[int])
    """Of live pages; so are the next columns."""
    generations: list[Natural] = field(default_factory=list[int])
    leases: list[Natural] = field(default_factory=list[int])
    """In the order of use: by which each page was written, or a number that grows with use."""
    lengths: list[Natural] = field(default_factory=list[int])
    checksums: list[Checksum] = field(default_factory=list[int])
    keys: list[str] = field(default_factory=list[str])
    prefixes: list[str] = field(default_factory=list[str])
    other_slots: list[Natural] = field(default_factory=list[int])
    other_generations: list[Natural] = field(default_factory=list[int])
    other_seconds: list[float] = field(default_factory=list[float])
    """How long nobody may be given them: until a quarantine or a pin ends, or as long as any lease
    may last."""
