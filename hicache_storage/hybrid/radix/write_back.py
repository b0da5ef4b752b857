"""Write-back of nodes to the host and the storage, parents first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from hicache_storage.hybrid.pools import NO_SLOTS
from hicache_storage.hybrid.radix.slots import SlotLocks
from hicache_storage.hybrid.radix.tree import SlotKind

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.pools import HybridIndices
    from hicache_storage.hybrid.radix.slots import SlotOwnership
    from hicache_storage.hybrid.radix.tree import Node, RadixTree
    from hicache_storage.hybrid.storage_io.backups import BackupResult


@dataclass(frozen=True, slots=True)
class _Copy:
    """A running copy of one node; after splits of the node, `node` is its lowest part."""

    node: Node
    start: int
    kinds: frozenset[SlotKind]
    locks: SlotLocks
    """Keep its host slots."""
    is_again: bool = False
    """Whether it is stored again because the storage has lost it."""

    @property
    def tokens(self) -> int:
        return self.node.end - self.start


class NodeWriteBack:
    """Writes nodes to the host, and then to the storage.

    A node is written after its parent, so that no prefix has holes on a lower tier. Its host slots
    are locked until the copy, and the backup after it, have ended. Its device slots are not locked:
    `before_overwrite` makes the next user wait for the copy.

    A backup reports pages before it that the storage has lost; they are stored again. To bound the
    extra load, the tokens stored again never exceed those that were stored or fetched otherwise.
    """

    def __init__(
        self, tree: RadixTree, ownership: SlotOwnership, controller: HybridCacheController
    ) -> None:
        self._tree = tree
        self._ownership = ownership
        self._controller = controller
        self._write_ids = count()
        self.writes: dict[int, _Copy | None] = {}
        self.stores: dict[int, _Copy | None] = {}
        """Running ones; None after `clear`."""
        self.copied: list[_Copy] = []
        """Copies that have ended while a node above their own is still being copied."""
        self.declined = 0
        """Nodes that were not written for lack of host memory."""
        self.stored_again = 0
        """Tokens stored again because the storage had lost them."""
        self._accepted_tokens = 0
        """Tokens that were stored for the first time, or fetched."""

    def back_up(self, node: Node) -> bool:
        """Copy a node and the KV before it to the host.

        False if there is not enough memory.

        Then copies states of ancestors that were never copied, while there is memory. Everything on
        the host that the storage does not have is stored.
        """
        above = list(node.upward())[1:]
        written = self.back_up_kv(above) and self._write(node, *SlotKind)
        # After the node's own state, from which they must not take the last free slot.
        if written:
            self._write_states(above)
        # Also if memory was short: the storage may lack what is on the host already.
        self._store_path(node)
        return written

    def back_up_kv(self, upward: Iterable[Node]) -> bool:
        """Copy the KV of a path, given from the lowest node up.

        False if there is not enough memory.
        """
        return all(self._write(each, SlotKind.KV) for each in reversed(list(upward)))

    def poll(self) -> None:
        """Process copies and backups that have ended."""
        written = [
            copy
            for ticket in self._controller.completed_writes()
            if (copy := self.writes.pop(ticket, None))
        ]
        for copy in written:
            for node in copy.node.upward(copy.start):
                node.writing -= 1
        # All counts first: a path is stored only if none of its nodes has a running copy.
        copied = [*self.copied, *written]
        self.copied = []
        for copy in copied:
            if self._store_path(copy.node):
                copy.locks.release()
            else:
                self.copied.append(copy)
        for result in self._controller.backups.completed():
            self._stored(result)

    def record_fetched(self, tokens: int) -> None:
        """Count tokens that were fetched from the storage."""
        self._accepted_tokens += tokens

    def clear(self) -> None:
        """Forget the nodes, which are removed; what is running goes on."""
        self.writes = dict.fromkeys(self.writes)
        self.stores = dict.fromkeys(self.stores)
        self.copied = []

    def _write_states(self, nodes: Iterable[Node]) -> None:
        """Copy states that were never on a lower tier, until memory is short."""
        for node in nodes:
            if (
                not node.state_saved
                and SlotKind.STATE not in node.stored
                and not self._write(node, SlotKind.STATE)
            ):
                return

    def _write(self, node: Node, *wanted: SlotKind) -> bool:
        """Copy those of the wanted kinds that only the device has.

        False if memory is short.
        """
        host = self._ownership.host
        kinds = frozenset(
            kind
            for kind in wanted
            if self._ownership.device[kind].holds(node) and not host[kind].holds(node)
        )
        if not kinds:
            return True
        ticket = next(self._write_ids)
        taken = self._take_host_slots(node, kinds, ticket)
        if taken is None:
            self.declined += 1
            return False
        if SlotKind.KV in kinds:
            host[SlotKind.KV].add(node, taken.kv)
        if SlotKind.STATE in kinds:
            host[SlotKind.STATE].add(node, taken.states)
            node.state_saved = True
        node.writing += 1
        self.writes[ticket] = _Copy(node, node.start, kinds, self._locks(node, kinds))
        return True

    def _take_host_slots(
        self, node: Node, kinds: frozenset[SlotKind], ticket: int
    ) -> HybridIndices | None:
        """Queue the copy.

        The path above is locked on the host while the controller evicts.
        """
        device, host = self._ownership.device, self._ownership.host[SlotKind.KV]
        rows = device[SlotKind.KV].of(node).indices if SlotKind.KV in kinds else NO_SLOTS
        state = device[SlotKind.STATE].of(node).indices if SlotKind.STATE in kinds else None
        above = node.parent if SlotKind.KV in kinds else node
        assert rows is not None
        assert above is not None
        host.lock(above)
        try:
            return self._controller.write(self._ownership.transfer(rows, state), ticket)
        finally:
            host.unlock(above)

    def _store_path(self, node: Node) -> bool:
        """Store the path to `node`, from the top on, as far as the host has it.

        False if the rest has to wait for a running copy.
        """
        # Not an error: `stored` stays empty, so that a storage that is attached later gets the
        # path.
        if not self._controller.attached:
            return True
        for each in node.downward():
            # Nothing below either: pages behind a hole cannot be restored.
            if each.writing:
                return False
            if not self._ownership.host[SlotKind.KV].holds(each):
                return True
            self._store(each)
        return True

    def _store(self, node: Node) -> None:
        host = self._ownership.host
        kinds = frozenset(
            kind for kind in SlotKind if host[kind].holds(node) and kind not in node.stored
        )
        if not kinds:
            return
        rows = host[SlotKind.KV].of(node).indices
        assert rows is not None
        state = host[SlotKind.STATE].of(node).indices if SlotKind.STATE in kinds else None
        assert node.parent is not None
        hashes, before = self._tree.hashes(node), self._tree.prefix_hashes(node.parent)
        # Pages that the storage has already are not written again. Their hashes are passed all the
        # same: they give the state its key.
        ticket = self._controller.backups.begin(
            self._ownership.transfer(rows, state), hashes, before
        )
        copy = _Copy(node, node.start, kinds, self._locks(node, kinds), node.is_lost)
        # Before the backup has ended: otherwise each hit meanwhile would store it again.
        # `_stored` takes it back.
        node.stored = node.stored | kinds
        node.stored_by = ticket
        node.is_lost = False
        self.stored_again += copy.tokens if copy.is_again else 0
        self.stores[ticket] = copy

    def _stored(self, result: BackupResult) -> None:
        copy = self.stores.pop(result.operation_id, None)
        if copy is None:
            return
        if not result.complete:
            # Not retried here: the backup has made all its attempts. The next use of the node does
            # it.
            for node in copy.node.upward(copy.start):
                node.stored -= copy.kinds
        elif not copy.is_again:
            self._accepted_tokens += copy.tokens
        if result.lost_from is not None and self._mark_lost(
            copy, result.lost_from * self._tree.page_size, result.operation_id
        ):
            self._store_path(copy.node)
        copy.locks.release()

    def _mark_lost(self, copy: _Copy, start: int, ticket: int) -> bool:
        """Mark nodes that the storage has lost from token `start` on.

        Returns:
            Whether any of them may be stored again.
        """
        budget = self._accepted_tokens - self.stored_again
        above = [
            node for node in copy.node.upward() if node.start < copy.start and node.end > start
        ]
        # Nodes that were stored after this lookup, or are being stored, are not missing.
        lost = [
            node
            for node in above
            if SlotKind.KV in node.stored
            and node.stored_by < ticket
            and node.stored_by not in self.stores
        ]
        # From the top: where the tokens that may be stored again are limited, those at the
        # beginning of the prefix make it usable.
        for node in reversed(lost):
            budget -= len(node.tokens)
            if budget >= 0:
                node.stored = set[SlotKind]()
                node.is_lost = True
        return any(node.is_lost for node in lost)

    def _locks(self, node: Node, kinds: frozenset[SlotKind]) -> SlotLocks:
        host = self._ownership.host
        state = node if SlotKind.STATE in kinds else None
        return SlotLocks({host[SlotKind.KV]: node, host[SlotKind.STATE]: state})
