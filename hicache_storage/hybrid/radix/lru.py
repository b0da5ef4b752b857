"""In which order nodes lose what they hold: least recently used first, never what is locked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.radix.nodes import Kind

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from hicache_storage.hybrid.radix.nodes import Holding, Node


class LRUList(ABC):
    """The nodes that hold one kind on one tier, the least recently used first.

    KV is used and locked along the whole path to the root, from the leaf up, so that a node stands behind all its
    descendants and the first in the list has none that hold KV on this tier. It is in use until it is unlocked, and not
    in the list meanwhile. A state stands for itself: using one says nothing about those of its ancestors. It is used
    when it is copied, so that its place is that of its last `touch`, locked or not.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self._order: OrderedDict[Node, None] = OrderedDict()
        self._held = self._locked = 0

    @abstractmethod
    def of(self, node: Node) -> Holding:
        """The holding of `node` that this list is about."""

    def __iter__(self) -> Iterator[Node]:
        return iter(self._order)

    @property
    def slots(self) -> int:
        """How many slots are held, locked or not."""
        return self._held

    def evictable_slots(self) -> int:
        """How many slots would be free if everything here were evicted."""
        return self._held - self._locked

    def holds(self, node: Node) -> bool:
        """Whether the node holds anything here."""
        return self.of(node).indices is not None

    def add(self, node: Node, indices: torch.Tensor) -> None:
        """Let a node hold slots from now on; it held none."""
        self.of(node).indices = indices
        self._held += indices.numel()
        self.settle(node)

    def settle(self, node: Node) -> None:
        """Take up a node that came to its holding by a split."""
        if self.holds(node) and not self._is_away(node):
            self._order[node] = None
        self.touch(node)

    def take(self, node: Node) -> torch.Tensor:
        """End what a node holds, which is not locked; returns the slots."""
        holding = self.of(node)
        assert holding.indices is not None
        assert not holding.locks, f"node {node.id} is locked"
        indices, holding.indices = holding.indices, None
        self._held -= indices.numel()
        del self._order[node]
        return indices

    def drain(self, nodes: Iterable[Node]) -> torch.Tensor:
        """End what all these nodes hold, locked or not; they are all there are. Returns the slots."""
        held = [indices for node in nodes if (indices := self.of(node).indices) is not None]
        for node in nodes:
            self.of(node).indices = None
        self._order.clear()
        self._held = self._locked = 0
        return torch.cat(held) if held else torch.empty(0, dtype=torch.int64)

    def touch(self, node: Node) -> None:
        """Make what a use of `node` uses the most recently used."""
        for each in self._used_with(node):
            if each in self._order:
                self._order.move_to_end(each)

    def lock(self, node: Node) -> None:
        """Keep what a use of `node` uses from being evicted; it is all held. Locks are counted."""
        for each in self._used_with(node):
            holding = self.of(each)
            assert holding.indices is not None
            self._locked += 0 if holding.locks else holding.indices.numel()
            holding.locks += 1
            if self._is_away(each):
                self._order.pop(each, None)

    def unlock(self, node: Node) -> None:
        """Undo one `lock` of the node; KV that has no lock left is the most recently used."""
        for each in self._used_with(node):
            holding = self.of(each)
            assert holding.locks > 0, f"node {each.id} is not locked"
            assert holding.indices is not None
            holding.locks -= 1
            self._locked -= 0 if holding.locks else holding.indices.numel()
            if not self._is_away(each) and each not in self._order:
                self._order[each] = None

    def oldest(self) -> Node | None:
        """The first to be evicted; for KV a node without descendants that hold KV here."""
        return next((node for node in self._order if not self.of(node).locks), None)

    def demote(self, node: Node) -> None:
        """Make a node the first to be evicted; for KV only one without descendants that hold KV here."""
        if node in self._order:
            self._order.move_to_end(node, last=False)

    def _is_away(self, node: Node) -> bool:
        """Whether it is not in the list for being locked."""
        return self.kind is Kind.KV and self.of(node).locks > 0

    def _used_with(self, node: Node) -> Iterable[Node]:
        return node.upward() if self.kind is Kind.KV else (node,)


class DeviceLRUList(LRUList):
    """What nodes hold in device memory."""

    def of(self, node: Node) -> Holding:
        return node.device[self.kind]


class HostLRUList(LRUList):
    """What nodes hold in host memory."""

    def of(self, node: Node) -> Holding:
        return node.host[self.kind]
