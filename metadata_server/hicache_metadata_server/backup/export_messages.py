"""Pieces of a snapshot as they travel from a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_metadata_server.backup.parts import (
    DIGESTS,
    EmptySlots,
    Pages,
    generations_digest,
    pages_digest,
)
from hicache_metadata_server.protocol import Exported

if TYPE_CHECKING:
    from hicache_metadata_server.backup.parts import Counters


def chunk_digest(pages: Pages, empty: EmptySlots) -> str:
    """Differs where a slot holds something else, or has been given away meanwhile."""
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
    """The answer to a request for slots of a scope; without `rows` only about them."""
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
        other_seconds=[max(0.0, until - now) for until in empty.until],
    )


def parts_of(answer: Exported, now: float) -> tuple[Pages, EmptySlots]:
    """What a server has told, its durations as times of this machine.

    Raises:
        ValueError: its columns are not of one length, or not those of the digest.
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
        raise ValueError("the digest of a piece is not that of its slots")
    return pages, empty
