"""Prefetches of waiting requests from the storage to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.radix.slots import SlotLocks
from hicache_storage.hybrid.radix.tree import SlotKind

if TYPE_CHECKING:
    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.pools import HybridIndices
    from hicache_storage.hybrid.radix.slots import SlotOwnership
    from hicache_storage.hybrid.radix.tree import Node, RadixTree, Units
    from hicache_storage.hybrid.radix.write_back import NodeWriteBack
    from hicache_storage.hybrid.storage_io.prefetch import PrefetchOperation


@dataclass(frozen=True, slots=True)
class _Prefetch:
    """A running prefetch."""

    operation: PrefetchOperation
    node: Node
    """Fetched pages are inserted below this node."""
    kept: SlotLocks
    """Keeps the part of that path that was on the host."""
    tokens: Units

    def is_wanted(self) -> bool:
        """Return whether the fetched pages can be inserted: the path was not evicted."""
        return not self.node.tokens or self.node.parent is not None


class RequestPrefetches:
    """All prefetches, at most one for each request."""

    def __init__(
        self,
        tree: RadixTree,
        ownership: SlotOwnership,
        controller: HybridCacheController,
        write_back: NodeWriteBack,
    ) -> None:
        self._tree = tree
        self._ownership = ownership
        self._controller = controller
        self._write_back = write_back
        self.running: dict[str, _Prefetch] = {}
        self.dropped_tokens = 0
        """Tokens that were fetched and freed, as the prefix before them was missing."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self.running

    @property
    def is_active(self) -> bool:
        """Whether a prefetch has not ended."""
        return any(not running.operation.done for running in self.running.values())

    def start(self, request_id: str, node: Node, tokens: Units) -> bool:
        """Start a prefetch of whole pages that follow `node`; False if none was started.

        A waiting request locks nothing on the device: a prefix that is only there may be evicted.
        """
        if not tokens or not self._controller.attached:
            return False
        hashes, before = self._tree.hashes_below(node, tokens), self._tree.prefix_hashes(node)
        operation = self._controller.prefetcher.begin(request_id, hashes, before)
        if operation is None:
            return False
        # After `prefetch`, which may decline. Fetched pages follow this path, and are worth nothing
        # without it.
        host = self._ownership.host[SlotKind.KV]
        kept = SlotLocks({host: next((each for each in node.upward() if host.holds(each)), None)})
        self.running[request_id] = _Prefetch(operation, node, kept, tokens)
        return True

    def check(self, request_id: str) -> bool:
        """Return whether the request need not wait any more.

        Fetched pages are in the tree then.
        """
        running = self.running.get(request_id)
        if running is not None and not running.operation.ready:
            return False
        self.end(request_id)
        return True

    def end(self, request_id: str) -> int:
        """End a prefetch and insert the pages that arrived.

        Returns their tokens, 0 without one.
        """
        running = self.running.pop(request_id, None)
        if running is None:
            return 0
        fetched = self._controller.prefetcher.terminate(running.operation)
        # Pages can be on the host only if the prefix before them is.
        wanted = (
            bool(fetched.tokens)
            and running.is_wanted()
            and self._write_back.back_up_kv(running.node.upward())
        )
        if wanted:
            self._insert_fetched(running.node, running.tokens, fetched)
        else:
            self._controller.free_host(fetched)
            self.dropped_tokens += fetched.tokens
        running.kept.release()
        return fetched.tokens if wanted else 0

    def end_all(self) -> None:
        """End all prefetches, in the order in which they were started."""
        # Each end may be a collective, so that the order matters: it is that of `start`, on every
        # rank.
        for request_id in list(self.running):
            self.end(request_id)

    def _insert_fetched(self, above: Node, tokens: Units, fetched: HybridIndices) -> None:
        """Insert fetched pages below a node.

        Slots of pages that are there already are freed.
        """
        host = self._ownership.host
        node = self._ownership.insert(host, above, tokens[: fetched.tokens], fetched.kv)
        for each in node.upward(above.end):
            # They came from the storage: the next hit must not write them there again.
            each.stored.add(SlotKind.KV)
        if fetched.endpoints:
            self._ownership.insert_state(host, node, fetched.states)
            node.stored.add(SlotKind.STATE)
        self._write_back.record_fetched(fetched.tokens)
