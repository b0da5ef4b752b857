"""Copies of a scope's slots, for exports and snapshots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE
from hicache_metadata_server.core.snapshot_parts import EmptySlots, Pages

if TYPE_CHECKING:
    from hicache_metadata_server.core.scope import Scope

CHUNK_SLOTS: Final = 2048
"""Slots of one chunk: reading them takes about 3 ms, for which a server answers no one else."""


def export_slots(
    scope: Scope, first: int, end: int, now: float, max_lease_seconds: float
) -> tuple[Pages, EmptySlots]:
    """Copy the used slots from `first` up to `end`: live pages, and quarantined or free slots.

    A leased slot is quarantined for as long as any lease may last, because leases do not travel
    and its writer does not know of the copy. A pinned slot without a page is quarantined until its
    pins end.
    """
    table = scope.table
    live, others = list[int](), list[int]()
    for slot, state in enumerate(table.states[first:end], first):
        if state == LIVE:
            live.append(slot)
        # Generation 0 is a slot that was never used; a snapshot leaves it out.
        elif table.generations[slot]:
            others.append(slot)
    pages = Pages(
        slots=live,
        generations=[table.generations[slot] for slot in live],
        uses=[table.leases[slot] for slot in live],
        lengths=[table.lengths[slot] for slot in live],
        checksums=[table.checksums[slot] for slot in live],
        keys=[table.keys[slot] for slot in live],
        prefixes=[table.prefixes[slot] for slot in live],
    )
    until = [_until(scope, slot, now, max_lease_seconds) for slot in others]
    return pages, EmptySlots(others, [table.generations[slot] for slot in others], until)


def _until(scope: Scope, slot: int, now: float, max_lease_seconds: float) -> float:
    state = scope.table.states[slot]
    if state == FREE:
        return 0.0
    if state == LEASED:
        return now + max_lease_seconds
    # `until` of a slot that a clear has emptied is set later, when the clear reaches the slot.
    ends = [
        scope.table.until[slot],
        scope.cleared_until,
        *scope.pins.by_slot.get(slot, {}).values(),
    ]
    return min(max(ends), now + max_lease_seconds)
