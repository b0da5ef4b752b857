"""Prefixes of requests: matched in the tree, locked on their tiers, loaded from the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.radix.slots import SlotLocks
from hicache_storage.hybrid.radix.tree import Node, SlotKind
from hicache_storage.spec import HiCacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.pools import HybridIndices
    from hicache_storage.hybrid.radix.slots import SlotOwnership
    from hicache_storage.hybrid.radix.tree import RadixTree


class StalePrefixError(HiCacheError, RuntimeError):
    """A prefix has changed since it was matched or inserted; match again."""


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """Cached prefix of a request, valid until a part is evicted; `lock` keeps it."""

    length: int
    """Tokens, whole pages."""
    device_indices: torch.Tensor
    """int64 (length - host_length,): KV rows of the tokens on the device, from the first on."""
    host_length: int
    """Number of tokens after those, whose KV is on the host only."""
    node_id: int
    """Id of the node in which the prefix ends; used by the cache."""


@dataclass(frozen=True, slots=True, eq=False)
class MatchResult(Prefix):
    """The longest usable prefix of a request."""

    state_slot: int | None
    """The device slot of the state after the prefix, which a request copies.

    None where the model has no states, nothing matched, or the state is on the host only.
    """
    state_on_host: bool
    """Whether the state has to be loaded."""

    @property
    def needs_load(self) -> bool:
        """True if the prefix has to be loaded from the host before it can be used."""
        return bool(self.host_length) or self.state_on_host


@dataclass(frozen=True, slots=True, eq=False)
class LoadResult:
    """A queued load; `start_loading` launches it and returns its layer counter."""

    device_indices: torch.Tensor
    """int64: the KV rows of the whole prefix."""
    state_slot: int | None
    """The slot that the state after the prefix is loaded into; the caller owns it.

    None if the state is on the device, or there is none.
    """


@dataclass(slots=True, eq=False)
class PrefixLock:
    """Keeps a prefix on the tiers where it is, from `lock` to `unlock`."""

    node: Node
    """The node at the end of the prefix; used by the cache, like the locks of its slots."""
    slots: SlotLocks

    @property
    def length(self) -> int:
        """Tokens."""
        return self.node.end


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
        tiers = (self._ownership.device,) if device_only else self._ownership.tiers
        if not any(tier[SlotKind.KV].holds(node) for tier in tiers):
            return False
        # The state of a node is the one after its last token: a partial match cannot use it.
        return not self._ownership.has_states or (
            known == node.end and any(tier[SlotKind.STATE].holds(node) for tier in tiers)
        )

    def _describe(self, node: Node, length: int) -> MatchResult:
        """Describe the first `length` tokens of the path to `node`.

        Less than the whole path only where no state is needed.
        """
        device = self._ownership.device
        # A prefix of the path: a node is on a tier only if its parent is.
        path = [each for each in node.downward() if device[SlotKind.KV].holds(each)]
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


class PrefixLocks:
    """Locks that requests hold on prefixes, and the loads of what they lock on the host.

    KV is loaded into the tree, the state into a slot of the request.
    """

    def __init__(self, ownership: SlotOwnership, controller: HybridCacheController) -> None:
        self._ownership = ownership
        self._controller = controller
        self.held = set[PrefixLock]()
        self._load_ids = count()
        self.loads: dict[int, SlotLocks | None] = {}
        """What running loads lock; None after `clear`."""

    def __len__(self) -> int:
        """Number of locks that are held."""
        return len(self.held)

    def lock(self, node: Node, *, with_state: bool) -> PrefixLock:
        """Keep the KV up to the end of `node` on its tiers, and its state if `with_state`."""
        device, host = self._ownership.device, self._ownership.host
        kv, state = SlotKind.KV, SlotKind.STATE
        state_on_device = with_state and device[state].holds(node)
        # The state on the host is only locked if it has to be loaded.
        state_on_host = with_state and not state_on_device and host[state].holds(node)
        # The lowest node whose KV is on the device.
        loaded = next((each for each in node.upward() if device[kv].holds(each)), None)
        needs_host = node.parent and (loaded is not node or state_on_host)
        locks = SlotLocks(
            {
                device[kv]: loaded,
                host[kv]: node if needs_host else None,
                device[state]: node if state_on_device else None,
                host[state]: node if state_on_host else None,
            }
        )
        lock = PrefixLock(node, locks)
        self.held.add(lock)
        return lock

    def unlock(self, lock: PrefixLock) -> None:
        """End a lock; KV that has no other lock becomes the most recently used."""
        self._check_held(lock)
        lock.slots.release()
        self.held.remove(lock)

    def release_state(self, lock: PrefixLock) -> None:
        """End the lock of the state on the device."""
        # The request has copied it; the slot may go to another state while the request runs on.
        self._check_held(lock)
        lock.slots.release(self._ownership.device[SlotKind.STATE])

    def load(self, lock: PrefixLock) -> LoadResult | None:
        """Queue the load of slots that are not on the device.

        None, with nothing changed, if the device has not enough free slots.
        """
        self._check_held(lock)
        device, loaded_slot = self._ownership.device, None
        if self._ownership.host[SlotKind.KV] in lock.slots.nodes:
            taken = self._take_device_slots(lock)
            if taken is None:
                return None
            loaded_slot = int(taken.states[0]) if taken.endpoints else None
            # The new lock comes first, so that nothing of the prefix is unlocked in between.
            before, state = lock.slots, device[SlotKind.STATE]
            lock.slots = SlotLocks({device[SlotKind.KV]: lock.node, state: before.nodes.get(state)})
            before.release()
        return LoadResult(self._ownership.rows(device, lock.node.downward()), loaded_slot)

    def poll(self) -> None:
        """Process loads that have ended: unlock the slots that they read and write."""
        for load_id in self._controller.completed_loads():
            locks = self.loads.pop(load_id, None)
            if locks is not None:
                locks.release()

    def clear(self) -> None:
        """Forget the nodes, which are removed; what is running goes on."""
        self.loads = dict.fromkeys(self.loads)

    def _check_held(self, lock: PrefixLock) -> None:
        if lock not in self.held:
            raise StalePrefixError(
                "the lock is not held; unlock a lock once, and do not use it after that"
            )

    def _take_device_slots(self, lock: PrefixLock) -> HybridIndices | None:
        """Queue a load and insert its rows into the nodes; returns the device slots."""
        host, device = self._ownership.host, self._ownership.device
        nodes = [node for node in lock.node.downward() if not device[SlotKind.KV].holds(node)]
        rows = self._ownership.rows(host, nodes)
        state_node = lock.slots.nodes.get(host[SlotKind.STATE])
        state = None if state_node is None else host[SlotKind.STATE].of(state_node).indices
        source = self._ownership.transfer(rows, state)
        if not nodes and state is None:
            return source  # loaded or inserted by another request
        load_id = next(self._load_ids)
        taken = self._controller.load(source, load_id)
        if taken is None:
            return None
        for node, part in zip(
            nodes, torch.split(taken.kv, [len(node.tokens) for node in nodes]), strict=True
        ):
            # A copy: a view of one node's rows would keep those of all nodes alive.
            device[SlotKind.KV].add(node, part.clone())
        # Until the load has ended: neither the rows that it writes nor those that it reads may be
        # evicted, even if the request unlocks its prefix.
        self.loads[load_id] = SlotLocks(
            {
                device[SlotKind.KV]: lock.node,
                host[SlotKind.KV]: lock.node,
                host[SlotKind.STATE]: state_node,
            }
        )
        return taken
