"""A snapshot of what a service has in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_metadata_server.backup.parts import ScopeHead
from hicache_metadata_server.core.export import export_slots

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hicache_metadata_server.backup.parts import Part
    from hicache_metadata_server.core.service import MetadataService

PIECE: Final = 2048
"""Slots that are taken together: some 3 ms."""


def snapshot_of(service: MetadataService, now: float) -> Iterator[Part]:
    """All of a service, which must not change meanwhile."""
    for name in sorted(service.scopes):
        scope = service.scopes[name]
        yield ScopeHead(scope.geometry, scope.epoch, service.tenants.of_scope[name], scope.model)
        for first in range(0, len(scope.table), PIECE):
            yield from export_slots(
                scope, first, first + PIECE, now, service.limits.max_lease_seconds
            )
    yield service.counters()
