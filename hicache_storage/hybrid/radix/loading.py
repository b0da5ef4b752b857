"""Loads of prefixes from the host to the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from hicache_storage.hybrid.radix.nodes import SlotKind
from hicache_storage.hybrid.radix.results import LoadResult

if TYPE_CHECKING:
    from hicache_storage.hybrid.pools.indices import HybridIndices
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.prefixes import HeldLock, PrefixLocks
    from hicache_storage.hybrid.radix.results import PrefixLock
    from hicache_storage.hybrid.radix.slot_ownership import SlotOwnership
    from hicache_storage.hybrid.radix.tiers import TierController


@dataclass(frozen=True, slots=True)
class _Load:
    """A running load, and the slots that it locks on the host."""

    node: Node
    host_state: bool


class DeviceLoads:
    """Loads the locked part of a prefix that is on the host.

    KV is loaded into the tree, the state into a slot of the request.
    """

    def __init__(
        self,
        ownership: SlotOwnership,
        locks: PrefixLocks,
        controller: TierController[Any],
        page_size: int,
    ) -> None:
        self._ownership = ownership
        self._locks = locks
        self._controller = controller
        self._page_size = page_size
        self._ids = count()
        self._loads: dict[int, _Load | None] = {}
        """Running ones; None after `clear`."""

    def __len__(self) -> int:
        """Number of running loads."""
        return len(self._loads)

    def load(self, lock: PrefixLock, state_slot: int | None) -> LoadResult | None:
        """Queue the load of slots that are not on the device.

        None, with nothing changed, if the device has not enough free slots.
        """
        held = self._locks.held(lock)
        loaded_slot = None
        if held.host is not None:
            taken = self._take_device_slots(held, state_slot)
            if taken is None:
                return None
            loaded_slot = next(
                (int(slot) for slot in self._ownership.state_slots(taken).values()), None
            )
            self._locks.move_to_device(lock)
        return LoadResult(
            self._ownership.rows(self._ownership.device, list(held.node.upward())[::-1]),
            loaded_slot,
        )

    def poll(self) -> None:
        """Process loads that have ended: unlock the host slots that they read."""
        for load_id in self._controller.completed_loads():
            load = self._loads.pop(load_id, None)
            if load is not None:
                self._ownership.device[SlotKind.KV].unlock(load.node)
                self._lock_on_host(load, lock=False)

    def clear(self) -> None:
        """Forget the nodes, which are removed; what is running goes on."""
        self._loads = dict.fromkeys(self._loads)

    def _take_device_slots(self, held: HeldLock, state_slot: int | None) -> HybridIndices | None:
        """Queue a load and insert its rows into the nodes; returns the device slots."""
        host, device = self._ownership.host, self._ownership.device
        nodes = [node for node in held.node.upward() if not device[SlotKind.KV].holds(node)][::-1]
        rows = self._ownership.rows(host, nodes)
        state = host[SlotKind.STATE].of(held.node).indices if held.host_state else None
        if not nodes and state is None:
            return self._ownership.transfer(rows, None, 0)  # loaded or inserted by another request
        load_id = next(self._ids)
        source = self._ownership.transfer(rows, state, rows.numel() // self._page_size)
        into = (
            {} if state_slot is None else {name: torch.tensor([state_slot]) for name in source.side}
        )
        taken = self._controller.load(source, [load_id], into=into)
        if taken is None:
            return None
        for node, part in zip(
            nodes, torch.split(taken.anchor, [len(node.tokens) for node in nodes]), strict=True
        ):
            # A copy: a view of one node's rows would keep those of all nodes alive.
            device[SlotKind.KV].add(node, part.clone())
        load = _Load(held.node, held.host_state)
        self._loads[load_id] = load
        # Until the load has ended: neither the rows that it writes nor those that it reads may be
        # evicted, even if the request unlocks its prefix.
        device[SlotKind.KV].lock(held.node)
        self._lock_on_host(load, lock=True)
        return taken

    def _lock_on_host(self, load: _Load, *, lock: bool) -> None:
        kv, state = self._ownership.host[SlotKind.KV], self._ownership.host[SlotKind.STATE]
        (kv.lock if lock else kv.unlock)(load.node)
        if load.host_state:
            (state.lock if lock else state.unlock)(load.node)
