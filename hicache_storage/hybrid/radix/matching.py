"""Finding prefixes, and finding them again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.radix.nodes import Kind, Node
from hicache_storage.hybrid.radix.results import MatchResult, StalePrefixError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.hybrid.radix.residency import Residency
    from hicache_storage.hybrid.radix.results import Prefix
    from hicache_storage.hybrid.radix.tree import RadixTree


class Matching:
    """Reads the tree; only `locate` may split a node."""

    def __init__(self, tree: RadixTree, residency: Residency) -> None:
        self._tree, self._residency = tree, residency

    def match(self, tokens: Sequence[int], namespace: str | None, *, device_only: bool) -> MatchResult:
        """The longest prefix whose KV is all there and that a request can go on from."""
        node, known = self._tree.find(self._tree.root(namespace), self._tree.whole_pages(tokens))
        while node.parent and not self._usable(node, known, device_only=device_only):
            node, known = node.parent, node.start
        return self._described(node, known)

    def locate(self, prefix: Prefix) -> Node:
        """The node that ends where a prefix does, cut there if need be; for an empty prefix some root.

        Raises:
            StalePrefixError: the prefix is not as it was described.
        """
        if not prefix.length:
            return Node(prefix.node_id, ())
        node = self._tree.node(prefix.node_id)
        while node and node.parent and node.start >= prefix.length:
            node = node.parent
        if node is None or not self._unchanged(self._described(node, prefix.length), prefix):
            raise StalePrefixError(f"the prefix of {prefix.length} tokens has changed since it was found; match again")
        return self._residency.split(node, prefix.length) if prefix.length < node.end else node

    def _usable(self, node: Node, known: int, *, device_only: bool) -> bool:
        device = self._residency.device
        if device_only and not device[Kind.KV].holds(node):
            return False
        if not self._residency.has_states:
            return True
        on_device = device[Kind.STATE].holds(node)
        return known == node.end and (on_device or (not device_only and self._residency.has_state(node)))

    def _described(self, node: Node, length: int) -> MatchResult:
        """The first `length` tokens of the path to `node`; less than all of it only where no state is needed."""
        device = self._residency.device
        path = [each for each in reversed(list(node.upward())) if device[Kind.KV].holds(each)]
        rows = self._residency.rows(device, path)[:length]
        state = device[Kind.STATE].of(node).indices
        on_host = state is None and self._residency.host[Kind.STATE].holds(node)
        return MatchResult(
            length, rows, length - rows.numel(), node.id, None if state is None else int(state[0]), state_on_host=on_host
        )

    def _unchanged(self, now: MatchResult, before: Prefix) -> bool:
        """Whether KV is where it was, and for a match the state as well."""
        if now.host_length != before.host_length or not torch.equal(now.device_indices, before.device_indices):
            return False
        if not isinstance(before, MatchResult):
            return True
        return (now.state_slot, now.state_on_host) == (before.state_slot, before.state_on_host)
