"""LRU lists: the eviction order of nodes on a tier.

Locked nodes are never evicted.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.radix.nodes import SlotKind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicache_storage.hybrid.radix.nodes import HeldSlots, Node


class LRUList(ABC):
    """Nodes that hold one kind of slots on one tier, the least recently used first.

    KV is used and locked along the whole path to the root, from the leaf up. So a node comes after
    all its descendants, and the first in the list has no descendant that holds KV on this tier. A
    locked node counts as used until it is unlocked, and is not in the list meanwhile.

    A state is used alone, without those of its ancestors. It is used when it is copied, so that its
    position is that of its last `touch`, locked or not.
    """

    def __init__(self, kind: SlotKind) -> None:
        self.kind = kind
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._held = 0
        self._locked = 0

    @abstractmethod
    def of(self, node: Node) -> HeldSlots:
        """Return the slots of `node` that this list orders."""

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    @property
    def slots(self) -> int:
        """Number of slots that are held, locked or not."""
        return self._held

    def evictable_slots(self) -> int:
        """Return the number of slots that are not locked."""
        return self._held - self._locked

    def holds(self, node: Node) -> bool:
        """Return whether the node holds slots here."""
        return self.of(node).indices is not None

    def add(self, node: Node, indices: torch.Tensor) -> None:
        """Add slots to a node that holds none."""
        self.of(node).indices = indices
        self._held += indices.numel()
        self.add_to_order(node)

    def add_to_order(self, node: Node) -> None:
        """Add a node that holds slots to the order, as most recently used."""
        if self.holds(node) and not self._is_excluded(node):
            self._order[node] = None
        # For KV: the ancestors come after their new descendant again.
        self.touch(node)

    def remove(self, node: Node) -> torch.Tensor:
        """Remove the slots of a node that is not locked; returns them."""
        held = self.of(node)
        assert held.indices is not None
        assert not held.locks, f"node {node.id} is locked"
        indices = held.indices
        held.indices = None
        self._held -= indices.numel()
        del self._order[node]
        return indices

    def remove_all(self, nodes: Iterable[Node]) -> torch.Tensor:
        """Remove the slots of all nodes, locked or not; returns them.

        Args:
            nodes: all nodes of the tree.
        """
        held = [indices for node in nodes if (indices := self.of(node).indices) is not None]
        for node in nodes:
            self.of(node).indices = None
        self._order.clear()
        self._held = 0
        self._locked = 0
        return torch.cat(held) if held else torch.empty(0, dtype=torch.int64)

    def touch(self, node: Node) -> None:
        """Make a node, for KV its whole path, the most recently used."""
        for each in self._used_with(node):
            if each in self._order:
                self._order.move_to_end(each)

    def lock(self, node: Node) -> None:
        """Keep a node, for KV its whole path, from being evicted. Locks are counted."""
        for each in self._used_with(node):
            held = self.of(each)
            assert held.indices is not None
            self._locked += 0 if held.locks else held.indices.numel()
            held.locks += 1
            # A locked node would be skipped by every search for the least recently used one.
            if self._is_excluded(each):
                self._order.pop(each, None)

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
            if not self._is_excluded(each) and each not in self._order:
                self._order[each] = None

    def least_recent(self) -> Node | None:
        """Return the first node to evict; for KV it has no descendants that hold KV here."""
        # Locked KV is not in the order, but locked states are.
        return next((node for node in self._order if not self.of(node).locks), None)

    def demote(self, node: Node) -> None:
        """Make a node the first to be evicted.

        For KV only one without descendants that hold KV here.
        """
        if node in self._order:
            self._order.move_to_end(node, last=False)

    def _is_excluded(self, node: Node) -> bool:
        """Return whether a lock keeps the node out of the list."""
        return self.kind is SlotKind.KV and self.of(node).locks > 0

    def _used_with(self, node: Node) -> Iterable[Node]:
        return node.upward() if self.kind is SlotKind.KV else (node,)


class DeviceLRUList(LRUList):
    """LRU list of device slots."""

    def of(self, node: Node) -> HeldSlots:
        return node.device[self.kind]


class HostLRUList(LRUList):
    """LRU list of host slots."""

    def of(self, node: Node) -> HeldSlots:
        return node.host[self.kind]
