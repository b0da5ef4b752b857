"""Eviction: KV from the leaves up; a state can be evicted alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.radix.nodes import SlotKind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.hybrid.radix.lru import LRUList
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.slot_ownership import SlotOwnership
    from hicache_storage.hybrid.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class Evicted:
    """Number of slots that were freed."""

    tokens: int
    states: int


class Evictor:
    """Frees the least recently used slots that are not locked.

    A node that loses its device slots stays in the tree if the host has a copy, and is removed
    otherwise. A node that loses its host slots stays if it is on the device.

    Args:
        save: called with a node before it loses device slots of which the host has no copy; None
            drops them.
    """

    def __init__(
        self, tree: RadixTree, ownership: SlotOwnership, save: Callable[[Node], object] | None
    ) -> None:
        self._tree = tree
        self._ownership = ownership
        self._save = save

    def device(self, tokens: int, states: int) -> Evicted:
        """Free device slots, KV first, whole nodes at a time.

        Fewer if the others are locked.
        """
        return self._evict(self._ownership.device, tokens, states)

    def host(self, tokens: int, states: int) -> Evicted:
        """Free host slots in the same way."""
        return self._evict(self._ownership.host, tokens, states)

    def _evict(self, tier: Mapping[SlotKind, LRUList], tokens: int, states: int) -> Evicted:
        freed_tokens = freed_states = 0
        while freed_tokens < tokens and (node := tier[SlotKind.KV].least_recent()):
            # A state is useless on a tier without the KV before it, so it is freed with the KV.
            self._keep_copy(tier, node)
            freed_states += self._ownership.drop(tier, SlotKind.STATE, node)
            freed_tokens += self._ownership.drop(tier, SlotKind.KV, node)
            self._prune(node)
        while freed_states < states and (node := tier[SlotKind.STATE].least_recent()):
            self._keep_copy(tier, node)
            # The KV stays: a prefix that ends at the state of a descendant needs it.
            freed_states += self._ownership.drop(tier, SlotKind.STATE, node)
            self._demote_if_useless(node)
        return Evicted(freed_tokens, freed_states)

    def _keep_copy(self, tier: Mapping[SlotKind, LRUList], node: Node) -> None:
        if self._save and tier is self._ownership.device:
            self._save(node)

    def _prune(self, node: Node) -> None:
        """Remove a node that holds no KV any more."""
        ownership, parent = self._ownership, node.parent
        if ownership.device[SlotKind.KV].holds(node) or ownership.host[SlotKind.KV].holds(node):
            self._demote_if_useless(node)
        elif parent:
            self._tree.remove(node)
            self._demote_if_useless(parent)

    def _demote_if_useless(self, node: Node) -> None:
        """Make a node the next to evict if no request can continue there or below."""
        if node.children or self._ownership.has_state(node):
            return
        for tier in (self._ownership.device, self._ownership.host):
            tier[SlotKind.KV].demote(node)
