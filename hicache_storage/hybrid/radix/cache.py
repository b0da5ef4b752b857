"""Radix cache of hybrid models over three tiers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.policies import WritePolicy
from hicache_storage.hybrid.pools import HybridIndices
from hicache_storage.hybrid.radix.prefixes import MatchResult, Prefix, PrefixLocks, PrefixMatcher
from hicache_storage.hybrid.radix.slots import SlotLocks, SlotOwnership
from hicache_storage.hybrid.radix.tree import RadixTree, SlotKind
from hicache_storage.hybrid.radix.write_back import NodeWriteBack
from hicache_storage.spec import ConfigError, HiCacheError, InvalidTransferError, PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.radix.prefixes import LoadResult, PrefixLock
    from hicache_storage.hybrid.radix.tree import Node, Tokens
    from hicache_storage.hybrid.storage_io.prefetch import PrefetchOperation
    from hicache_storage.transfer import LayerCounter


class CacheInUseError(HiCacheError, RuntimeError):
    """The cache cannot be emptied while prefixes are locked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUsage:
    """Contents and counters of a cache."""

    device_tokens: int
    device_states: int
    host_tokens: int
    host_states: int
    evictable_tokens: int
    """Tokens on the device that are not locked."""
    evictable_states: int
    """States on the device that are not locked."""
    locks: int
    declined_writes: int
    """Nodes that were not copied to the host for lack of memory, since the cache was made."""
    dropped_tokens: int
    """Tokens that were fetched in vain.

    The prefix before them was evicted meanwhile, or did not fit into host memory.
    """
    tokens_stored_again: int
    """Tokens stored again because the storage had lost them while they were cached here."""


@dataclass(frozen=True, slots=True)
class _Prefetch:
    """A running prefetch of a waiting request."""

    operation: PrefetchOperation
    node: Node
    """Fetched pages are inserted below this node."""
    kept: SlotLocks
    """Keeps the part of that path that was on the host."""
    tokens: Tokens

    def is_wanted(self) -> bool:
        """Return whether the fetched pages can be inserted: the path was not evicted."""
        return not self.node.tokens or self.node.parent is not None


class HiMambaRadixCache:
    """Prefix cache on device, host and storage.

    Finds the longest prefix to continue from.

    Tokens are cached in pages. A model with recurrent states can continue only where its KV is
    complete *and* the state after the last of those tokens is cached; such states exist at
    checkpoints. A model without them (plain attention, MLA with an indexer whose slots derive from
    KV) can continue after every page.

    A request goes through `match`, `lock`, `load` if the match needs it, and `insert`. It locks the
    inserted prefix, unlocks its match, and inserts again when it ends. All calls come from the
    scheduler's thread, and with several ranks in the same order on each; `poll` once in every step.

    Args:
        controller: copies, pools and the storage. Device slots are taken through `alloc_kv` and
            `alloc_state`, and freed directly.
        checkpoint_grid: tokens between checkpoints, where the model's recurrent state is kept; a
            multiple of the page and of the tokens after which the state kernel has a state to give.
            None for a model without such states.
        write_policy: time at which nodes are written to the host and the storage.

    Raises:
        ConfigError: there are states without a checkpoint grid, or the other way round, or the grid
            is not whole pages.
    """

    def __init__(
        self,
        controller: HybridCacheController,
        *,
        checkpoint_grid: int | None = None,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
    ) -> None:
        self.page_size = controller.group.page_size
        """Tokens per page."""
        self.grid = self.page_size if checkpoint_grid is None else checkpoint_grid
        """Tokens between the positions from which a request can continue."""
        self.has_states = checkpoint_grid is not None
        """Whether the model has recurrent states."""
        if self.has_states is not controller.group.has_states:
            raise ConfigError(
                "checkpoint_grid must be given for a controller with a pool of states, and only "
                f"for one, got {checkpoint_grid}"
            )
        if self.grid < 1 or self.grid % self.page_size:
            raise ConfigError(
                f"checkpoint_grid must be a positive multiple of the page size {self.page_size}, "
                f"got {self.grid}"
            )
        self._write_policy = WritePolicy(write_policy)
        self._controller = controller
        pools = {SlotKind.KV: PoolName.KV, SlotKind.STATE: PoolName.MAMBA}
        entries = controller.group.entries
        self._device_pools = {
            kind: pool
            for kind, name in pools.items()
            if name in entries and (pool := entries[name].device_pool) is not None
        }
        self._tree = RadixTree(self.page_size)
        self._ownership = SlotOwnership(self._tree, self._device_pools, controller.free_host)
        self._locks = PrefixLocks(self._ownership, controller)
        self._matcher = PrefixMatcher(self._tree, self._ownership)
        self._write_back = NodeWriteBack(self._tree, self._ownership, controller)
        self._prefetches: dict[str, _Prefetch] = {}
        self._dropped_tokens = 0
        self._register_evictors()

    # Requests -----------------------------------------------------------------------------------

    def committed_length(self, length: int) -> int:
        """Return the tokens of a finished request that can be used again.

        The last token was sampled and never computed, so it has no KV.
        """
        return max(0, length - 1) // self.grid * self.grid

    def match(
        self, tokens: Sequence[int], *, namespace: str | None = None, device_only: bool = False
    ) -> MatchResult:
        """Return the longest prefix of `tokens` from which a request can continue.

        Changes nothing.

        Args:
            tokens: those that the request may take from the cache: all except its last, as one
                token at least has to be computed.
            namespace: result of `namespace_seed`.
            device_only: match only what is on the device.
        """
        return self._matcher.match(tokens, namespace, device_only=device_only)

    def lock(self, prefix: Prefix) -> PrefixLock:
        """Keep a prefix on its tiers until `unlock`. A match counts as a hit and a use.

        Raises:
            StalePrefixError: a part of it has been evicted or moved since it was found.
        """
        node = self._matcher.locate(prefix)
        is_hit = isinstance(prefix, MatchResult)
        lock = self._locks.lock(node, with_state=is_hit)
        # The lock of an insertion is no further use: `insert` has counted it.
        if is_hit:
            self._refresh(node)
            for each in node.upward():
                each.hits += 1
            self._write_if_due(node)
        return lock

    def unlock(self, lock: PrefixLock) -> None:
        """End a lock.

        Raises:
            StalePrefixError: it was unlocked before.
        """
        self._locks.unlock(lock)

    def release_state(self, lock: PrefixLock) -> None:
        """Unlock the device state of a locked match, once it has been copied.

        The KV stays locked.

        Raises:
            StalePrefixError: the lock is not held.
        """
        self._locks.release_state(lock)

    def load(self, lock: PrefixLock) -> LoadResult | None:
        """Load the locked part of a prefix that is on the host to the device.

        KV is loaded into the cache, the state into a slot that the caller owns then.
        `start_loading` launches the load; until then the slot must not be freed.

        Returns:
            None if the device has too few free slots; the lock is as before then.

        Raises:
            StalePrefixError: the lock is not held.
        """
        return self._locks.load(lock)

    def start_loading(self) -> LayerCounter:
        """Launch the loads of this step; returns the layer counter of its kernels.

        Requests that loaded nothing wait as well: their prefix may be part of another request's
        load.
        """
        return self._controller.start_loading()

    def insert(
        self,
        tokens: Sequence[int],
        kv_indices: torch.Tensor,
        states: Mapping[int, int] | None = None,
        *,
        namespace: str | None = None,
    ) -> Prefix:
        """Insert the KV of the whole pages of `tokens`, and states; all of it is on the device.

        The cache owns their slots then. States that it has already are freed.

        Rows of tokens that the cache has already are freed unless they are the cache's own: the
        caller uses `device_indices` of the result from now on. The rows of a partial page at the
        end still belong to the caller.

        Args:
            tokens: all of them.
            kv_indices: int64 on the CPU, the device slot of each token, in whole pages.
            states: by lengths on the checkpoint grid, device slots of the state after so many
                tokens.

        Raises:
            InvalidTransferError: there are not as many slots as tokens, or a state is not at a
                checkpoint of them.
        """
        pages = self._tree.whole_pages(tokens)
        states = states or {}
        # Before the first slot changes its owner: after an error all of them are still the
        # caller's.
        self._check_insert(len(pages), kv_indices, states)
        node = self._insert_nodes(self._tree.root(namespace), pages, kv_indices, states)
        self._refresh(node)
        self._write_if_due(node)
        rows = self._ownership.rows(self._ownership.device, node.downward())
        return Prefix(len(pages), rows, 0, node.id)

    # Memory -------------------------------------------------------------------------------------

    def alloc_kv(self, count: int) -> torch.Tensor | None:
        """Take device slots for tokens, whole pages; evicts if needed.

        None if there are not enough.
        """
        return self._alloc(SlotKind.KV, count)

    def alloc_state(self, count: int = 1) -> torch.Tensor | None:
        """Take device slots for states; evicts if needed. None if there are not enough."""
        return self._alloc(SlotKind.STATE, count)

    def evict(self, tokens: int = 0, states: int = 0) -> None:
        """Free device slots, the least recently used first, KV before states."""
        save = self._write_back.back_up if self._write_policy is WritePolicy.WRITE_BACK else None
        self._ownership.evict(self._ownership.device, tokens, states, save)
        # The next user of the slots waits for the copies that read them, so they have to be
        # launched.
        self._controller.start_writing()

    def evict_host(self, tokens: int = 0, states: int = 0) -> None:
        """Free host slots in the same way."""
        self._ownership.evict(self._ownership.host, tokens, states)

    # Storage ------------------------------------------------------------------------------------

    def prefetch_from_storage(
        self, request_id: str, tokens: Sequence[int], *, namespace: str | None = None
    ) -> bool:
        """Start to fetch the tokens after the match of `tokens`.

        False if no prefetch is started.

        The storage is looked up first, and all ranks agree on the hit. Then host memory is taken,
        with eviction if needed, for the longest prefix that fits and ends at an endpoint. Ends with
        `check_prefetch` or `end_prefetch`.
        """
        if request_id in self._prefetches:
            return True
        match = self.match(tokens, namespace=namespace)
        node = self._matcher.locate(match) if match.length else self._tree.root(namespace)
        rest = self._tree.whole_pages(tokens)[match.length :]
        if not rest or not self._controller.attached:
            return False
        hashes, before = self._tree.hashes_below(node, rest), self._tree.prefix_hashes(node)
        operation = self._controller.prefetcher.begin(request_id, hashes, before)
        if operation is None:
            return False
        # After `begin`, which may decline. Fetched pages follow this path, and are worth nothing
        # without it. On the device nothing is locked: a prefix that is only there may be evicted.
        host = self._ownership.host[SlotKind.KV]
        kept = SlotLocks({host: next((each for each in node.upward() if host.holds(each)), None)})
        self._prefetches[request_id] = _Prefetch(operation, node, kept, rest)
        return True

    def check_prefetch(self, request_id: str) -> bool:
        """Return whether a request need not wait for its prefetch: then match again.

        As of the last `poll`, which advances all prefetches with one collective.
        """
        running = self._prefetches.get(request_id)
        if running is not None and not running.operation.ready:
            return False
        self.end_prefetch(request_id)
        return True

    def end_prefetch(self, request_id: str) -> int:
        """Stop a prefetch and keep the pages that have arrived; returns their tokens.

        To be called for aborted requests as well.
        """
        running = self._prefetches.pop(request_id, None)
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
            self._dropped_tokens += fetched.tokens
        running.kept.release()
        return fetched.tokens if wanted else 0

    def end_prefetches(self) -> None:
        """Stop all prefetches, as before the storage is detached."""
        # Each end may be a collective, so that the order matters: it is that of their starts, on
        # every rank.
        for request_id in list(self._prefetches):
            self.end_prefetch(request_id)

    def storage_changed(self) -> None:
        """Mark all nodes as not stored: the storage is another one, or was cleared.

        Pages on the host are stored again when they are used.
        """
        for node in self._tree:
            node.stored.clear()

    # Steps --------------------------------------------------------------------------------------

    def poll(self) -> None:
        """Launch the copies of this step, and process operations that have ended."""
        self._controller.start_writing()
        self._controller.prefetcher.advance()
        self._write_back.poll()
        self._locks.poll()

    def idle(self) -> bool:
        """Return whether no operation is running on any tier, those before a `reset` included."""
        prefetching = any(not running.operation.done for running in self._prefetches.values())
        write_back = self._write_back
        return not (write_back.writes or write_back.stores or self._locks.loads or prefetching)

    def reset(self) -> None:
        """Remove all nodes and free all slots. Pages in the storage stay there.

        Raises:
            CacheInUseError: a prefix is locked; nothing has changed.
        """
        if len(self._locks):
            raise CacheInUseError(
                f"{len(self._locks)} prefixes are locked; unlock them before reset"
            )
        self.end_prefetches()
        # Copies that are launched reserve their host slots by themselves, and `before_overwrite`
        # protects their device slots. Queued ones do not, so they are launched first.
        self._controller.start_writing()
        self._controller.start_loading()
        # Only the bookkeeping: reservations of host slots last until the copies end.
        self._write_back.clear()
        self._locks.clear()
        self._ownership.clear()
        self._tree.clear()

    def usage(self) -> CacheUsage:
        """Return the contents and counters of the cache; may be called in any thread."""
        device, host = self._ownership.device, self._ownership.host
        return CacheUsage(
            device_tokens=device[SlotKind.KV].slots,
            device_states=device[SlotKind.STATE].slots,
            host_tokens=host[SlotKind.KV].slots,
            host_states=host[SlotKind.STATE].slots,
            evictable_tokens=device[SlotKind.KV].evictable_slots,
            evictable_states=device[SlotKind.STATE].evictable_slots,
            locks=len(self._locks),
            declined_writes=self._write_back.declined,
            dropped_tokens=self._dropped_tokens,
            tokens_stored_again=self._write_back.stored_again,
        )

    def _insert_nodes(
        self, node: Node, tokens: Tokens, rows: torch.Tensor, states: Mapping[int, int]
    ) -> Node:
        """Insert tokens below a root, in steps that end at the states."""
        device = self._ownership.device
        # A state belongs to the end of a node, so nodes end where states are.
        for end in sorted({*states, len(tokens)}):
            node = self._ownership.insert(
                device, node, tokens[node.end : end], rows[node.end : end]
            )
            if end in states:
                if not self._ownership.has_state(node):
                    # It had to be computed again: the storage may have lost the one that it stored.
                    node.stored.discard(SlotKind.STATE)
                self._ownership.insert_state(device, node, rows.new_tensor([states[end]]))
        return node

    def _insert_fetched(self, above: Node, tokens: Tokens, fetched: HybridIndices) -> None:
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

    def _refresh(self, node: Node) -> None:
        """Make the path to a node, and its state, the most recently used on both tiers."""
        for tier in self._ownership.tiers:
            for lru in tier.values():
                lru.touch(node)

    def _write_if_due(self, node: Node) -> None:
        """Write the nodes that the policy writes at their number of hits."""
        # The lowest node that is due: `back_up` writes the path above it, too.
        due = next(
            (each for each in node.upward() if self._write_policy.writes_on_hit(each.hits)),
            None,
        )
        if due:
            self._write_back.back_up(due)

    def _alloc(self, kind: SlotKind, count: int) -> torch.Tensor | None:
        pool = self._device_pools[kind]
        short = count - pool.available_size()
        if short > 0:
            self.evict(**{"tokens" if kind is SlotKind.KV else "states": short})
        slots = pool.alloc(count)
        if slots is not None:
            # A freed slot may still be read by its copy to the host: the kernels that write to it
            # have to wait (rule ST-1).
            indices = HybridIndices(slots) if kind is SlotKind.KV else self._ownership.states(slots)
            self._controller.before_overwrite(indices)
        return slots

    def _register_evictors(self) -> None:
        """Register the evictors, which the controller calls on every rank alike."""
        group, kv, state = self._controller.group, PoolName.KV, PoolName.MAMBA
        group.host.on_shortage(kv, lambda count: self.evict_host(tokens=count))
        group.device.on_shortage(kv, lambda count: self.evict(tokens=count))
        if self.has_states:
            group.host.on_shortage(state, lambda count: self.evict_host(states=count))
            group.device.on_shortage(state, lambda count: self.evict(states=count))

    def _check_insert(self, length: int, rows: torch.Tensor, states: Mapping[int, int]) -> None:
        if rows.dim() != 1 or rows.numel() < length or rows.dtype != torch.int64:
            raise InvalidTransferError(
                f"kv_indices must be {length} slots of int64, got {tuple(rows.shape)} of "
                f"{rows.dtype}"
            )
        page = self.page_size
        pages = rows[:length].view(-1, page)
        if bool((pages != pages[:, :1] // page * page + torch.arange(page)).any()):
            raise InvalidTransferError(
                f"kv_indices must be whole pages of {page} consecutive slots"
            )
        if states and not self.has_states:
            raise InvalidTransferError(
                "states were given, but the cache was made for a model without them"
            )
        wrong = [end for end in states if not 0 < end <= length or end % self.grid]
        if wrong:
            raise InvalidTransferError(
                f"states must be after multiples of {self.grid} tokens up to {length}, not {wrong}"
            )
        if len(set(states.values())) != len(states):
            raise InvalidTransferError(
                f"states must have a slot each, got {sorted(states.values())}"
            )
