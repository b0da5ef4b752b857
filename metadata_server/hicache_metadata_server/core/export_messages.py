"""Conversion between chunks of a snapshot and messages of the export route."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_metadata_server.core.snapshot_parts import (
    DIGESTS,
    EmptySlots,
    Pages,
    generations_digest,
    pages_digest,
)
from hicache_metadata_server.protocol import Exported

if TYPE_CHECKING:
    from hicache_metadata_server.core.snapshot_parts import Counters


def chunk_digest(pages: Pages, empty: EmptySlots) -> str:
    """Return a digest that changes when a slot gets other content or another generation."""
    # Generations too: a slot that was reused for the same page holds another writer's bytes.
    whole = pages_digest(pages) + generations_digest(pages) + generations_digest(empty)
    return f"{whole % DIGESTS:032x}"


def exported(
    pages: Pages,
    empty: EmptySlots,
    now: float,
    *,
    used: int,
    epoch: int,
    counters: Counters,
    rows: bool,
    tenant: str = "",
) -> Exported:
    """Return the answer to a request for slots; without `rows` only digest and counters."""
    digest = chunk_digest(pages, empty)
    if not rows:
        return Exported(
            used=used,
            epoch=epoch,
            next_lease=counters.lease,
            next_pin=counters.pin,
            digest=digest,
            tenant=tenant,
        )
    return Exported(
        used=used,
        epoch=epoch,
        next_lease=counters.lease,
        next_pin=counters.pin,
        digest=digest,
        tenant=tenant,
        slots=pages.slots,
        generations=pages.generations,
        leases=pages.uses,
        lengths=pages.lengths,
        checksums=pages.checksums,
        keys=pages.keys,
        prefixes=pages.prefixes,
        other_slots=empty.slots,
        other_generations=empty.generations,
        # Durations, since the clocks of two machines differ.
        other_seconds=[max(0.0, until - now) for until in empty.until],
    )


def parts_of(answer: Exported, now: float) -> tuple[Pages, EmptySlots]:
    """Decode an answer; convert its durations to times of this machine.

    Raises:
        ValueError: the columns have different lengths, or do not match the digest.
    """
    pages = Pages(
        answer.slots,
        answer.generations,
        answer.leases,
        answer.lengths,
        answer.checksums,
        answer.keys,
        answer.prefixes,
    )
    until = [now + seconds if seconds > 0 else 0.0 for seconds in answer.other_seconds]
    empty = EmptySlots(answer.other_slots, answer.other_generations, until)
    if chunk_digest(pages, empty) != answer.digest or len(until) != len(empty):
        raise ValueError("the digest of a chunk is not that of its slots")
    return pages, empty
