"""Changes of the state machine that a store writes before their requests are answered."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from hicache_metadata_server.core.codec import SlotChanges
from hicache_metadata_server.core.leases import PinRecord
from hicache_metadata_server.protocol import ScopeGeometry  # noqa: TC001 - read by msgspec


@dataclass(frozen=True, slots=True)
class ScopeRecord:
    """A scope without its slots."""

    number: int
    """Number of the scope in the store, never reused."""
    geometry: ScopeGeometry
    epoch: int = 0
    cleared_until: float = 0.0
    tenant: str = ""
    """Tenant of the token that made it; empty for none."""
    model: str = ""
    """Name given by `describe`; empty for none."""


# A Struct, because the field has another name in the log than here: `once` is also a column of the
# SQLite schema.
class AnswerRecord(msgspec.Struct, frozen=True):
    """The answer to a request with an idempotency key."""

    idempotency_key: str = msgspec.field(name="once")
    until: float
    digest: bytes
    """Digest of route, content type and body."""
    content_type: str
    status: int
    body: bytes
    scope: str = ""
    """The first scope of the request, whose owner keeps the answer; empty for none."""


@dataclass(slots=True)
class Changes:
    """One group of changes: after a crash all of them hold, or none."""

    scopes: list[ScopeRecord] = field(default_factory=list[ScopeRecord])
    """New, cleared or described scopes."""
    slots: dict[int, SlotChanges] = field(default_factory=dict[int, SlotChanges])
    """Changed slots, by the number of their scope."""
    pins: list[PinRecord] = field(default_factory=list[PinRecord])
    unpinned: list[int] = field(default_factory=list[int])
    answers: list[AnswerRecord] = field(default_factory=list[AnswerRecord])
    counters: dict[str, int] = field(default_factory=dict[str, int])
    dropped: list[int] = field(default_factory=list[int])
    """Numbers of dropped scopes."""

    def add_all_but_slots(self, later: Changes) -> None:
        """Add everything but slots of a later group."""
        # Slots are left out: compaction reads blocks from memory, which has their latest state.
        if later.scopes or later.pins or later.unpinned or later.answers:
            self.scopes += later.scopes
            self.pins += later.pins
            self.unpinned += later.unpinned
            self.answers += later.answers
        self.counters.update(later.counters)
        self.dropped += later.dropped

    def __bool__(self) -> bool:
        return bool(
            self.scopes
            or self.slots
            or self.pins
            or self.unpinned
            or self.answers
            or self.counters
            or self.dropped
        )


@dataclass(slots=True)
class Recovered:
    """Contents of a store at the start, without slots."""

    scopes: list[ScopeRecord] = field(default_factory=list[ScopeRecord])
    pins: list[PinRecord] = field(default_factory=list[PinRecord])
    answers: list[AnswerRecord] = field(default_factory=list[AnswerRecord])
    counters: dict[str, int] = field(default_factory=dict[str, int])
    closed_until: float = 0.0
    """Time before which no slot is given, because leases that the store does not know may be held;
    0 for none."""
