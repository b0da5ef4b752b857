"""The pools of a hybrid model as one: an anchor that counts the tokens, and pools beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from hicache_storage.hybrid.indices import HybridIndices
from hicache_storage.hybrid.tiers import PoolTier
from hicache_storage.spec import InvalidPoolError, InvalidTransferError, PoolHitPolicy, PoolName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hicache_storage.hybrid.tiers import Slots
    from hicache_storage.transfer import TransferEngine
    from hicache_storage.transfer.host_slots import Completion


class HostMemory(Protocol):
    """What the group needs to know of a host pool."""

    @property
    def page_size(self) -> int: ...

    @property
    def size(self) -> int: ...


def every_layer(layer: int) -> int:
    """The layer mapper of a pool that all layers of the model have a share in."""
    return layer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolEntry:
    """One kind of state in its two pools, and how it is copied between them."""

    name: PoolName
    """The pool; a plain string is converted."""
    host_pool: HostMemory
    """Registered with the storage under the name."""
    copies: TransferEngine
    """Copies between the two; its `host_slots` allocate the host pool."""
    device_pool: Slots | None = None
    """Allocates device slots; None where the indices derive from another pool's."""
    layer_mapper: Callable[[int], int | None] = every_layer
    """From a layer of the model to the pool's own; None for a layer without a share in this pool."""
    is_primary_index_anchor: bool = False
    """Tokens are counted in this pool's slots; of one entry in a group."""
    indices_from_pool: PoolName | None = None
    """The pool whose slots are this one's too, page for page: an indexer beside KV."""
    hit_policy: PoolHitPolicy = PoolHitPolicy.ALL_PAGES
    """Which pages a prefix needs; `TRAILING_PAGES` for states."""
    window_pages: int = 1
    """`TRAILING_PAGES`: pages before an endpoint that are needed to go on from there; 1 for a Mamba state."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", PoolName(self.name))
        object.__setattr__(self, "hit_policy", PoolHitPolicy(self.hit_policy))
        if self.indices_from_pool is not None:
            object.__setattr__(self, "indices_from_pool", PoolName(self.indices_from_pool))

    def window(self, endpoint: int) -> tuple[int, ...]:
        """The endpoints of the pages that a prefix of so many pages needs of this pool, ascending."""
        start = max(0, endpoint - self.window_pages) if self.is_trailing else 0
        return tuple(range(start + 1, endpoint + 1))

    @property
    def is_trailing(self) -> bool:
        """Whether a prefix needs only its last pages of this pool."""
        return self.hit_policy is PoolHitPolicy.TRAILING_PAGES


class HostPoolGroup:
    """Allocates, frees and describes the pools together.

    Raises:
        InvalidPoolError: there is not exactly one anchor, a name comes twice, or entries do not fit each other.
    """

    def __init__(self, entries: Iterable[PoolEntry]) -> None:
        ordered = sorted(entries, key=lambda entry: entry.name)
        self.entries = {entry.name: entry for entry in ordered}
        """By name, in the order of the names."""
        if len(self.entries) != len(ordered):
            raise InvalidPoolError(f"pool names must differ, got {', '.join(entry.name for entry in ordered)}")
        anchors = [entry for entry in ordered if entry.is_primary_index_anchor]
        if len(anchors) != 1:
            raise InvalidPoolError(f"is_primary_index_anchor must be set for one pool, is for {len(anchors)}")
        self.anchor = anchors[0]
        for entry in ordered:
            _check(entry, self.entries)
        self.page_size = self.anchor.host_pool.page_size
        """Tokens per page."""
        self.size = self.anchor.host_pool.size
        """Tokens that the host holds."""
        self.side = {name: entry for name, entry in self.entries.items() if _owns(entry) and entry is not self.anchor}
        """Pools with slots of their own beside the anchor."""
        owners = {self.anchor.name: self.anchor, **self.side}
        self.host = PoolTier({name: entry.copies.host_slots for name, entry in owners.items()})
        self.device = PoolTier({name: entry.device_pool for name, entry in owners.items() if entry.device_pool is not None})

    def owner(self, entry: PoolEntry) -> PoolEntry:
        """The entry whose slots an entry uses: itself, or the pool that lends them."""
        return entry if entry.indices_from_pool is None else self.entries[entry.indices_from_pool]

    def slots(self, indices: HybridIndices, name: PoolName) -> torch.Tensor | None:
        """A pool's share of a span, own or derived; None if it has none."""
        owner = self.owner(self.entries[name])
        return indices.anchor if owner is self.anchor else indices.side.get(owner.name)

    def endpoints(self, indices: HybridIndices, name: PoolName) -> tuple[int, ...]:
        """For each page of `slots`, after how many pages of the span the prefix ends that it belongs to."""
        owner = self.owner(self.entries[name])
        if owner is self.anchor:
            return tuple(range(1, indices.anchor.numel() // self.page_size + 1))
        return indices.endpoints.get(owner.name, ())

    def owned(self, indices: HybridIndices) -> dict[PoolName, torch.Tensor]:
        """The slots of a span by pool, each once; what `PoolTier` takes."""
        return {self.anchor.name: indices.anchor, **indices.side}

    def span(self, owned: Mapping[PoolName, torch.Tensor], endpoints: Mapping[PoolName, tuple[int, ...]]) -> HybridIndices:
        """The reverse of `owned`."""
        side = {name: slots for name, slots in owned.items() if name != self.anchor.name}
        return HybridIndices(owned[self.anchor.name], side, endpoints)

    def needs(self, endpoint: int) -> dict[PoolName, int]:
        """Slots that the prefix of so many pages takes in each pool."""
        needs = {self.anchor.name: endpoint * self.page_size}
        needs.update((name, len(entry.window(endpoint)) * entry.host_pool.page_size) for name, entry in self.side.items())
        return needs

    def hold(self, owned: Mapping[PoolName, torch.Tensor], until: Completion) -> None:
        """Keep host pages from being handed out again until something has ended, whoever frees them meanwhile."""
        for name, slots in owned.items():
            if slots.numel():
                self.entries[name].copies.host_slots.hold(slots, until)

    def free_host(self, indices: HybridIndices) -> None:
        """Give back the host slots of all pools; those in use by a copy or a call rest until it is over.

        Raises:
            SlotError: of a pool whose slots were not handed out, or are given back twice; the others are free.
        """
        self.host.free(self.owned(indices))

    def free_device(self, indices: HybridIndices) -> None:
        """Give back the device slots of all pools.

        Raises:
            SlotError: as for `free_host`.
        """
        self.device.free(self.owned(indices))

    def check(self, indices: HybridIndices) -> None:
        """Refuse a span that does not fit the pools.

        Raises:
            InvalidTransferError: the message names the pool.
        """
        _check_pages("anchor", indices.anchor, self.page_size)
        pages = indices.anchor.numel() // self.page_size
        for name, slots in indices.side.items():
            if name not in self.side:
                raise InvalidTransferError(
                    f"{name!r} is no pool with slots of its own; there are: {', '.join(self.side) or 'none'}"
                )
            ends, page_size = indices.endpoints[name], self.side[name].host_pool.page_size
            if slots.numel() != len(ends) * page_size:
                raise InvalidTransferError(
                    f"{name!r} must have {page_size} slots for each of {len(ends)} endpoints, got {slots.numel()}"
                )
            _check_pages(name, slots, page_size)
            if ends and ends[-1] > pages:
                raise InvalidTransferError(f"{name!r} has an endpoint at page {ends[-1]} of {pages}")

    def release(self) -> None:
        """Let derived pools forget the copies that are over; pools that allocate do so by themselves."""
        for entry in self.entries.values():
            if not _owns(entry):
                entry.copies.host_slots.available_size()


def _owns(entry: PoolEntry) -> bool:
    return entry.indices_from_pool is None


def _check_pages(name: str, slots: torch.Tensor, page_size: int) -> None:
    whole = slots[: slots.numel() // page_size * page_size].view(-1, page_size)
    ordered = whole[:, :1] // page_size * page_size + torch.arange(page_size, device=slots.device)
    if slots.numel() % page_size or not torch.equal(whole, ordered):
        raise InvalidTransferError(
            f"{name}: slots must be whole pages of {page_size} consecutive ones, got {slots.tolist()[:8]}..."
        )


def _check(entry: PoolEntry, entries: Mapping[PoolName, PoolEntry]) -> None:
    if entry.hit_policy is PoolHitPolicy.BLOCK_GROUPS or entry.window_pages < 1:
        raise InvalidPoolError(
            f"{entry.name!r}: hit_policy must be all_pages, or trailing_pages with window_pages from 1 on; "
            f"got {entry.hit_policy}, {entry.window_pages}"
        )
    if entry.is_primary_index_anchor and (not _owns(entry) or entry.hit_policy is not PoolHitPolicy.ALL_PAGES):
        raise InvalidPoolError(f"{entry.name!r}: the anchor has slots of its own and needs all pages")
    if _owns(entry):
        if entry.device_pool is None:
            raise InvalidPoolError(f"{entry.name!r}: device_pool is missing; only a pool with indices_from_pool needs none")
        return
    source = entries.get(entry.indices_from_pool or PoolName.KV)
    if source is None or not _owns(source):
        raise InvalidPoolError(f"{entry.name!r}: indices_from_pool names {entry.indices_from_pool!r}, which lends no slots here")
    if entry.hit_policy is not source.hit_policy or entry.window_pages != source.window_pages:
        raise InvalidPoolError(f"{entry.name!r}: hit_policy and window_pages must be those of {source.name!r}")
    ours, theirs = entry.host_pool, source.host_pool
    if ours.page_size != theirs.page_size or ours.size < theirs.size:
        raise InvalidPoolError(
            f"{entry.name!r}: host_pool must have the page size of {source.name!r} and at least its slots: "
            f"{ours.page_size} and {ours.size}, not {theirs.page_size} and {theirs.size}"
        )
