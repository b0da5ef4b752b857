"""Pools of a hybrid model: spans of their slots, and allocation of all pools or none."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from hicache_storage.pools.pages import check_pages
from hicache_storage.spec import InvalidPoolError, InvalidTransferError, PoolHitPolicy, PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from hicache_storage.hybrid.ranks import RankGroup
    from hicache_storage.pools import PagedHostPool, SlotAllocator
    from hicache_storage.transfer import HostSlots
    from hicache_storage.transfer.host_slots import Completion

logger = logging.getLogger(__name__)


NO_SLOTS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class HybridIndices:
    """Slots of one span of pages on the device or the host, without ownership.

    Pools whose slots derive from the anchor's (an indexer beside KV) do not appear: they use
    `anchor`.

    Raises:
        InvalidTransferError: a tensor is not one row of int64, or slots and endpoints do not fit
            each other.
    """

    anchor: torch.Tensor
    """int64 (pages * page_size,): slots of the anchor pool.

    Whole pages in the order of the tokens. May be empty where only states are moved.
    """
    side: Mapping[PoolName, torch.Tensor] = field(default_factory=dict[PoolName, torch.Tensor])
    """int64, for each pool with slots of its own: `len(endpoints[pool])` of its pages.

    One slot each for Mamba.
    """
    endpoints: Mapping[PoolName, tuple[int, ...]] = field(
        default_factory=dict[PoolName, tuple[int, ...]]
    )
    """For each pool in `side`, in order: the endpoints of its pages, in pages of this span.

    Page i of the pool belongs to the prefix that ends there, and is stored under the key of its
    last page. A Mamba state at endpoint p is the state after pages [0, p); 0 means the state at the
    start of the span.
    """

    def __post_init__(self) -> None:
        for name, slots in (("anchor", self.anchor), *self.side.items()):
            if slots.dtype != torch.int64 or slots.dim() != 1:
                raise InvalidTransferError(
                    f"{name}: slots must be one row of int64, got {slots.dtype} "
                    f"{tuple(slots.shape)}"
                )
        if self.side.keys() != self.endpoints.keys():
            raise InvalidTransferError(
                f"side names {sorted(self.side)}, endpoints {sorted(self.endpoints)}; give both "
                "for each"
            )
        for name, ends in self.endpoints.items():
            count = self.side[name].numel()
            if (count % len(ends) if ends else count) or any(
                a > b for a, b in pairwise((0, *ends))
            ):
                raise InvalidTransferError(
                    f"{name}: {count} slots do not fit the endpoints {ends}, in order and from 0 on"
                )

    def __bool__(self) -> bool:
        """Return whether there is any slot."""
        return bool(self.anchor.numel()) or any(slots.numel() for slots in self.side.values())

    @classmethod
    def empty(cls) -> HybridIndices:
        """Return a span without slots."""
        return cls(NO_SLOTS)

    @classmethod
    def concat(cls, parts: Sequence[HybridIndices], page_size: int) -> HybridIndices:
        """Concatenate consecutive spans in copies of the tensors.

        A single one is returned as it is.

        Args:
            parts: one at least, in the order of the tokens.
            page_size: tokens per page of the anchor.
        """
        if len(parts) == 1:
            return parts[0]
        slots: dict[PoolName, list[torch.Tensor]] = {}
        ends: dict[PoolName, tuple[int, ...]] = {}
        before = 0
        for part in parts:
            for name, rows in part.side.items():
                slots.setdefault(name, []).append(rows)
                ends[name] = (*ends.get(name, ()), *(before + end for end in part.endpoints[name]))
            before += part.anchor.numel() // page_size
        anchor = torch.cat([part.anchor for part in parts])
        return cls(anchor, {name: torch.cat(rows) for name, rows in slots.items()}, ends)


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
    """The pool; a plain string is converted."""
    host_pool: PagedHostPool
    """Registered with the storage under the name."""
    host_slots: HostSlots
    """Allocates the host pool: of the engine that copies between the two."""
    device_pool: SlotAllocator | None = None
    """Allocates device slots; None where the indices derive from another pool's."""
    indices_from_pool: PoolName | None = None
    """The pool whose slots are this one's too, page for page: an indexer beside KV."""
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    """Which pages a prefix needs; `TRAILING_PAGES` for states."""
    window_pages: int = 1
    """`TRAILING_PAGES`: pages that an endpoint needs; 1 for a Mamba state."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", PoolName(self.name))
        object.__setattr__(self, "hit_policy", PoolHitPolicy(self.hit_policy))
        if self.indices_from_pool is not None:
            object.__setattr__(self, "indices_from_pool", PoolName(self.indices_from_pool))

    def window(self, endpoint: int) -> tuple[int, ...]:
        """Return the endpoints of the pages that a prefix needs, ascending.

        Args:
            endpoint: length of the prefix in pages.
        """
        start = max(0, endpoint - self.window_pages) if self.is_trailing else 0
        return tuple(range(start + 1, endpoint + 1))

    @property
    def is_trailing(self) -> bool:
        """True if a prefix needs only its last pages of this pool."""
        return self.hit_policy is PoolHitPolicy.TRAILING_PAGES


class HostPoolGroup:
    """All pools, allocated and freed together. Tokens are counted in the slots of KV, the anchor.

    Raises:
        InvalidPoolError: there is no pool of KV, a name is used twice, or entries do not fit each
            other.
    """

    def __init__(self, entries: Iterable[PoolEntry]) -> None:
        # The order of allocation, and of the numbers in collectives: it must be the same on every
        # rank.
        ordered = sorted(entries, key=lambda entry: entry.name)
        self.entries = {entry.name: entry for entry in ordered}
        """By name, in the order of the names."""
        if len(self.entries) != len(ordered):
            raise InvalidPoolError(
                f"pool names must differ, got {', '.join(entry.name for entry in ordered)}"
            )
        if PoolName.KV not in self.entries:
            raise InvalidPoolError("one of the pools must be 'kv', in whose slots tokens count")
        self.anchor = self.entries[PoolName.KV]
        for entry in ordered:
            _check(entry, self.entries)
        self.page_size = self.anchor.host_pool.page_size
        """Tokens per page."""
        self.size = self.anchor.host_pool.size
        """Tokens that the host holds."""
        self.side = {
            name: entry
            for name, entry in self.entries.items()
            if _owns(entry) and entry is not self.anchor
        }
        """Pools with slots of their own beside the anchor."""
        owners = {self.anchor.name: self.anchor, **self.side}
        self.host = PoolTier({name: entry.host_slots for name, entry in owners.items()})
        self.device = PoolTier(
            {
                name: entry.device_pool
                for name, entry in owners.items()
                if entry.device_pool is not None
            }
        )

    def owner(self, entry: PoolEntry) -> PoolEntry:
        """Return the entry whose slots an entry uses: itself, or its `indices_from_pool`."""
        return entry if entry.indices_from_pool is None else self.entries[entry.indices_from_pool]

    def slots(self, indices: HybridIndices, name: PoolName) -> torch.Tensor | None:
        """Return a pool's slots of a span, own or derived; None if it has none."""
        owner = self.owner(self.entries[name])
        return indices.anchor if owner is self.anchor else indices.side.get(owner.name)

    def endpoints(self, indices: HybridIndices, name: PoolName) -> tuple[int, ...]:
        """Return the endpoint of each page of `slots`, in pages of the span."""
        owner = self.owner(self.entries[name])
        if owner is self.anchor:
            return tuple(range(1, indices.anchor.numel() // self.page_size + 1))
        return indices.endpoints.get(owner.name, ())

    def owned(self, indices: HybridIndices) -> dict[PoolName, torch.Tensor]:
        """Return the slots of a span by pool, each once, as `PoolTier` takes them."""
        return {self.anchor.name: indices.anchor, **indices.side}

    def span(
        self, owned: Mapping[PoolName, torch.Tensor], endpoints: Mapping[PoolName, tuple[int, ...]]
    ) -> HybridIndices:
        """Make a span from the slots of each pool: the reverse of `owned`."""
        side = {name: slots for name, slots in owned.items() if name != self.anchor.name}
        return HybridIndices(owned[self.anchor.name], side, endpoints)

    def needs(self, endpoint: int) -> dict[PoolName, int]:
        """Return the slots that a prefix of `endpoint` pages takes in each pool."""
        needs = {self.anchor.name: endpoint * self.page_size}
        needs.update(
            (name, len(entry.window(endpoint)) * entry.host_pool.page_size)
            for name, entry in self.side.items()
        )
        return needs

    def hold(self, owned: Mapping[PoolName, torch.Tensor], until: Completion) -> None:
        """Reserve host pages until `until` has ended, even if they are freed before."""
        for name, slots in owned.items():
            if slots.numel():
                self.entries[name].host_slots.hold(slots, until)

    def check(self, indices: HybridIndices) -> None:
        """Check that a span fits the pools.

        Raises:
            InvalidTransferError: the message names the pool.
        """
        _check_pages("anchor", indices.anchor, self.page_size)
        pages = indices.anchor.numel() // self.page_size
        for name, slots in indices.side.items():
            if name not in self.side:
                raise InvalidTransferError(
                    f"{name!r} is no pool with slots of its own; there are: "
                    f"{', '.join(self.side) or 'none'}"
                )
            ends, page_size = indices.endpoints[name], self.side[name].host_pool.page_size
            if slots.numel() != len(ends) * page_size:
                raise InvalidTransferError(
                    f"{name!r} must have {page_size} slots for each of {len(ends)} endpoints, got "
                    f"{slots.numel()}"
                )
            _check_pages(name, slots, page_size)
            if ends and ends[-1] > pages:
                raise InvalidTransferError(
                    f"{name!r} has an endpoint at page {ends[-1]} of {pages}"
                )

    def release(self) -> None:
        """Release the pages of derived pools whose copies have ended.

        Other pools do so in `alloc`.
        """
        for entry in self.entries.values():
            if not _owns(entry):
                # Called for its effect: it drops the reservations of copies that have ended.
                # Nothing is allocated from a derived pool, so no other call does.
                entry.host_slots.available_size()


def _owns(entry: PoolEntry) -> bool:
    return entry.indices_from_pool is None


def _check_pages(name: str, slots: torch.Tensor, page_size: int) -> None:
    try:
        check_pages(slots, page_size)
    except InvalidTransferError as error:
        raise InvalidTransferError(f"{name}: {error}") from None


def _check(entry: PoolEntry, entries: Mapping[PoolName, PoolEntry]) -> None:
    if entry.hit_policy is PoolHitPolicy.BLOCK_GROUPS or entry.window_pages < 1:
        raise InvalidPoolError(
            f"{entry.name!r}: hit_policy must be all_pages, or trailing_pages with window_pages "
            f"from 1 on; got {entry.hit_policy}, {entry.window_pages}"
        )
    if entry.name == PoolName.KV and (
        not _owns(entry) or entry.hit_policy is not PoolHitPolicy.ALL_PAGES
    ):
        raise InvalidPoolError(f"{entry.name!r} must have slots of its own and need all pages")
    if _owns(entry):
        if entry.device_pool is None:
            raise InvalidPoolError(
                f"{entry.name!r}: device_pool is missing; only a pool with indices_from_pool "
                "needs none"
            )
        return
    source = entries.get(entry.indices_from_pool or PoolName.KV)
    if source is None or not _owns(source):
        raise InvalidPoolError(
            f"{entry.name!r}: indices_from_pool names {entry.indices_from_pool!r}, which has no "
            "slots of its own here"
        )
    if entry.hit_policy is not source.hit_policy or entry.window_pages != source.window_pages:
        raise InvalidPoolError(
            f"{entry.name!r}: hit_policy and window_pages must be those of {source.name!r}"
        )
    ours, theirs = entry.host_pool, source.host_pool
    if ours.page_size != theirs.page_size or ours.size < theirs.size:
        raise InvalidPoolError(
            f"{entry.name!r}: host_pool must have the page size of {source.name!r} and at least "
            f"its slots: {ours.page_size} and {ours.size}, not {theirs.page_size} and "
            f"{theirs.size}"
        )
