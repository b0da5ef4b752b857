"""Ownership of slots by the nodes of the tree, on the device and on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.pools.indices import HybridIndices
from hicache_storage.hybrid.radix.lru import DeviceLRUList, HostLRUList
from hicache_storage.hybrid.radix.nodes import SlotKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid.radix.lru import LRUList
    from hicache_storage.hybrid.radix.nodes import Node, Units
    from hicache_storage.hybrid.radix.tiers import DeviceSlots
    from hicache_storage.hybrid.radix.tree import RadixTree
    from hicache_storage.spec import PoolName

NO_SLOTS = torch.empty(0, dtype=torch.int64)


class SlotOwnership:
    """Slots of the nodes of a tree: every slot is held by one node, or freed.

    Args:
        tree: the tree of the nodes.
        device_pools: free the device slots; without states only KV.
        free_host: frees host slots.
        state_pool: name of the pool of states.
    """

    def __init__(
        self,
        tree: RadixTree,
        device_pools: Mapping[SlotKind, DeviceSlots],
        free_host: Callable[[HybridIndices], None],
        state_pool: PoolName,
    ) -> None:
        self.device = {kind: DeviceLRUList(kind) for kind in SlotKind}
        self.host = {kind: HostLRUList(kind) for kind in SlotKind}
        self.has_states = SlotKind.STATE in device_pools
        self._tree = tree
        self._device_pools = device_pools
        self._free_host = free_host
        self._state_pool = state_pool

    def has_state(self, node: Node) -> bool:
        """Return whether a request can continue after this node.

        Always if the model has no states.
        """
        return (
            not self.has_states
            or self.device[SlotKind.STATE].holds(node)
            or self.host[SlotKind.STATE].holds(node)
        )

    def transfer(self, rows: torch.Tensor, state: torch.Tensor | None, pages: int) -> HybridIndices:
        """Return the span of KV rows, and of a state after `pages` of their pages."""
        if state is None:
            return HybridIndices(rows)
        return HybridIndices(rows, {self._state_pool: state}, {self._state_pool: (pages,)})

    def states(self, slots: torch.Tensor) -> HybridIndices:
        """Return a span of state slots without rows."""
        return HybridIndices(
            NO_SLOTS, {self._state_pool: slots}, {self._state_pool: tuple(range(slots.numel()))}
        )

    def state_slots(self, indices: HybridIndices) -> dict[int, torch.Tensor]:
        """Return the state slots of a span, by their endpoints in pages."""
        ends = indices.endpoints.get(self._state_pool, ())
        return {
            end: slot.view(1)
            for end, slot in zip(ends, indices.side.get(self._state_pool, NO_SLOTS), strict=True)
        }

    def split(self, node: Node, end: int) -> Node:
        """Split a node before token `end`; returns the upper part."""
        upper = self._tree.split(node, end)
        for lru in (*self.device.values(), *self.host.values()):
            # A part that is locked stays out of the order, as its node is.
            lru.add_to_order(upper)
        return upper

    def insert(
        self, tier: Mapping[SlotKind, LRUList], node: Node, tokens: Units, rows: torch.Tensor
    ) -> Node:
        """Insert the pages of `tokens` below `node`, with their KV rows on a tier.

        Rows of pages that hold others already are freed.

        Returns:
            The node that ends with the last of the tokens, split where needed.
        """
        kv, end = tier[SlotKind.KV], node.end + len(tokens)
        while node.end < end:
            done = len(tokens) - (end - node.end)
            node = self._step(node, tokens, done)
            share = rows[done : done + len(node.tokens)]
            if kv.holds(node):
                self._free_others(tier, kv.of(node).indices, share)
            else:
                # A copy: the caller goes on to write the cache's rows into its own tensor.
                kv.add(node, share.clone())
        return node

    def insert_state(
        self, tier: Mapping[SlotKind, LRUList], node: Node, slot: torch.Tensor
    ) -> bool:
        """Insert a state on a tier where the node holds KV.

        False if it holds one there already; the slot is freed then.
        """
        if tier[SlotKind.STATE].holds(node):
            self.free(tier, SlotKind.STATE, slot)
            return False
        tier[SlotKind.STATE].add(node, slot)
        return True

    def drop(self, tier: Mapping[SlotKind, LRUList], kind: SlotKind, node: Node) -> int:
        """Free the slots of a kind that a node holds on a tier; returns their number."""
        if not tier[kind].holds(node):
            return 0
        slots = tier[kind].remove(node)
        self.free(tier, kind, slots)
        return slots.numel()

    def free(self, tier: Mapping[SlotKind, LRUList], kind: SlotKind, slots: torch.Tensor) -> None:
        """Free slots of a tier; without slots the pool is not called."""
        if not slots.numel():
            return
        if tier is self.device:
            self._device_pools[kind].free(slots)
        elif kind is SlotKind.KV:
            self._free_host(HybridIndices(slots))
        else:
            self._free_host(self.states(slots))

    def clear(self) -> None:
        """Free all slots, locked or not, before the tree is cleared."""
        for tier in (self.device, self.host):
            for kind, lru in tier.items():
                self.free(tier, kind, lru.remove_all(self._tree))

    def rows(self, tier: Mapping[SlotKind, LRUList], nodes: Sequence[Node]) -> torch.Tensor:
        """Return the KV rows of nodes on a tier, concatenated; all of them hold KV there."""
        held = [
            indices for node in nodes if (indices := tier[SlotKind.KV].of(node).indices) is not None
        ]
        assert len(held) == len(nodes)
        return torch.cat(held) if held else NO_SLOTS

    def _step(self, node: Node, tokens: Units, at: int) -> Node:
        """Find or make the child of `node` with pages of `tokens` from `at` on only."""
        child, known = self._tree.find_child(node, tokens, at)
        if child is None:
            return self._tree.append(node, tokens[at:])
        return child if known == len(child.tokens) else self.split(child, node.end + known)

    def _free_others(
        self, tier: Mapping[SlotKind, LRUList], held: torch.Tensor | None, rows: torch.Tensor
    ) -> None:
        """Free the pages of `rows` that are not those held."""
        # A request also inserts the rows that it has matched, which are the cache's own.
        assert held is not None
        pages = rows.view(-1, self._tree.page_size)
        self.free(tier, SlotKind.KV, pages[(pages != held.view_as(pages)).any(dim=1)].view(-1))
