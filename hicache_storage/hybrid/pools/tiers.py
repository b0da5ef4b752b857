"""Allocation in all pools of one tier, device or host: all of them or none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid.ranks.group import RankGroup
    from hicache_storage.spec import PoolName

logger = logging.getLogger(__name__)


class Slots(Protocol):
    """Slot allocator: a device pool, or `HostSlots` in front of a host pool."""

    def alloc(self, count: int) -> torch.Tensor | None: ...

    def free(self, indices: torch.Tensor) -> int: ...

    def available_size(self) -> int: ...


class PoolTier:
    """Allocates and frees slots of several pools at once.

    Pools are used in the order of their names, so that every rank does the same.

    Args:
        pools: by name; those whose slots derive from another's are left out.
    """

    def __init__(self, pools: Mapping[PoolName, Slots]) -> None:
        self._pools = {name: pools[name] for name in sorted(pools)}
        self._evictors: dict[PoolName, Callable[[int], object]] = {}

    def on_shortage(self, name: PoolName, evict: Callable[[int], object]) -> None:
        """Register the evictor of a pool.

        Args:
            evict: frees so many slots, or as many as it can.
        """
        self._evictors[name] = evict

    def alloc(self, needs: Mapping[PoolName, int]) -> dict[PoolName, torch.Tensor] | None:
        """Take slots of every pool, or of none; None if a pool has too few.

        A count of 0 gives an empty tensor.

        Raises:
            SlotError: a number is not whole pages; nothing is taken.
        """
        taken: dict[PoolName, torch.Tensor] = {}
        complete = False
        try:
            for name, count in sorted(needs.items()):
                slots = _alloc(self._pools[name], count)
                if slots is None:
                    return None
                taken[name] = slots
            complete = True
        # Not `except`: it also runs for a pool that is short, which returns and does not raise.
        finally:
            if not complete:
                self.free(taken)
        return taken

    def free(self, slots: Mapping[PoolName, torch.Tensor]) -> None:
        """Free slots of every pool.

        An error of one pool does not keep the others from being freed.

        Raises:
            SlotError: the first that a pool raised.
        """
        errors = list[Exception]()
        for name, indices in sorted(slots.items()):
            if indices.numel():
                try:
                    self._pools[name].free(indices)
                except Exception as error:  # noqa: BLE001 - raised below, once the other pools are freed
                    errors.append(error)
        if errors:
            raise errors[0]

    def available(self, names: Sequence[PoolName]) -> list[int]:
        """Return the number of free slots of each pool."""
        return [self._pools[name].available_size() for name in names]

    def evict(self, shortages: Mapping[PoolName, int]) -> None:
        """Call the evictors of the pools that are short."""
        for name, count in sorted(shortages.items()):
            evict = self._evictors.get(name)
            if evict is not None and count > 0:
                evict(count)

    def can_evict(self, shortages: Mapping[PoolName, int]) -> bool:
        """Return whether each pool that is short has an evictor."""
        # If one pool that is short cannot evict, evicting from the others would lose pages in vain.
        return all(name in self._evictors for name, count in shortages.items() if count > 0)


class CollectiveAllocator:
    """Allocates on every rank, or on none.

    Ranks may have different numbers of free slots at an instant, since a freed page stays reserved
    until the copies and calls that use it end. So the minimum over all ranks decides, and all ranks
    evict the same.
    """

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group

    def alloc(
        self, tier: PoolTier, needs: Mapping[PoolName, int]
    ) -> dict[PoolName, torch.Tensor] | None:
        """Take slots on every rank, or on none. A collective, two where it has to evict.

        Raises:
            SlotError: a number is not whole pages.
        """
        return tier.alloc(needs) if self.ensure(tier, needs)[0] else None

    def ensure(
        self, tier: PoolTier, needs: Mapping[PoolName, int]
    ) -> tuple[bool, dict[PoolName, int]]:
        """Evict once if slots are missing.

        Returns:
            Whether every rank has the slots now, and the free slots of each pool on the rank that
            has the fewest.
        """
        available = self.min_available(tier, sorted(needs))
        shortages = {name: count - available[name] for name, count in needs.items()}
        if max(shortages.values(), default=0) > 0 and tier.can_evict(shortages):
            try:
                # All ranks evict by the same numbers, so that their trees stay equal. If it fails
                # on this rank, the others still wait in the collective below.
                tier.evict(shortages)
            except Exception:
                logger.exception("eviction failed; going on with what is free")
            available = self.min_available(tier, sorted(needs))
        return all(available[name] >= count for name, count in needs.items()), available

    def min_available(self, tier: PoolTier, names: Sequence[PoolName]) -> dict[PoolName, int]:
        """Return the free slots of each pool on the rank that has the fewest.

        A collective.
        """
        try:
            free = tier.available(names)
        except Exception:
            # The other ranks wait in the collective: this one takes part with zeros.
            logger.exception("the number of free slots is unknown; counting none")
            free = [0] * len(names)
        return dict(zip(names, self._rank_group.all_reduce_min(free), strict=True))


def _alloc(pool: Slots, count: int) -> torch.Tensor | None:
    return pool.alloc(count) if count else torch.empty(0, dtype=torch.int64)
