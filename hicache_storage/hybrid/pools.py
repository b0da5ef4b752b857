"""Pools of a hybrid model: spans of their slots, and allocation of all pools or none."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from hicache_storage.pools.pages import check_pages
from hicache_storage.spec import InvalidTransferError, PoolHitPolicy, PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hicache_storage.hybrid.ranks import RankGroup
    from hicache_storage.pools import PagedHostPool, SlotAllocator
    from hicache_storage.transfer import HostSlots
    from hicache_storage.transfer.streams import Completion

logger = logging.getLogger(__name__)


NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class HybridIndices:
    """Slots of one span of pages on the device or the host, without ownership.

    Pools that lie in the slots of KV (an indexer) do not appear.

    Raises:
        InvalidTransferError: a tensor is not one row of int64, or states and endpoints do not fit
            each other.
    """

    kv: torch.Tensor = NO_SLOTS
    """int64 (pages * page_size,): whole pages in the order of the tokens.

    May be empty where only states are moved.
    """
    states: torch.Tensor = NO_SLOTS
    """int64: the slot of a state for each of `endpoints`."""
    endpoints: tuple[int, ...] = ()
    """Ascending numbers of pages of this span: each state is the one after so many of them.

    It is stored under the key of the last of these pages. 0 means the state at the start of the
    span.
    """

    def __post_init__(self) -> None:
        for name, slots in (("kv", self.kv), ("states", self.states)):
            if slots.dtype != torch.int64 or slots.dim() != 1:
                raise InvalidTransferError(
                    f"{name}: slots must be one row of int64, got {slots.dtype} "
                    f"{tuple(slots.shape)}"
                )
        count, ends = self.states.numel(), self.endpoints
        if count != len(ends) or any(a > b for a, b in pairwise((0, *ends))):
            raise InvalidTransferError(
                f"{count} states do not fit the endpoints {ends}, in order and from 0 on"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens of the span."""
        return self.kv.numel()


class PoolTier:
    """Slots of several pools on the device or on the host, taken and freed together.

    Pools are used in the order of their names, so that every rank does the same.

    Args:
        pools: by name; those whose slots derive from another's are left out.
    """

    def __init__(self, pools: Mapping[PoolName, SlotAllocator | HostSlots]) -> None:
        self._pools = {name: pools[name] for name in sorted(pools)}
        self._evictors: dict[PoolName, Callable[[int], object]] = {}

    def on_shortage(self, name: PoolName, evict: Callable[[int], object]) -> None:
        """Register the evictor of a pool, which is called on every rank alike.

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
                slots = self._pools[name].alloc(count) if count else NO_SLOTS
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

    def available(self, names: Iterable[PoolName]) -> dict[PoolName, int]:
        """Return the number of free slots of each pool."""
        return {name: self._pools[name].available_size() for name in sorted(names)}

    def make_room(
        self, needs: Mapping[PoolName, int], rank_group: RankGroup
    ) -> tuple[bool, dict[PoolName, int]]:
        """Evict once if slots are missing on some rank. A collective, two where it evicts.

        Ranks may have different numbers of free slots at an instant, since a freed page stays
        reserved until the copies and calls that use it end. So the minimum over all ranks decides,
        and all ranks evict the same.

        Returns:
            Whether every rank has the slots now, and the free slots of each pool on the rank that
            has the fewest.
        """
        free = self._min_available(needs, rank_group)
        short = {name: count - free[name] for name, count in needs.items() if count > free[name]}
        # If one pool that is short cannot evict, evicting from the others would lose pages in vain.
        if short and short.keys() <= self._evictors.keys():
            try:
                for name, count in sorted(short.items()):
                    self._evictors[name](count)
            except Exception:
                # The other ranks wait in the collective below.
                logger.exception("eviction failed; going on with what is free")
            free = self._min_available(needs, rank_group)
        return all(free[name] >= count for name, count in needs.items()), free

    def _min_available(
        self, names: Iterable[PoolName], rank_group: RankGroup
    ) -> dict[PoolName, int]:
        try:
            free = self.available(names)
        except Exception:
            # The other ranks wait in the collective: this one takes part with zeros.
            logger.exception("the number of free slots is unknown; counting none")
            free = dict.fromkeys(sorted(names), 0)
        return dict(zip(free, rank_group.all_reduce_min(list(free.values())), strict=True))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolEntry:
    """One kind of state: its device pool and its host pool."""

    name: PoolName
    host_pool: PagedHostPool
    """Registered with the storage under the name."""
    host_slots: HostSlots
    """Allocates the host pool: of the engine that copies between the two."""
    device_pool: SlotAllocator | None = None
    """Allocates device slots; None for a pool in the slots of KV, page for page: an indexer."""

    @property
    def has_states(self) -> bool:
        """True for the pool of recurrent states, of which a prefix needs only the last."""
        return self.name == PoolName.MAMBA

    @property
    def hit_policy(self) -> PoolHitPolicy:
        """Which pages a prefix needs."""
        return PoolHitPolicy.TRAILING_PAGES if self.has_states else PoolHitPolicy.ALL_PAGES


class HostPoolGroup:
    """All pools, allocated and freed together: KV, pools in its slots, and states.

    Args:
        entries: of different names; that of KV, and those in its slots, have the same page size.
    """

    def __init__(self, entries: Iterable[PoolEntry]) -> None:
        # The order of allocation, and of the numbers in collectives: it must be the same on every
        # rank.
        ordered = sorted(entries, key=lambda entry: entry.name)
        self.entries = {entry.name: entry for entry in ordered}
        """By name, in the order of the names."""
        kv = self.entries[PoolName.KV].host_pool
        self.page_size = kv.page_size
        """Tokens per page."""
        self.size = kv.size
        """Tokens that the host holds."""
        self.has_states = PoolName.MAMBA in self.entries
        """Whether there is a pool of recurrent states."""
        self.host = PoolTier(
            {entry.name: entry.host_slots for entry in ordered if entry.device_pool is not None}
        )
        self.device = PoolTier(
            {entry.name: entry.device_pool for entry in ordered if entry.device_pool is not None}
        )

    def slots(self, indices: HybridIndices, name: PoolName) -> torch.Tensor:
        """Return a pool's slots of a span: its states, or those of KV."""
        return indices.states if self.entries[name].has_states else indices.kv

    def endpoints(self, indices: HybridIndices, name: PoolName) -> tuple[int, ...]:
        """Return the endpoint of each page of `slots`, in pages of the span."""
        if self.entries[name].has_states:
            return indices.endpoints
        return tuple(range(1, indices.tokens // self.page_size + 1))

    def owned(self, indices: HybridIndices) -> dict[PoolName, torch.Tensor]:
        """Return the slots of a span by pool, each once, as `PoolTier` takes them."""
        slots = {PoolName.KV: indices.kv, PoolName.MAMBA: indices.states}
        return {name: each for name, each in slots.items() if each.numel() or name == PoolName.KV}

    def span(
        self, owned: Mapping[PoolName, torch.Tensor], endpoints: tuple[int, ...]
    ) -> HybridIndices:
        """Make a span from the slots of each pool: the reverse of `owned`."""
        return HybridIndices(owned[PoolName.KV], owned.get(PoolName.MAMBA, NO_SLOTS), endpoints)

    def needs(self, endpoint: int, states: int = 1) -> dict[PoolName, int]:
        """Return the slots that a prefix of `endpoint` pages takes in each pool."""
        kv = {PoolName.KV: endpoint * self.page_size}
        return kv | {PoolName.MAMBA: states} if self.has_states else kv

    def hold(self, owned: Mapping[PoolName, torch.Tensor], until: Completion) -> None:
        """Reserve host pages until `until` has ended, even if they are freed before."""
        for name, slots in owned.items():
            if slots.numel():
                self.entries[name].host_slots.hold(slots, until)

    def check(self, indices: HybridIndices) -> None:
        """Check that a span fits the pools.

        Raises:
            InvalidTransferError: it is not whole pages, or has states that the pools have not.
        """
        check_pages(indices.kv, self.page_size)
        if indices.endpoints and not self.has_states:
            raise InvalidTransferError("the span has states, and there is no pool of them")
        pages, last = indices.tokens // self.page_size, max(indices.endpoints, default=0)
        if last > pages:
            raise InvalidTransferError(f"a state has its endpoint at page {last} of {pages}")
