"""Bringing prefixes from the host back to the device."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from hicache_storage.hybrid.radix.nodes import Kind
from hicache_storage.hybrid.radix.results import LoadResult

if TYPE_CHECKING:
    from hicache_storage.hybrid.indices import HybridIndices
    from hicache_storage.hybrid.radix.locks import HeldLock, Locks
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.residency import Residency
    from hicache_storage.hybrid.radix.results import PrefixLock
    from hicache_storage.hybrid.radix.tiers import TierController


@dataclass(frozen=True, slots=True)
class _Load:
    """A load under way, and what it keeps on the host."""

    node: Node
    host_state: bool


class Loading:
    """Loads what a lock keeps on the host: KV into the tree, the state into a slot of the request's own."""

    def __init__(self, residency: Residency, locks: Locks, controller: TierController[Any], page_size: int) -> None:
        self._residency, self._locks, self._controller, self._page_size = residency, locks, controller, page_size
        self._ids = count()
        self._loads: dict[int, _Load] = {}

    def __len__(self) -> int:
        """Loads under way."""
        return len(self._loads)

    def load(self, lock: PrefixLock, state_slot: int | None) -> LoadResult | None:
        """Enqueue the load of what is not on the device; None, with nothing changed, if there is no room there."""
        held = self._locks.held(lock)
        loaded_slot = None
        if held.host is not None:
            taken = self._take_device_slots(held, state_slot)
            if taken is None:
                return None
            loaded_slot = next((int(slot) for slot in self._residency.state_slots(taken).values()), None)
            self._locks.move_to_device(lock)
        return LoadResult(self._residency.rows(self._residency.device, list(held.node.upward())[::-1]), loaded_slot)

    def poll(self) -> None:
        """Take note of loads that are done: what they read may leave the host."""
        for load_id in self._controller.completed_loads():
            load = self._loads.pop(load_id, None)
            if load is not None:
                self._residency.device[Kind.KV].unlock(load.node)
                self._keep_on_host(load, lock=False)

    def forget(self) -> None:
        """Follow no load any more: the nodes are gone."""
        self._loads.clear()

    def _take_device_slots(self, held: HeldLock, state_slot: int | None) -> HybridIndices | None:
        """Enqueue a load and lay its rows; returns the device slots."""
        host, device = self._residency.host, self._residency.device
        nodes = [node for node in held.node.upward() if not device[Kind.KV].holds(node)][::-1]
        rows = self._residency.rows(host, nodes)
        state = host[Kind.STATE].of(held.node).indices if held.host_state else None
        if not nodes and state is None:
            return self._residency.transfer(rows, None, 0)  # another request's load, or its own KV, brought it meanwhile
        load_id = next(self._ids)
        source = self._residency.transfer(rows, state, rows.numel() // self._page_size)
        into = {} if state_slot is None else {name: torch.tensor([state_slot]) for name in source.side}
        taken = self._controller.load(source, [load_id], into=into)
        if taken is None:
            return None
        for node, share in zip(nodes, torch.split(taken.anchor, [len(node.tokens) for node in nodes]), strict=True):
            device[Kind.KV].add(node, share.clone())
        self._loads[load_id] = load = _Load(held.node, held.host_state)
        device[Kind.KV].lock(held.node)
        self._keep_on_host(load, lock=True)
        return taken

    def _keep_on_host(self, load: _Load, *, lock: bool) -> None:
        kv, state = self._residency.host[Kind.KV], self._residency.host[Kind.STATE]
        (kv.lock if lock else kv.unlock)(load.node)
        if load.host_state:
            (state.lock if lock else state.unlock)(load.node)
