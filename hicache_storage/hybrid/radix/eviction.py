"""Making room: leaves lose their KV first, and a state can go alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.radix.nodes import Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from hicache_storage.hybrid.radix.lru import LRUList
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.residency import Residency
    from hicache_storage.hybrid.radix.tree import RadixTree


@dataclass(frozen=True, slots=True)
class Evicted:
    """Slots that were given back."""

    tokens: int
    states: int


class Eviction:
    """Takes slots from what was used least recently and is not locked.

    What leaves the device stays known where the host has a copy, and is forgotten otherwise; what leaves the host stays
    on the device if it is there.

    Args:
        save: called with a node before the device loses something of it that the host does not have; None where
            that is simply lost.
    """

    def __init__(self, tree: RadixTree, residency: Residency, save: Callable[[Node], object] | None) -> None:
        self._tree, self._residency, self._save = tree, residency, save

    def device(self, tokens: int, states: int) -> Evicted:
        """Free device slots, KV first; as many as asked for where so many can go, a node's worth at once."""
        return self._evict(self._residency.device, tokens, states)

    def host(self, tokens: int, states: int) -> Evicted:
        """Free host slots in the same way."""
        return self._evict(self._residency.host, tokens, states)

    def _evict(self, tier: Mapping[Kind, LRUList], tokens: int, states: int) -> Evicted:
        freed_tokens = freed_states = 0
        while freed_tokens < tokens and (node := tier[Kind.KV].oldest()):
            self._keep_copy(tier, node)
            freed_states += self._residency.drop(tier, Kind.STATE, node)
            freed_tokens += self._residency.drop(tier, Kind.KV, node)
            self._prune(node)
        while freed_states < states and (node := tier[Kind.STATE].oldest()):
            self._keep_copy(tier, node)
            freed_states += self._residency.drop(tier, Kind.STATE, node)
            self._demote_if_useless(node)
        return Evicted(freed_tokens, freed_states)

    def _keep_copy(self, tier: Mapping[Kind, LRUList], node: Node) -> None:
        if self._save and tier is self._residency.device:
            self._save(node)

    def _prune(self, node: Node) -> None:
        """Forget a node that holds no KV any more."""
        residency, parent = self._residency, node.parent
        if residency.device[Kind.KV].holds(node) or residency.host[Kind.KV].holds(node):
            self._demote_if_useless(node)
        elif parent:
            self._tree.remove(node)
            self._demote_if_useless(parent)

    def _demote_if_useless(self, node: Node) -> None:
        """Let a leaf go first that no request can go on from: its state is gone, and nothing follows it."""
        if node.children or self._residency.has_state(node):
            return
        for tier in (self._residency.device, self._residency.host):
            tier[Kind.KV].demote(node)
