"""The suite for a foreign driver, with pages of a wrong length written by another rank of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from hicache_conformance.harness.corruption import ObjectCorruption
from hicache_conformance.harness.pools import GuardedPool, slots_of
from hicache_conformance.interfaces.sglang.storage import EngineStorage
from hicache_conformance.suite.driver_conformance import DriverConformance
from hicache_storage.layers import innermost
from hicache_storage.spec import PoolName, PoolTransfer

if TYPE_CHECKING:
    from hicache_storage.spec import HiCacheStorage

FACTORS: Final = {ObjectCorruption.SHORT: (1, 2), ObjectCorruption.LONG: (2, 1)}
"""Of the page's length, as numerator and denominator."""


class ForeignConformance(DriverConformance):
    """`DriverConformance`, with damages put in place through the driver itself."""

    def can_corrupt(self, storage: HiCacheStorage) -> bool:
        """Return whether the storage is a foreign driver's."""
        return isinstance(innermost(storage), EngineStorage)

    def corrupt(
        self, storage: HiCacheStorage, pool: str, key: str, damage: ObjectCorruption
    ) -> bool:
        """Put a page of a wrong length in place of the right one.

        `False` for every other damage.
        """
        return _corrupt_length(storage, pool, key, damage)


def _corrupt_length(storage: HiCacheStorage, pool: str, key: str, damage: ObjectCorruption) -> bool:
    """Let a rank of equal identity store the page with half its bytes, or twice as many.

    Returns:
        Whether that rank's set was answered with `True`. A driver that has the length in its names
        keeps such a page elsewhere, and then there is none in this one's place.
    """
    own = innermost(storage)
    if damage not in FACTORS or not isinstance(own, EngineStorage):
        return False
    more, less = FACTORS[damage]
    geometry = own.geometry(pool)
    other = GuardedPool(
        pages=4,
        page_size=geometry.page_size,
        components=[part * more // less for part in geometry.component_bytes],
        exact=True,
    )
    other.write(0, b"\x5a" * other.page_bytes)
    rank = own.companion()
    rank.register_mem_host_pool_v2(other, pool)
    transfer = PoolTransfer(PoolName(pool), slots_of([0], other.page_size), keys=[key])
    return rank.batch_set_v2([transfer])[PoolName(pool)] == [True]
