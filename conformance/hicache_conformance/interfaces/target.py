"""The suite for a foreign driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.interfaces.sglang.wrong_lengths import corrupt_length, is_foreign
from hicache_conformance.suite.driver_conformance import DriverConformance

if TYPE_CHECKING:
    from hicache_conformance.harness.corruption import ObjectCorruption
    from hicache_storage.spec import HiCacheStorage


class ForeignConformance(DriverConformance):
    """`DriverConformance`, with damages put in place through the driver itself."""

    def can_corrupt(self, storage: HiCacheStorage) -> bool:
        """Return whether the storage is a foreign driver's."""
        return is_foreign(storage)

    def corrupt(self, storage: HiCacheStorage, pool: str, key: str, damage: ObjectCorruption) -> bool:
        """Put a page of a wrong length in place of the right one; `False` for every other damage."""
        return corrupt_length(storage, pool, key, damage)
