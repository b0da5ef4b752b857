"""A snapshot of what a service has in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_metadata_server.backup.parts import EmptySlots, Pages, ScopeHeader
from hicache_metadata_server.core.slot_table import FREE, LEASED, LIVE

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_metadata_server.backup.parts import SnapshotPart
    from hicache_metadata_server.core.scope import Scope
    from hicache_metadata_server.core.service import MetadataService

CHUNK_SLOTS: Final = 2048
"""Slots that are taken together: some 3 ms."""


def snapshot_of(service: MetadataService, now: float) -> Iterator[SnapshotPart]:
    """All of a service, which must not change meanwhile."""
    for name in sorted(service.scopes):
        scope = service.scopes[name]
        yield ScopeHeader(scope.geometry, scope.epoch, service.tenants.of_scope[name], scope.model)
        for first in range(0, len(scope.table), CHUNK_SLOTS):
            yield from read_chunk(
                scope, first, first + CHUNK_SLOTS, now, service.limits.max_lease_seconds
            )
    yield service.counters()


def read_chunk(
    scope: Scope, first: int, end: int, now: float, max_lease_seconds: float
) -> tuple[Pages, EmptySlots]:
    """The slots from `first` up to `end` as they are now.

    A leased slot rests as long as any lease may last: its writer does not know that its lease has
    not travelled. A pinned slot that holds nothing rests as long as its pins.
    """
    table = scope.table
    live, others = list[int](), list[int]()
    for slot, state in enumerate(table.states[first:end], first):
        if state == LIVE:
            live.append(slot)
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
    # A slot that a clear has let go may not have been told yet when its quarantine ends.
    ends = [
        scope.table.until[slot],
        scope.cleared_until,
        *scope.pins.by_slot.get(slot, {}).values(),
    ]
    return min(max(ends), now + max_lease_seconds)
