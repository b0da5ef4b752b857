"""Match of prefixes in the tree, and locks that keep them on their tiers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.radix.nodes import Node, SlotKind
from hicache_storage.hybrid.radix.results import MatchResult, PrefixLock, StalePrefixError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.hybrid.radix.results import Prefix
    from hicache_storage.hybrid.radix.slot_ownership import SlotOwnership
    from hicache_storage.hybrid.radix.tree import RadixTree


class PrefixMatcher:
    """Finds prefixes in the tree; only `locate` may split a node."""

    def __init__(self, tree: RadixTree, ownership: SlotOwnership) -> None:
        self._tree = tree
        self._ownership = ownership

    def match(
        self, tokens: Sequence[int], namespace: str | None, *, device_only: bool
    ) -> MatchResult:
        """Return the longest prefix with complete KV from which a request can continue."""
        node, known = self._tree.find(self._tree.root(namespace), self._tree.whole_pages(tokens))
        while node.parent and not self._usable(node, known, device_only=device_only):
            node, known = node.parent, node.start
        return self._describe(node, known)

    def locate(self, prefix: Prefix) -> Node:
        """Return the node that ends where a prefix does, split there if needed.

        For an empty prefix it is some root.

        Raises:
            StalePrefixError: the prefix is not as it was described.
        """
        if not prefix.length:
            # Not looked up: no lock needs the root, and the tree may have dropped it.
            return Node(prefix.node_id, ())
        # The node may have been split since: its upper parts then end where the prefix does.
        node = self._tree.node(prefix.node_id)
        while node and node.parent and node.start >= prefix.length:
            node = node.parent
        if node is None or not self._unchanged(self._describe(node, prefix.length), prefix):
            raise StalePrefixError(
                f"the prefix of {prefix.length} tokens has changed since it was found; match again"
            )
        return self._ownership.split(node, prefix.length) if prefix.length < node.end else node

    def _usable(self, node: Node, known: int, *, device_only: bool) -> bool:
        device = self._ownership.device
        if device_only and not device[SlotKind.KV].holds(node):
            return False
        if not self._ownership.has_states:
            return True
        on_device = device[SlotKind.STATE].holds(node)
        # The state of a node is the one after its last token: a partial match cannot use it.
        if known != node.end:
            return False
        return on_device or (not device_only and self._ownership.has_state(node))

    def _describe(self, node: Node, length: int) -> MatchResult:
        """Describe the first `length` tokens of the path to `node`.

        Less than the whole path only where no state is needed.
        """
        device = self._ownership.device
        # A prefix of the path: a node is on a tier only if its parent is.
        path = [each for each in reversed(list(node.upward())) if device[SlotKind.KV].holds(each)]
        rows = self._ownership.rows(device, path)[:length]
        state = device[SlotKind.STATE].of(node).indices
        on_host = state is None and self._ownership.host[SlotKind.STATE].holds(node)
        return MatchResult(
            length,
            rows,
            length - rows.numel(),
            node.id,
            None if state is None else int(state[0]),
            state_on_host=on_host,
        )

    def _unchanged(self, now: MatchResult, before: Prefix) -> bool:
        """Return whether KV and, for a match, the state are in the same slots."""
        if now.host_length != before.host_length:
            return False
        if not torch.equal(now.device_indices, before.device_indices):
            return False
        if not isinstance(before, MatchResult):
            return True
        return (now.state_slot, now.state_on_host) == (before.state_slot, before.state_on_host)


@dataclass(slots=True)
class HeldLock:
    """Nodes that one lock keeps."""

    node: Node
    """The node at the end of its prefix."""
    device: Node | None = None
    """The lowest node whose KV it keeps on the device."""
    host: Node | None = None
    """The lowest node whose KV it keeps on the host."""
    device_state: bool = False
    host_state: bool = False


class PrefixLocks:
    """All locks that are held."""

    def __init__(self, ownership: SlotOwnership) -> None:
        self._ownership = ownership
        self._held: dict[int, HeldLock] = {}
        self._ids = count(1)

    def __len__(self) -> int:
        return len(self._held)

    def lock(self, node: Node, *, with_state: bool) -> PrefixLock:
        """Keep the KV up to the end of `node` on its tiers, and its state if `with_state`."""
        held = HeldLock(node)
        device, host = self._ownership.device, self._ownership.host
        kv, state = SlotKind.KV, SlotKind.STATE
        held.device_state = with_state and device[state].holds(node)
        # The state on the host is only locked if it has to be loaded.
        held.host_state = with_state and not held.device_state and host[state].holds(node)
        held.device = next((each for each in node.upward() if device[kv].holds(each)), None)
        needs_host = held.device is not node or held.host_state
        held.host = node if node.parent and needs_host else None
        self._apply(held)
        lock = PrefixLock(next(self._ids), node.end)
        self._held[lock.lock_id] = held
        return lock

    def held(self, lock: PrefixLock) -> HeldLock:
        """Return the nodes that a lock keeps.

        Raises:
            StalePrefixError: it was unlocked.
        """
        try:
            return self._held[lock.lock_id]
        except KeyError:
            raise StalePrefixError(
                f"lock {lock.lock_id} is not held; unlock a lock once, and do not use it after that"
            ) from None

    def move_to_device(self, lock: PrefixLock) -> None:
        """Keep the KV on the device instead of the host, once it has slots there."""
        before = self.held(lock)
        after = HeldLock(before.node, before.node if before.node.parent else None)
        after.device_state = before.device_state
        # The new lock comes first, so that nothing of the prefix is unlocked in between.
        self._apply(after)
        self._undo(before)
        self._held[lock.lock_id] = after

    def release_state(self, lock: PrefixLock) -> None:
        """Keep only the KV."""
        held = self.held(lock)
        if held.device_state:
            # The request has copied it; the slot may go to another state while the request runs on.
            held.device_state = False
            self._ownership.device[SlotKind.STATE].unlock(held.node)

    def unlock(self, lock: PrefixLock) -> None:
        """End a lock; KV that has no other lock becomes the most recently used.

        Raises:
            StalePrefixError: it was unlocked before.
        """
        self._undo(self.held(lock))
        del self._held[lock.lock_id]

    def _apply(self, held: HeldLock) -> None:
        device, host = self._ownership.device, self._ownership.host
        if held.device:
            device[SlotKind.KV].lock(held.device)
        if held.host:
            host[SlotKind.KV].lock(held.host)
        if held.device_state:
            device[SlotKind.STATE].lock(held.node)
        if held.host_state:
            host[SlotKind.STATE].lock(held.node)

    def _undo(self, held: HeldLock) -> None:
        device, host = self._ownership.device, self._ownership.host
        if held.device:
            device[SlotKind.KV].unlock(held.device)
        if held.host:
            host[SlotKind.KV].unlock(held.host)
        if held.device_state:
            device[SlotKind.STATE].unlock(held.node)
        if held.host_state:
            host[SlotKind.STATE].unlock(held.node)
