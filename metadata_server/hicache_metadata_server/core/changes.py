"""Changes that a store writes before their requests are answered, and the state beside slots that it
keeps: answers by idempotency keys, and counters."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec

from hicache_metadata_server.core.codec import SlotChanges
from hicache_metadata_server.core.errors import RequestError
from hicache_metadata_server.protocol import IDEMPOTENCY_HEADER, ScopeGeometry

if TYPE_CHECKING:
    from collections.abc import Iterable

AHEAD: Final = 1 << 20
"""Ids between the last one and the durable ceiling."""


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
    answers: list[AnswerRecord] = field(default_factory=list[AnswerRecord])
    counters: dict[str, int] = field(default_factory=dict[str, int])
    dropped: list[int] = field(default_factory=list[int])
    """Numbers of dropped scopes."""

    def add_all_but_slots(self, later: Changes) -> None:
        """Add everything but slots of a later group."""
        # Slots are left out: compaction reads blocks from memory, which has their latest state.
        self.scopes += later.scopes
        self.answers += later.answers
        self.counters.update(later.counters)
        self.dropped += later.dropped

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__slots__)

    def folded(self, now: float) -> Changes:
        """Everything but slots that is left of all groups of a store."""
        scopes = {record.number: record for record in self.scopes}
        # Numbers of scopes are never used again, so the order does not matter.
        dropped = set(self.dropped)
        return Changes(
            scopes=[record for number, record in scopes.items() if number not in dropped],
            answers=[answer for answer in self.answers if answer.until > now],
            counters=self.counters,
        )


class IdempotencyCache:
    """Answers by idempotency key, each kept for `seconds`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._kept: dict[str, AnswerRecord] = {}
        self._ends: deque[tuple[float, str]] = deque()
        self.added: list[AnswerRecord] = []
        """Answers that are not durable yet."""

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, idempotency_key: str, digest: bytes, now: float) -> AnswerRecord | None:
        """Find the answer that this request got before.

        Raises:
            RequestError: the key belongs to another request.
        """
        record = self._kept.get(idempotency_key)
        if record is None or record.until <= now:
            return None
        if record.digest != digest:
            message = "this idempotency key belongs to another request"
            raise RequestError(422, "key_reused", message, IDEMPOTENCY_HEADER)
        return record

    def add(self, record: AnswerRecord) -> None:
        """Keep the answer to a request that has just been done."""
        self._keep(record)
        self.added.append(record)

    def restore(self, records: Iterable[AnswerRecord]) -> None:
        """Add durable answers at the start."""
        for record in sorted(records, key=lambda record: record.until):
            self._keep(record)

    def expire(self, now: float) -> None:
        """Drop answers whose time has ended."""
        while self._ends and self._ends[0][0] <= now:
            _, idempotency_key = self._ends.popleft()
            record = self._kept.get(idempotency_key)
            # After a withdrawal the key may have a later answer, with an entry of its own.
            if record is not None and record.until <= now:
                del self._kept[idempotency_key]

    def withdraw(self, records: Iterable[AnswerRecord]) -> None:
        """Remove answers that could not be made durable.

        Their requests were answered with an error, and a repetition must be done again.
        """
        for record in records:
            if self._kept.get(record.idempotency_key) is record:
                del self._kept[record.idempotency_key]

    def release(self, scope: str) -> None:
        """Drop the answers of a scope that another server will own."""
        self._kept = {key: one for key, one in self._kept.items() if one.scope != scope}
        self.added = [one for one in self.added if one.scope != scope]

    def _keep(self, record: AnswerRecord) -> None:
        self._kept[record.idempotency_key] = record
        # Ordered by time without a heap: every answer is kept equally long.
        self._ends.append((record.until, record.idempotency_key))


class IdAllocator:
    """A counter that starts at the microseconds since 1970.

    No server allocates a million ids a second for long, so all ids of an earlier server are smaller,
    even if its store is lost. They stay below 2^53, up to which numbers of JSON and Lua are exact,
    until the year 2255. Only the ceiling is durable. A restart continues behind it, if that is later,
    which skips up to a million ids and saves one write for each of them.
    """

    def __init__(self) -> None:
        self._next = time.time_ns() // 1000
        self.ceiling = self._next
        """No id from here on was ever given, as far as the store can know."""

    def skip_to(self, ceiling: int) -> None:
        """Allocate no id below the ceiling of another server, or of an earlier one."""
        self._next = max(self._next, ceiling)
        self.ceiling = max(self.ceiling, ceiling)

    def take(self, count: int) -> int:
        """Allocate `count` consecutive ids and return the first."""
        first = self._next
        self._next += count
        # The service writes the ceiling with the changes that use these ids, so no response names
        # an id above the durable ceiling.
        if self._next > self.ceiling:
            self.ceiling = self._next + AHEAD
        return first


class SteadyClock:
    """Wall-clock time at the start, advanced by the monotonic clock.

    Times are seconds since 1970, so they can be compared after a restart. A step of the machine's
    clock ends no lease early.
    """

    def __init__(self) -> None:
        self._begin = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._begin + time.monotonic()
