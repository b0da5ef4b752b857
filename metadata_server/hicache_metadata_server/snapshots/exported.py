"""Pieces of a snapshot as they travel from a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_metadata_server.protocol import Exported
from hicache_metadata_server.snapshots.parts import DIGESTS, Pages, Rests, pages_digest, rests_digest

if TYPE_CHECKING:
    from hicache_metadata_server.protocol import Export
    from hicache_metadata_server.snapshots.parts import Counters
    from hicache_metadata_server.state.scope import Scope


def piece_digest(pages: Pages, rests: Rests) -> str:
    """Differs where a slot holds something else, or has been given away meanwhile."""
    return f"{(pages_digest(pages) + rests_digest(rests)) % DIGESTS:032x}"


def exported(scope: Scope, request: Export, piece: tuple[Pages, Rests], counters: Counters, now: float) -> Exported:
    """The answer to a request for slots of a scope, which are `piece`."""
    pages, rests = piece
    about = Exported(
        used=len(scope.table),
        epoch=scope.epoch,
        next_lease=counters.lease,
        next_pin=counters.pin,
        digest=piece_digest(pages, rests),
    )
    if not request.rows:
        return about
    return Exported(
        used=about.used, epoch=about.epoch, next_lease=about.next_lease, next_pin=about.next_pin, digest=about.digest,
        slots=pages.slots, generations=pages.generations, leases=pages.uses, lengths=pages.lengths, checksums=pages.checksums,
        keys=pages.keys, prefixes=pages.prefixes, other_slots=rests.slots, other_generations=rests.generations,
        other_seconds=[max(0.0, until - now) for until in rests.until],
    )  # fmt: skip


def parts_of(answer: Exported, now: float) -> tuple[Pages, Rests]:
    """What a server has told, its durations as times of this machine.

    Raises:
        ValueError: its columns are not of one length.
    """
    pages = Pages(
        answer.slots, answer.generations, answer.leases, answer.lengths, answer.checksums, answer.keys, answer.prefixes
    )  # fmt: skip
    until = [now + seconds if seconds > 0 else 0.0 for seconds in answer.other_seconds]
    rests = Rests(answer.other_slots, answer.other_generations, until)
    if piece_digest(pages, rests) != answer.digest:
        raise ValueError("the digest of a piece is not that of its slots")
    return pages, rests
