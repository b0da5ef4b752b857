"""The suite for a foreign driver."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_conformance.interfaces.sglang.wrong_lengths import is_foreign, tamper_with_lengths
from hicache_conformance.suite.driver_conformance import DriverConformance

if TYPE_CHECKING:
    from hicache_conformance.harness.corruption import Damage
    from hicache_storage.spec import HiCacheStorage


class ForeignConformance(DriverConformance):
    """`DriverConformance`, with damages put in place through the driver itself."""

    def can_tamper(self, storage: HiCacheStorage) -> bool:
        """Whether it is a foreign driver's."""
        return is_foreign(storage)

    def tamper(self, storage: HiCacheStorage, pool: str, key: str, damage: Damage) -> bool:
        """Put a page of a wrong length in place of the right one; `False` for every other damage."""
        return tamper_with_lengths(storage, pool, key, damage)
