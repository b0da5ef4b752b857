"""What has to be written down before the requests that caused it are answered."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache_metadata_server.core.codec import SlotChanges
from hicache_metadata_server.protocol import ScopeGeometry  # noqa: TC001 - msgspec reads these types when it decodes


@dataclass(frozen=True, slots=True)
class ScopeRecord:
    """A scope without its slots."""

    number: int
    """Its name in the store; never given twice."""
    geometry: ScopeGeometry
    epoch: int = 0
    cleared_until: float = 0.0
    tenant: str = ""
    """Whose token has made it; empty for none."""
    model: str = ""
    """As `describe` has named it; empty for none."""


@dataclass(frozen=True, slots=True)
class PinRecord:
    """A pin."""

    pin: int
    until: float
    slots: dict[int, list[int]]
    """By the number of their scope."""


@dataclass(frozen=True, slots=True)
class AnswerRecord:
    """The answer to a request with an idempotency key."""

    once: str
    until: float
    digest: bytes
    """Of route, content type and body."""
    content_type: str
    status: int
    body: bytes


@dataclass(slots=True)
class Changes:
    """One group of them: all hold after a crash, or none."""

    scopes: list[ScopeRecord] = field(default_factory=list[ScopeRecord])
    """New, cleared or described."""
    slots: dict[int, SlotChanges] = field(default_factory=dict[int, SlotChanges])
    """By the number of their scope."""
    pins: list[PinRecord] = field(default_factory=list[PinRecord])
    unpinned: list[int] = field(default_factory=list[int])
    answers: list[AnswerRecord] = field(default_factory=list[AnswerRecord])
    counters: dict[str, int] = field(default_factory=dict[str, int])
    dropped: list[int] = field(default_factory=list[int])
    """Scopes that are gone, by their numbers."""

    def add_all_but_slots(self, later: Changes) -> None:
        """Join what another group has beside slots."""
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
    """Everything that a store has kept."""

    scopes: list[ScopeRecord] = field(default_factory=list[ScopeRecord])
    pins: list[PinRecord] = field(default_factory=list[PinRecord])
    answers: list[AnswerRecord] = field(default_factory=list[AnswerRecord])
    counters: dict[str, int] = field(default_factory=dict[str, int])
