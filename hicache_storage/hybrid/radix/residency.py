"""Which node holds which slots, on the device and on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.indices import HybridIndices
from hicache_storage.hybrid.radix.lru import DeviceLRUList, HostLRUList
from hicache_storage.hybrid.radix.nodes import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid.radix.lru import LRUList
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.tiers import DeviceSlots
    from hicache_storage.hybrid.radix.tree import RadixTree
    from hicache_storage.hybrid.radix.units import Units
    from hicache_storage.spec import PoolName

NO_SLOTS = torch.empty(0, dtype=torch.int64)


class Residency:
    """The slots that belong to the nodes of a tree; every slot that comes in is held by one node or given back.

    Args:
        tree: whose nodes.
        device_pools: where device slots are given back; without states only KV.
        free_host: gives host slots back.
        state_pool: the name of the pool of states.
    """

    def __init__(
        self,
        tree: RadixTree,
        device_pools: Mapping[Kind, DeviceSlots],
        free_host: Callable[[HybridIndices], None],
        state_pool: PoolName,
    ) -> None:
        self.device = {kind: DeviceLRUList(kind) for kind in Kind}
        self.host = {kind: HostLRUList(kind) for kind in Kind}
        self.has_states = Kind.STATE in device_pools
        self._tree, self._device_pools, self._free_host, self._state_pool = tree, device_pools, free_host, state_pool

    def has_state(self, node: Node) -> bool:
        """Whether a request can go on after this node: always, where the model has no states."""
        return not self.has_states or self.device[Kind.STATE].holds(node) or self.host[Kind.STATE].holds(node)

    def transfer(self, rows: torch.Tensor, state: torch.Tensor | None, pages: int) -> HybridIndices:
        """Rows, and a state after `pages` of their pages, as the controller takes them."""
        if state is None:
            return HybridIndices(rows)
        return HybridIndices(rows, {self._state_pool: state}, {self._state_pool: (pages,)})

    def states(self, slots: torch.Tensor) -> HybridIndices:
        """State slots without rows."""
        return HybridIndices(NO_SLOTS, {self._state_pool: slots}, {self._state_pool: tuple(range(slots.numel()))})

    def state_slots(self, indices: HybridIndices) -> dict[int, torch.Tensor]:
        """The state slots in `indices` by the pages that they come after."""
        ends = indices.endpoints.get(self._state_pool, ())
        return {end: slot.view(1) for end, slot in zip(ends, indices.side.get(self._state_pool, NO_SLOTS), strict=True)}

    def split(self, node: Node, end: int) -> Node:
        """Cut a node in two before token `end`; returns the upper part."""
        upper = self._tree.split(node, end)
        for lru in (*self.device.values(), *self.host.values()):
            lru.settle(upper)
        return upper

    def lay(self, tier: Mapping[Kind, LRUList], node: Node, tokens: Units, rows: torch.Tensor) -> Node:
        """Let the pages of `tokens` below `node` hold KV on a tier; rows they do not need go back to their pool.

        Returns:
            The node that ends with the last of the tokens, split off where it has to be.
        """
        kv, end = tier[Kind.KV], node.end + len(tokens)
        while node.end < end:
            done = len(tokens) - (end - node.end)
            node = self._step(node, tokens, done)
            share = rows[done : done + len(node.tokens)]
            if kv.holds(node):
                self._give_back_others(tier, kv.of(node).indices, share)
            else:
                kv.add(node, share.clone())
        return node

    def place_state(self, tier: Mapping[Kind, LRUList], node: Node, slot: torch.Tensor) -> bool:
        """Let a node hold a state on a tier where it holds KV; False, and the slot given back, if it has one."""
        if tier[Kind.STATE].holds(node):
            self.give_back(tier, Kind.STATE, slot)
            return False
        tier[Kind.STATE].add(node, slot)
        return True

    def drop(self, tier: Mapping[Kind, LRUList], kind: Kind, node: Node) -> int:
        """Give back what a node holds of a kind on a tier, if anything; returns the number of slots."""
        if not tier[kind].holds(node):
            return 0
        slots = tier[kind].take(node)
        self.give_back(tier, kind, slots)
        return slots.numel()

    def give_back(self, tier: Mapping[Kind, LRUList], kind: Kind, slots: torch.Tensor) -> None:
        """Return slots to the pool of a tier; no slots are no call."""
        if not slots.numel():
            return
        if tier is self.device:
            self._device_pools[kind].free(slots)
        elif kind is Kind.KV:
            self._free_host(HybridIndices(slots))
        else:
            self._free_host(self.states(slots))

    def clear(self) -> None:
        """Give back everything, locked or not; for a tree that is forgotten."""
        for tier in (self.device, self.host):
            for kind, lru in tier.items():
                self.give_back(tier, kind, lru.drain(self._tree))

    def rows(self, tier: Mapping[Kind, LRUList], nodes: Sequence[Node]) -> torch.Tensor:
        """The KV rows of nodes that hold them on a tier, one after the other."""
        held = [indices for node in nodes if (indices := tier[Kind.KV].of(node).indices) is not None]
        assert len(held) == len(nodes)
        return torch.cat(held) if held else NO_SLOTS

    def _step(self, node: Node, tokens: Units, at: int) -> Node:
        """The child of `node` with the pages of `tokens` from `at` on and no others."""
        child, known = self._tree.find_child(node, tokens, at)
        if child is None:
            return self._tree.append(node, tokens[at:])
        return child if known == len(child.tokens) else self.split(child, node.end + known)

    def _give_back_others(self, tier: Mapping[Kind, LRUList], held: torch.Tensor | None, rows: torch.Tensor) -> None:
        """Return the pages of rows that are not those held."""
        assert held is not None
        pages = rows.view(-1, self._tree.page_size)
        self.give_back(tier, Kind.KV, pages[(pages != held.view_as(pages)).any(dim=1)].view(-1))
