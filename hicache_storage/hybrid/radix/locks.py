"""Locks on prefixes: which nodes each of them keeps, on which tier."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from hicache_storage.hybrid.radix.nodes import Kind
from hicache_storage.hybrid.radix.results import PrefixLock, StalePrefixError

if TYPE_CHECKING:
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.residency import Residency


@dataclass(slots=True)
class HeldLock:
    """What one lock keeps."""

    node: Node
    """Where its prefix ends."""
    device: Node | None = None
    """The lowest node whose KV it keeps on the device."""
    host: Node | None = None
    """The lowest node whose KV it keeps on the host."""
    device_state: bool = False
    host_state: bool = False


class Locks:
    """All locks that are held."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._held: dict[int, HeldLock] = {}
        self._ids = count(1)

    def __len__(self) -> int:
        return len(self._held)

    def lock(self, node: Node, *, with_state: bool) -> PrefixLock:
        """Keep the KV up to the end of `node` where it is, and the state there if that is to be consumed."""
        held = HeldLock(node)
        device, host = self._residency.device, self._residency.host
        held.device_state = with_state and device[Kind.STATE].holds(node)
        held.host_state = with_state and not held.device_state and host[Kind.STATE].holds(node)
        held.device = next((each for each in node.upward() if device[Kind.KV].holds(each)), None)
        held.host = node if node.parent and (held.device is not node or held.host_state) else None
        self._apply(held)
        lock = PrefixLock(next(self._ids), node.end)
        self._held[lock.lock_id] = held
        return lock

    def held(self, lock: PrefixLock) -> HeldLock:
        """What a lock keeps.

        Raises:
            StalePrefixError: it was unlocked.
        """
        try:
            return self._held[lock.lock_id]
        except KeyError:
            raise StalePrefixError(f"lock {lock.lock_id} is not held; unlock a lock once, and do not use it after that") from None

    def move_to_device(self, lock: PrefixLock) -> None:
        """Keep on the device what was kept on the host: its KV has a place there now."""
        before = self.held(lock)
        after = HeldLock(before.node, before.node if before.node.parent else None, device_state=before.device_state)
        self._apply(after)
        self._undo(before)
        self._held[lock.lock_id] = after

    def release_state(self, lock: PrefixLock) -> None:
        """Keep the KV only."""
        held = self.held(lock)
        if held.device_state:
            held.device_state = False
            self._residency.device[Kind.STATE].unlock(held.node)

    def unlock(self, lock: PrefixLock) -> None:
        """End a lock; KV that no other keeps is the most recently used.

        Raises:
            StalePrefixError: it was unlocked before.
        """
        self._undo(self.held(lock))
        del self._held[lock.lock_id]

    def _apply(self, held: HeldLock) -> None:
        device, host = self._residency.device, self._residency.host
        if held.device:
            device[Kind.KV].lock(held.device)
        if held.host:
            host[Kind.KV].lock(held.host)
        if held.device_state:
            device[Kind.STATE].lock(held.node)
        if held.host_state:
            host[Kind.STATE].lock(held.node)

    def _undo(self, held: HeldLock) -> None:
        device, host = self._residency.device, self._residency.host
        if held.device:
            device[Kind.KV].unlock(held.device)
        if held.host:
            host[Kind.KV].unlock(held.host)
        if held.device_state:
            device[Kind.STATE].unlock(held.node)
        if held.host_state:
            host[Kind.STATE].unlock(held.node)
