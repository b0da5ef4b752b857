"""The suite for a foreign driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.driver import DriverConformance
from hicache_conformance.foreign.tamper import is_foreign, tamper_with_lengths

if TYPE_CHECKING:
    from hicache_conformance.damage import Damage
    from hicache_storage.spec import HiCacheStorage


class ForeignConformance(DriverConformance):
    """`DriverConformance`, with damages put in place through the driver itself."""

    def can_tamper(self, storage: HiCacheStorage) -> bool:
        """Whether it is a foreign driver's."""
        return is_foreign(storage)

    def tamper(self, storage: HiCacheStorage, pool: str, key: str, damage: Damage) -> bool:
        """Put a page of a wrong length in place of the right one; `False` for every other damage."""
        return tamper_with_lengths(storage, pool, key, damage)
