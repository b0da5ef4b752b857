"""Results of batches: what a driver has read or stored, and the faults of the rest."""

from __future__ import annotations

from dataclasses import dataclass, field

from hicache_storage.objects import ObjectRead, ObjectWrite


@dataclass(slots=True, eq=False)
class ReadOutcome:
    """Result of a batch of reads."""

    arrived: set[ObjectRead] = field(default_factory=set[ObjectRead])
    faults: list[Exception] = field(default_factory=list[Exception])


@dataclass(slots=True, eq=False)
class WriteOutcome:
    """Result of a batch of writes."""

    stored: set[ObjectWrite] = field(default_factory=set[ObjectWrite])
    faults: list[Exception] = field(default_factory=list[Exception])
