"""Prefixes on their way from the storage to the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

from hicache_storage.hybrid.radix.hashes import hashes_of, prefix_hashes
from hicache_storage.hybrid.radix.nodes import Kind
from hicache_storage.hybrid.radix.tiers import Operation
from hicache_storage.hybrid.radix.units import tokens_of

if TYPE_CHECKING:
    from hicache_storage.hybrid.indices import PrefetchResult
    from hicache_storage.hybrid.radix.backups import Backups
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.residency import Residency
    from hicache_storage.hybrid.radix.tiers import TierController
    from hicache_storage.hybrid.radix.units import Units


@dataclass(frozen=True, slots=True)
class _Prefetch(Generic[Operation]):
    """A prefetch under way."""

    operation: Operation
    node: Node
    """What it brings follows this."""
    kept: Node | None
    """The lowest node of that path that was on the host, and is kept there."""
    tokens: Units

    def is_wanted(self) -> bool:
        """Whether what it brings still has a place: the path was not evicted."""
        return not self.node.tokens or self.node.parent is not None


class Prefetching(Generic[Operation]):
    """Prefetches of waiting requests, one for each."""

    def __init__(self, residency: Residency, controller: TierController[Operation], backups: Backups, page_size: int) -> None:
        self._residency, self._controller, self._backups, self._page_size = residency, controller, backups, page_size
        self._running: dict[str, _Prefetch[Operation]] = {}
        self.dropped_tokens = 0
        """Fetched, and given up for want of the prefix before them."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._running

    def __len__(self) -> int:
        """Prefetches under way. One that is over and waits for its request to ask is not."""
        return sum(not running.operation.done for running in self._running.values())

    def start(self, request_id: str, node: Node, tokens: Units) -> bool:
        """Ask the storage for whole pages that follow `node`; False if nothing was begun.

        A request that waits keeps nothing on the device: what only the device has of its prefix may go meanwhile.
        """
        if not tokens or not self._controller.attached:
            return False
        last = hashes_of(node, self._page_size, bigram=self._controller.bigram)
        before = prefix_hashes(node, self._page_size, bigram=self._controller.bigram)
        operation = self._controller.prefetch(
            request_id, tokens_of(tokens, bigram=self._controller.bigram), last[-1] if last else None, before
        )
        if operation is None:
            return False
        host = self._residency.host[Kind.KV]
        kept = next((each for each in node.upward() if host.holds(each)), None)
        if kept:
            host.lock(kept)
        self._running[request_id] = _Prefetch(operation, node, kept, tokens)
        return True

    def check(self, request_id: str) -> bool:
        """Whether the request need not wait any more; what has come is in the tree then."""
        running = self._running.get(request_id)
        if running is not None and not running.operation.ready:
            return False
        self.end(request_id)
        return True

    def end(self, request_id: str) -> int:
        """End a prefetch wherever it is and keep what it brought; returns that in tokens, 0 if there was none."""
        running = self._running.pop(request_id, None)
        if running is None:
            return 0
        result = self._controller.terminate_prefetch(running.operation)
        # What follows a prefix can be on the host only if the prefix is.
        wanted = bool(result.tokens) and running.is_wanted() and self._backups.back_up_kv(running.node.upward())
        if wanted:
            self._graft(running.node, running.tokens, result)
        else:
            self._controller.free_host(result.host)
            self.dropped_tokens += result.tokens
        if running.kept:
            self._residency.host[Kind.KV].unlock(running.kept)
        return result.tokens if wanted else 0

    def end_all(self) -> None:
        """End all prefetches, in the order in which they were begun."""
        for request_id in list(self._running):
            self.end(request_id)

    def _graft(self, anchor: Node, tokens: Units, result: PrefetchResult) -> None:
        """Hang what came below the anchor; slots of what is there already go back."""
        host, size = self._residency.host, self._page_size
        states = self._residency.state_slots(result.host)
        node, done = anchor, 0
        for pages in sorted({*states, result.tokens // size}):
            end = pages * size
            node = self._residency.lay(host, node, tokens[done:end], result.host.anchor[done:end])
            done = end
            if pages in states:
                self._residency.place_state(host, node, states[pages])
        for each in node.upward(anchor.end):
            each.stored.add(Kind.KV)
        self._backups.fetched(result.tokens)
        if result.tokens // size in states:
            node.stored.add(Kind.STATE)
