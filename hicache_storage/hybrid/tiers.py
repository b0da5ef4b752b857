"""The pools of one tier, device or host, as one allocator: all pools or none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid.agreement import Agreement
    from hicache_storage.spec import PoolName

logger = logging.getLogger(__name__)


class Slots(Protocol):
    """What hands out a pool's slots: a device pool, or `HostSlots` before a host pool."""

    def alloc(self, count: int) -> torch.Tensor | None: ...

    def free(self, indices: torch.Tensor) -> int: ...

    def available_size(self) -> int: ...


class PoolTier:
    """Allocates and frees in several pools at once, always in the order of their names, as every rank does.

    Args:
        pools: by name; those whose slots derive from another's are left out.
    """

    def __init__(self, pools: Mapping[PoolName, Slots]) -> None:
        self._pools = {name: pools[name] for name in sorted(pools)}
        self._evictors: dict[PoolName, Callable[[int], object]] = {}

    def on_shortage(self, name: PoolName, evict: Callable[[int], object]) -> None:
        """Say who makes room: `evict(slots)` frees so many slots of a pool, or what it can."""
        self._evictors[name] = evict

    def alloc(self, needs: Mapping[PoolName, int]) -> dict[PoolName, torch.Tensor] | None:
        """Take slots of every pool, or of none; None if one is short. 0 slots are an empty tensor.

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
        finally:
            if not complete:
                self.free(taken)
        return taken

    def free(self, slots: Mapping[PoolName, torch.Tensor]) -> None:
        """Give back slots of every pool; an error of one pool does not keep the others'.

        Raises:
            SlotError: the first that a pool raised.
        """
        errors = list[Exception]()
        for name, indices in sorted(slots.items()):
            if indices.numel():
                try:
                    self._pools[name].free(indices)
                except Exception as error:  # noqa: BLE001 - raised below, when the other pools have theirs
                    errors.append(error)
        if errors:
            raise errors[0]

    def available(self, names: Sequence[PoolName]) -> list[int]:
        """Free slots of pools."""
        return [self._pools[name].available_size() for name in names]

    def evict(self, shortages: Mapping[PoolName, int]) -> None:
        """Ask those who can make room in the pools that are short."""
        for name, count in sorted(shortages.items()):
            evict = self._evictors.get(name)
            if evict is not None and count > 0:
                evict(count)

    def can_evict(self, shortages: Mapping[PoolName, int]) -> bool:
        """Whether there is somebody to ask for each pool that is short."""
        return all(name in self._evictors for name, count in shortages.items() if count > 0)


class AgreedRoom:
    """Finds the same room on every rank.

    The pools of two ranks may differ in what is free at an instant, since a page that is freed rests until the copies and
    calls that use it are over. So the smallest amount of any rank decides, and all evict the same.
    """

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement

    def alloc(self, tier: PoolTier, needs: Mapping[PoolName, int]) -> dict[PoolName, torch.Tensor] | None:
        """Take slots on every rank, or on none. A collective, two where it has to evict.

        Raises:
            SlotError: a number is not whole pages.
        """
        return tier.alloc(needs) if self.make(tier, needs)[0] else None

    def make(self, tier: PoolTier, needs: Mapping[PoolName, int]) -> tuple[bool, dict[PoolName, int]]:
        """Make room by evicting once; whether every rank has it, and what the smallest has."""
        available = self.available(tier, sorted(needs))
        shortages = {name: count - available[name] for name, count in needs.items()}
        if max(shortages.values(), default=0) > 0 and tier.can_evict(shortages):
            try:
                tier.evict(shortages)
            except Exception:
                logger.exception("eviction failed; going on with what is free")
            available = self.available(tier, sorted(needs))
        return all(available[name] >= count for name, count in needs.items()), available

    def available(self, tier: PoolTier, names: Sequence[PoolName]) -> dict[PoolName, int]:
        """Free slots of pools on the rank that has the fewest. A collective."""
        try:
            free = tier.available(names)
        except Exception:
            logger.exception("the pools could not be asked for their free slots; counting none")
            free = [0] * len(names)
        return dict(zip(names, self._agreement.minimum(free), strict=True))


def _alloc(pool: Slots, count: int) -> torch.Tensor | None:
    return pool.alloc(count) if count else torch.empty(0, dtype=torch.int64)
