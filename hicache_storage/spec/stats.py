"""Counters that every storage reports under the same names (rule OB-1)."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.spec.transfers import PoolName

LATENCY_BOUNDS_SECONDS: tuple[float, ...] = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025),
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0),
)
"""Upper bounds of the latency buckets; one more bucket takes what is slower."""

OPERATIONS = ("exists", "get", "set")

BREAKERS = ("read", "write", "delete")
"""Kinds of operations that have a circuit breaker each.

Read: exists, present, get. Write: set. Delete: delete, clear.
"""


class MissReason(StrEnum):
    """Reason that a page was not found, or not delivered."""

    ABSENT = "absent"
    """Not in the store under this identity, as far as the driver tells."""
    INCOMPLETE = "incomplete"
    """Some of its shards are absent, and others are not."""
    DAMAGED = "damaged"
    REFUSED = "refused"
    """The store works and has refused the call, as over a tenant's rate."""
    FAULT = "fault"
    """The call has met a fault of the store."""
    DEADLINE = "deadline"
    BREAKER = "breaker"
    """The store was not asked: a circuit breaker is open."""


@dataclass(slots=True)
class Latency:
    """Histogram of call durations."""

    calls: int = 0
    seconds: float = 0.0
    """Sum of the durations."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_SECONDS) + 1))
    """Calls by `LATENCY_BOUNDS_SECONDS`, not cumulative; the last bucket has no bound."""

    def observe(self, seconds: float) -> None:
        """Count one call that took `seconds`."""
        self.calls += 1
        self.seconds += seconds
        # A duration that equals a bound belongs to its bucket: Prometheus' bounds are inclusive.
        self.buckets[bisect_left(LATENCY_BOUNDS_SECONDS, seconds)] += 1

    def add(self, other: Latency) -> None:
        """Count the calls of another histogram too."""
        self.calls += other.calls
        self.seconds += other.seconds
        self.buckets = [a + b for a, b in zip(self.buckets, other.buckets, strict=True)]


@dataclass(slots=True)
class PoolStats:
    """Pages and bytes of one pool since the storage was created."""

    pages_read: int = 0
    """Delivered with `True`."""
    bytes_read: int = 0
    pages_written: int = 0
    """Stored by a set; pages that were there already are not counted."""
    bytes_written: int = 0
    pages_hit: int = 0
    """Found by an exists."""
    absent: Counter[MissReason] = field(default_factory=Counter["MissReason"])
    """Asked for by an exists and not found, by reason."""
    missed: Counter[MissReason] = field(default_factory=Counter["MissReason"])
    """Asked for by a get and not delivered, by reason."""
    pages_damaged: int = 0
    """Of those, the ones whose damage was found by this get."""
    pages_refused: int = 0
    """Given to a set and not stored: no room, too large, deadline, fault."""
    pages_evicted: int = 0
    latency: dict[str, Latency] = field(
        default_factory=lambda: {name: Latency() for name in OPERATIONS}
    )
    """By operation: `exists`, `get`, `set`; a call over several pools counts in each."""

    @property
    def pages_absent(self) -> int:
        """Asked for by an exists and not found."""
        return self.absent.total()

    @property
    def pages_missed(self) -> int:
        """Asked for by a get and not delivered."""
        return self.missed.total()

    def add(self, other: PoolStats) -> None:
        """Count what another pool has counted too."""
        for counter in fields(self):
            if counter.name != "latency":
                value = getattr(self, counter.name) + getattr(other, counter.name)
                setattr(self, counter.name, value)
        for operation, latency in other.latency.items():
            self.latency.setdefault(operation, Latency()).add(latency)


@dataclass(slots=True)
class StorageStats:
    """Answer of `get_stats()`: a snapshot, not drained by reading it."""

    driver: str
    pools: dict[PoolName, PoolStats] = field(default_factory=dict["PoolName", PoolStats])
    faults: int = 0
    """Calls into the driver that failed and were turned into misses."""
    deadlines_missed: int = 0
    breaker_states: dict[str, str] = field(
        default_factory=lambda: dict.fromkeys(BREAKERS, "closed")
    )
    """`closed`, `open` or `half_open` by kind of operation (`BREAKERS`).

    All are `closed` without circuit breakers.
    """
    breaker_refusals: int = 0
    verifies_checksums: bool = True
    """False only where the operator turned verification off (rule GET-5)."""
    failovers: int = 0
    """Failovers to other servers of the same store.

    A call that another server has answered is no fault.
    """

    @property
    def breaker_state(self) -> str:
        """Worst state of the circuit breakers."""
        # Their names sort from the best to the worst.
        return max(self.breaker_states.values())

    @classmethod
    def total(cls, driver: str, parts: Iterable[StorageStats]) -> StorageStats:
        """Sum the counters of several storages of one driver, which `driver` names if there are none.

        The state of a circuit breaker is the worst of all storages; checksums count as verified
        where all storages verify them.
        """
        total = cls(driver)
        for part in parts:
            total.driver = part.driver
            for name, pool in part.pools.items():
                total.pools.setdefault(name, PoolStats()).add(pool)
            total.faults += part.faults
            total.deadlines_missed += part.deadlines_missed
            total.breaker_refusals += part.breaker_refusals
            total.failovers += part.failovers
            for kind, state in part.breaker_states.items():
                total.breaker_states[kind] = max(state, total.breaker_states[kind])
            total.verifies_checksums = total.verifies_checksums and part.verifies_checksums
        return total
