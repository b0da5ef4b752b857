"""The suite for a foreign driver, whose adapter damages pages below it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.interfaces.foreign_storage import ForeignStorage
from hicache_conformance.suite.driver_conformance import DriverConformance
from hicache_storage.layers import innermost

if TYPE_CHECKING:
    from hicache_conformance.harness.corruption import ObjectCorruption
    from hicache_storage.spec import HiCacheStorage


class ForeignConformance(DriverConformance):
    """`DriverConformance`, with damages put in place by the adapter of the interface."""

    def can_corrupt(self, storage: HiCacheStorage) -> bool:
        """Return whether the adapter knows how."""
        own = innermost(storage)
        return isinstance(own, ForeignStorage) and own.can_corrupt()

    def corrupt(
        self, storage: HiCacheStorage, pool: str, key: str, damage: ObjectCorruption
    ) -> bool:
        """Let the adapter put a damaged page in place of the right one."""
        own = innermost(storage)
        return isinstance(own, ForeignStorage) and own.corrupt(pool, key, damage)
