"""Copies of nodes on the host and in the storage, made parents first."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

from hicache_storage.hybrid.radix.hashes import hashes_of, prefix_hashes
from hicache_storage.hybrid.radix.nodes import Kind
from hicache_storage.hybrid.radix.residency import NO_SLOTS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hicache_storage.hybrid.indices import BackupResult, HybridIndices
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.residency import Residency
    from hicache_storage.hybrid.radix.tiers import TierController


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy under way of what was one node when it began; after splits `node` is the lowest part of that."""

    node: Node
    start: int
    kinds: frozenset[Kind]
    is_again: bool = False
    """Whether it goes to the storage because that has lost it."""

    @property
    def tokens(self) -> int:
        return self.node.end - self.start


class Backups:
    """Writes nodes to the host, and hands them to the storage once they are there.

    A node is written after its parent, so that no prefix has holes on a lower tier. Its host slots are locked until the
    copy, and the storage after it, is done with them. Its device slots are not: who overwrites them waits for the copy.

    What the storage has lost shows when something is stored behind it, and goes there again. A storage that loses as fast
    as it takes does not make a storm of that: the tokens stored again are never more than those that came there otherwise.
    """

    def __init__(self, residency: Residency, controller: TierController[Any], page_size: int) -> None:
        self._residency, self._controller, self._page_size = residency, controller, page_size
        self._write_ids = count()
        self._writes: dict[int, _Copy] = {}
        self._stores: dict[int, _Copy] = {}
        self.declined = 0
        """Nodes that were not written for want of host memory."""
        self.stored_again = 0
        """Tokens handed to the storage again, as it had lost them."""
        self._came = 0
        """Tokens that the storage has taken for the first time, or given."""

    def __len__(self) -> int:
        """Copies under way, to the host and to the storage."""
        return len(self._writes) + len(self._stores)

    def back_up(self, node: Node) -> bool:
        """Copy a node and the KV before it to the host as far as they are not there; False if there is no room for all of it.

        Then states on the way that were never copied follow, as far as there is room. What is there goes to the storage,
        unless that has it.
        """
        above = list(node.upward())[1:]
        written = self.back_up_kv(above) and self._write(node, *Kind)
        if written:
            self._write_states(above)
        self._store_path(node)
        return written

    def back_up_kv(self, upward: Iterable[Node]) -> bool:
        """Copy the KV of a node and its ancestors, given from the node up, to the host; False if there is no room for all."""
        return all(self._write(each, Kind.KV) for each in reversed(list(upward)))

    def poll(self) -> None:
        """Take note of copies that are done."""
        written = [copy for ticket in self._controller.completed_writes() if (copy := self._writes.pop(ticket, None))]
        for copy in written:
            for node in copy.node.upward(copy.start):
                node.writing -= 1
        for copy in written:
            self._store_path(copy.node)
            self._unlock(copy)
        for result in self._controller.completed_backups():
            self._stored(result)

    def fetched(self, tokens: int) -> None:
        """The storage has given so many tokens."""
        self._came += tokens

    def forget(self) -> None:
        """Follow no copy any more: the nodes are gone."""
        self._writes.clear()
        self._stores.clear()

    def _write_states(self, nodes: Iterable[Node]) -> None:
        """Copy states that nobody asks for now, until there is no room: none that has been on the host or in the storage."""
        for node in nodes:
            if not node.state_saved and Kind.STATE not in node.stored and not self._write(node, Kind.STATE):
                return

    def _write(self, node: Node, *wanted: Kind) -> bool:
        """Copy to the host what only the device has of a node, as far as it is wanted; False if there is no room."""
        host = self._residency.host
        kinds = frozenset(kind for kind in wanted if self._residency.device[kind].holds(node) and not host[kind].holds(node))
        if not kinds:
            return True
        ticket = next(self._write_ids)
        taken = self._take_host_slots(node, kinds, ticket)
        if taken is None:
            self.declined += 1
            return False
        if Kind.KV in kinds:
            host[Kind.KV].add(node, taken.anchor)
        for slot in self._residency.state_slots(taken).values():
            host[Kind.STATE].add(node, slot)
            node.state_saved = True
        node.writing += 1
        self._writes[ticket] = self._locked(_Copy(node, node.start, kinds))
        return True

    def _take_host_slots(self, node: Node, kinds: frozenset[Kind], ticket: int) -> HybridIndices | None:
        """Enqueue the copy; the path above stays on the host while the controller makes room."""
        device, host = self._residency.device, self._residency.host[Kind.KV]
        rows = device[Kind.KV].of(node).indices if Kind.KV in kinds else NO_SLOTS
        state = device[Kind.STATE].of(node).indices if Kind.STATE in kinds else None
        above = node.parent if Kind.KV in kinds else node
        assert rows is not None
        assert above is not None
        host.lock(above)
        try:
            return self._controller.write(self._residency.transfer(rows, state, rows.numel() // self._page_size), ticket)
        finally:
            host.unlock(above)

    def _store_path(self, node: Node) -> None:
        """Hand to the storage what the host has of the path to `node` and the storage has not, from the top on."""
        if not self._controller.attached:
            return
        for each in reversed(list(node.upward())):
            if each.writing or not self._residency.host[Kind.KV].holds(each):
                return
            self._store(each)

    def _store(self, node: Node) -> None:
        host = self._residency.host
        kinds = frozenset(kind for kind in Kind if host[kind].holds(node) and kind not in node.stored)
        if not kinds:
            return
        rows = host[Kind.KV].of(node).indices
        assert rows is not None
        state = host[Kind.STATE].of(node).indices if Kind.STATE in kinds else None
        hashes = hashes_of(node, self._page_size, bigram=self._controller.bigram)
        assert node.parent is not None
        before = prefix_hashes(node.parent, self._page_size, bigram=self._controller.bigram)
        # Pages that the storage has already are not written again; their hashes place the state.
        ticket = self._controller.write_storage(self._residency.transfer(rows, state, len(hashes)), hashes, before)
        copy = _Copy(node, node.start, kinds, node.is_lost)
        node.stored, node.stored_by, node.is_lost = node.stored | kinds, ticket, False
        self.stored_again += copy.tokens if copy.is_again else 0
        self._stores[ticket] = self._locked(copy)

    def _stored(self, result: BackupResult) -> None:
        copy = self._stores.pop(result.operation_id, None)
        if copy is None:
            return
        if not result.complete:
            self._forget(copy)
        elif not copy.is_again:
            self._came += copy.tokens
        if result.lost_from is not None and self._lose(copy, result.lost_from * self._page_size, result.operation_id):
            self._store_path(copy.node)
        self._unlock(copy)

    def _lose(self, copy: _Copy, start: int, ticket: int) -> bool:
        """Take note that a backup has missed tokens before it from `start` on; whether any of them may be written again."""
        room = self._came - self.stored_again
        above = [node for node in copy.node.upward() if node.start < copy.start and node.end > start]
        # What was given to the storage after it was looked for, or is on its way there, is not missing.
        lost = [
            node for node in above if Kind.KV in node.stored and node.stored_by < ticket and node.stored_by not in self._stores
        ]
        for node in reversed(lost):
            room -= len(node.tokens)
            if room >= 0:
                node.stored, node.is_lost = set[Kind](), True
        return any(node.is_lost for node in lost)

    def _forget(self, copy: _Copy) -> None:
        """Let the next use of the nodes try again."""
        for node in copy.node.upward(copy.start):
            node.stored -= copy.kinds

    def _locked(self, copy: _Copy) -> _Copy:
        host = self._residency.host
        host[Kind.KV].lock(copy.node)
        if Kind.STATE in copy.kinds:
            host[Kind.STATE].lock(copy.node)
        return copy

    def _unlock(self, copy: _Copy) -> None:
        host = self._residency.host
        host[Kind.KV].unlock(copy.node)
        if Kind.STATE in copy.kinds:
            host[Kind.STATE].unlock(copy.node)
