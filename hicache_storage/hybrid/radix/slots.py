"""Slots of the tree's nodes on the device and on the host: their owners, locks and eviction."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

import torch

from hicache_storage.hybrid.pools import NO_SLOTS, HybridIndices
from hicache_storage.hybrid.radix.tree import SlotKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from hicache_storage.hybrid.radix.tree import HeldSlots, Node, RadixTree, Tokens
    from hicache_storage.pools import SlotAllocator


class LRUList:
    """Nodes that hold one kind of slots on one tier, the least recently used first.

    KV is used and locked along the whole path to the root, from the leaf up. So a node comes after
    all its descendants, and the first in the list has no descendant that holds KV on this tier. A
    locked node counts as used until it is unlocked, and is not in the list meanwhile.

    A state is used alone, without those of its ancestors. It is used when it is copied, so that its
    position is that of its last `touch`, locked or not.

    Args:
        tier: "device" or "host".
        kind: the kind of slots.
        free: frees slots in their pool.
    """

    def __init__(self, tier: str, kind: SlotKind, free: Callable[[torch.Tensor], object]) -> None:
        self.tier = tier
        self.kind = kind
        self._free = free
        self.order: OrderedDict[Node, None] = OrderedDict()
        self.slots = 0
        """Number of slots that are held, locked or not."""
        self._locked = 0

    def of(self, node: Node) -> HeldSlots:
        """Return the slots of `node` that this list orders."""
        held: dict[SlotKind, HeldSlots] = getattr(node, self.tier)
        return held[self.kind]

    def __iter__(self) -> Iterator[Node]:
        return iter(self.order)

    @property
    def evictable_slots(self) -> int:
        """Number of slots that are not locked."""
        return self.slots - self._locked

    def holds(self, node: Node) -> bool:
        """Return whether the node holds slots here."""
        return self.of(node).indices is not None

    def add(self, node: Node, indices: torch.Tensor) -> None:
        """Add slots to a node that holds none."""
        self.of(node).indices = indices
        self.slots += indices.numel()
        self.add_to_order(node)

    def add_to_order(self, node: Node) -> None:
        """Add a node that holds slots to the order, as most recently used."""
        if self.holds(node) and not self._is_excluded(node):
            self.order[node] = None
        # For KV: the ancestors come after their new descendant again.
        self.touch(node)

    def free(self, slots: torch.Tensor) -> None:
        """Free slots; without slots the pool is not called."""
        if slots.numel():
            self._free(slots)

    def drop(self, node: Node) -> int:
        """Free the slots of a node that is not locked; returns their number."""
        held = self.of(node)
        indices = held.indices
        if indices is None:
            return 0
        assert not held.locks, f"node {node.id} is locked"
        held.indices = None
        self.slots -= indices.numel()
        del self.order[node]
        self.free(indices)
        return indices.numel()

    def drop_all(self, nodes: Iterable[Node]) -> None:
        """Free the slots of all nodes of the tree, locked or not."""
        held = [indices for node in nodes if (indices := self.of(node).indices) is not None]
        for node in nodes:
            self.of(node).indices = None
        self.order.clear()
        self.slots = 0
        self._locked = 0
        self.free(torch.cat(held) if held else NO_SLOTS)

    def touch(self, node: Node) -> None:
        """Make a node, for KV its whole path, the most recently used."""
        for each in self._used_with(node):
            if each in self.order:
                self.order.move_to_end(each)

    def lock(self, node: Node) -> None:
        """Keep a node, for KV its whole path, from being evicted. Locks are counted."""
        for each in self._used_with(node):
            held = self.of(each)
            assert held.indices is not None
            self._locked += 0 if held.locks else held.indices.numel()
            held.locks += 1
            # A locked node would be skipped by every search for the least recently used one.
            if self._is_excluded(each):
                self.order.pop(each, None)

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the node.

        KV without further locks becomes the most recently used.
        """
        for each in self._used_with(node):
            held = self.of(each)
            assert held.locks > 0, f"node {each.id} is not locked"
            assert held.indices is not None
            held.locks -= 1
            self._locked -= 0 if held.locks else held.indices.numel()
            if not self._is_excluded(each) and each not in self.order:
                self.order[each] = None

    def least_recent(self) -> Node | None:
        """Return the first node to evict; for KV it has no descendants that hold KV here."""
        # Locked KV is not in the order, but locked states are.
        return next((node for node in self.order if not self.of(node).locks), None)

    def demote(self, node: Node) -> None:
        """Make a node the first to be evicted.

        For KV only one without descendants that hold KV here.
        """
        if node in self.order:
            self.order.move_to_end(node, last=False)

    def _is_excluded(self, node: Node) -> bool:
        """Return whether a lock keeps the node out of the list."""
        return self.kind is SlotKind.KV and self.of(node).locks > 0

    def _used_with(self, node: Node) -> Iterable[Node]:
        return node.upward() if self.kind is SlotKind.KV else (node,)


Tier: TypeAlias = "Mapping[SlotKind, LRUList]"
"""The slots of the device or of the host."""


class SlotLocks:
    """Locks that end together: for each list the node whose slots they keep; None for none."""

    def __init__(self, nodes: Mapping[LRUList, Node | None]) -> None:
        self.nodes = {lru: node for lru, node in nodes.items() if node is not None}
        for lru, node in self.nodes.items():
            lru.lock(node)

    def release(self, *lists: LRUList) -> None:
        """End the locks on some of the lists, by default on all."""
        for lru in lists or tuple(self.nodes):
            node = self.nodes.pop(lru, None)
            if node is not None:
                lru.unlock(node)


class SlotOwnership:
    """Slots of the nodes of a tree: every slot is held by one node, or freed.

    Args:
        tree: the tree of the nodes.
        device_pools: free the device slots; without states only KV.
        free_host: frees host slots.
    """

    def __init__(
        self,
        tree: RadixTree,
        device_pools: Mapping[SlotKind, SlotAllocator],
        free_host: Callable[[HybridIndices], None],
    ) -> None:
        self.device = {
            kind: LRUList("device", kind, partial(self._free_on_device, kind)) for kind in SlotKind
        }
        self.host = {
            kind: LRUList("host", kind, partial(self._free_on_host, kind)) for kind in SlotKind
        }
        self.tiers: tuple[Tier, Tier] = (self.device, self.host)
        self.has_states = SlotKind.STATE in device_pools
        self._tree = tree
        self._device_pools = device_pools
        self._free_host = free_host

    def has_state(self, node: Node) -> bool:
        """Return whether a request can continue after this node.

        Always if the model has no states.
        """
        return not self.has_states or any(tier[SlotKind.STATE].holds(node) for tier in self.tiers)

    def transfer(self, rows: torch.Tensor, state: torch.Tensor | None) -> HybridIndices:
        """Return the span of KV rows, and of a state after the last of them."""
        if state is None:
            return HybridIndices(rows)
        return HybridIndices(rows, state, (rows.numel() // self._tree.page_size,))

    def states(self, slots: torch.Tensor) -> HybridIndices:
        """Return a span of state slots without rows."""
        return HybridIndices(states=slots, endpoints=(0,) * slots.numel())

    def split(self, node: Node, end: int) -> Node:
        """Split a node before token `end`; returns the upper part."""
        upper = self._tree.split(node, end)
        for tier in self.tiers:
            for lru in tier.values():
                # A part that is locked stays out of the order, as its node is.
                lru.add_to_order(upper)
        return upper

    def insert(self, tier: Tier, node: Node, tokens: Tokens, rows: torch.Tensor) -> Node:
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
            held = kv.of(node).indices
            if held is None:
                # A copy: the caller goes on to write the cache's rows into its own tensor.
                kv.add(node, share.clone())
            else:
                # A request also inserts the rows that it has matched, which are the cache's own.
                pages = share.view(-1, self._tree.page_size)
                kv.free(pages[(pages != held.view_as(pages)).any(dim=1)].view(-1))
        return node

    def insert_state(self, tier: Tier, node: Node, slot: torch.Tensor) -> None:
        """Insert a state on a tier where the node holds KV.

        The slot is freed if it holds one there already.
        """
        if tier[SlotKind.STATE].holds(node):
            tier[SlotKind.STATE].free(slot)
        else:
            tier[SlotKind.STATE].add(node, slot)

    def clear(self) -> None:
        """Free all slots, locked or not, before the tree is cleared."""
        for tier in self.tiers:
            for lru in tier.values():
                lru.drop_all(self._tree)

    def rows(self, tier: Tier, nodes: Sequence[Node]) -> torch.Tensor:
        """Return the KV rows of nodes on a tier, concatenated; all of them hold KV there."""
        held = [
            indices for node in nodes if (indices := tier[SlotKind.KV].of(node).indices) is not None
        ]
        assert len(held) == len(nodes)
        return torch.cat(held) if held else NO_SLOTS

    def evict(
        self, tier: Tier, tokens: int, states: int, save: Callable[[Node], object] | None = None
    ) -> None:
        """Free the least recently used slots of a tier that are not locked, KV first.

        KV goes in whole nodes, from the leaves up; a state can be evicted alone. Fewer are freed if
        the others are locked. A node without KV on either tier is removed from the tree.

        Args:
            save: called with a node before it loses slots of which the host may have no copy.
        """
        kv, state = tier[SlotKind.KV], tier[SlotKind.STATE]
        freed_tokens = freed_states = 0
        while freed_tokens < tokens and (node := kv.least_recent()):
            if save:
                save(node)
            # A state is useless on a tier without the KV before it, so it is freed with the KV.
            freed_states += state.drop(node)
            freed_tokens += kv.drop(node)
            self._prune(node)
        while freed_states < states and (node := state.least_recent()):
            if save:
                save(node)
            # The KV stays: a prefix that ends at the state of a descendant needs it.
            freed_states += state.drop(node)
            self._demote_if_useless(node)

    def _prune(self, node: Node) -> None:
        """Remove a node that holds no KV any more."""
        parent = node.parent
        if any(tier[SlotKind.KV].holds(node) for tier in self.tiers):
            self._demote_if_useless(node)
        elif parent:
            self._tree.remove(node)
            self._demote_if_useless(parent)

    def _demote_if_useless(self, node: Node) -> None:
        """Make a node the next to evict if no request can continue there or below."""
        if not node.children and not self.has_state(node):
            for tier in self.tiers:
                tier[SlotKind.KV].demote(node)

    def _step(self, node: Node, tokens: Tokens, at: int) -> Node:
        """Find or make the child of `node` with pages of `tokens` from `at` on only."""
        child, known = self._tree.find_child(node, tokens, at)
        if child is None:
            return self._tree.append(node, tokens[at:])
        return child if known == len(child.tokens) else self.split(child, node.end + known)

    def _free_on_device(self, kind: SlotKind, slots: torch.Tensor) -> None:
        self._device_pools[kind].free(slots)

    def _free_on_host(self, kind: SlotKind, slots: torch.Tensor) -> None:
        self._free_host(HybridIndices(slots) if kind is SlotKind.KV else self.states(slots))
