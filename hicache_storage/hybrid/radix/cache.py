"""The radix cache of hybrid models over three tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from hicache_storage.hybrid.indices import HybridIndices
from hicache_storage.hybrid.radix.backups import Backups
from hicache_storage.hybrid.radix.eviction import Evicted, Eviction
from hicache_storage.hybrid.radix.loading import Loading
from hicache_storage.hybrid.radix.locks import Locks
from hicache_storage.hybrid.radix.matching import Matching
from hicache_storage.hybrid.radix.nodes import Kind
from hicache_storage.hybrid.radix.prefetching import Prefetching
from hicache_storage.hybrid.radix.residency import Residency
from hicache_storage.hybrid.radix.results import CacheUsage, InsertResult, MatchResult, Prefix
from hicache_storage.hybrid.radix.tree import RadixTree
from hicache_storage.spec import ConfigError, HiCacheError, InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.hybrid.radix.config import RadixCacheConfig
    from hicache_storage.hybrid.radix.nodes import Node
    from hicache_storage.hybrid.radix.results import LoadResult, PrefixLock
    from hicache_storage.hybrid.radix.tiers import DeviceSlots, TierController
    from hicache_storage.hybrid.radix.units import Units


class CacheInUseError(HiCacheError, RuntimeError):
    """The cache cannot be emptied while prefixes are locked."""

    code = "cache-in-use"


class HiMambaRadixCache:
    """Finds the longest prefix that a request can go on from, keeps it, and moves it between device, host and storage.

    Tokens are cached in pages. A model with recurrent states can only go on where its KV is complete *and* the state
    after the last of those tokens is there; such states exist at checkpoints. A model without them (plain attention, MLA
    with an indexer whose slots derive from KV) can go on after every page.

    A request goes through `match`, `lock`, `load` where the match needs it, and `insert`; it locks what it inserted,
    unlocks what it had, and inserts again when it ends. All calls come from the scheduler's thread, and with several
    ranks in the same order on each; `poll` once in every step.

    Args:
        config: what kind of model this is.
        controller: copies, and the storage.
        kv_slots: the device pool of KV. Its free slots are taken through `alloc_kv`, and given back directly.
        state_slots: the device pool of states, for a model that has them; the same holds for `alloc_state`.

    Raises:
        InvalidTransferError: there are state slots without a checkpoint grid, or the other way round, or page sizes differ.
        ConfigError: `bigram` is not the same in the config and in the controller.
    """

    def __init__(
        self,
        config: RadixCacheConfig,
        controller: TierController[Any],
        kv_slots: DeviceSlots,
        state_slots: DeviceSlots | None = None,
    ) -> None:
        _check_pools(config, kv_slots, state_slots)
        if controller.bigram != config.bigram:
            raise ConfigError(
                f"bigram is {config.bigram} in the cache's config and {controller.bigram} in the controller: one would store "
                "under keys that the other does not ask for; make them equal"
            )
        self.config = config
        self._controller = controller
        self._device_pools = {Kind.KV: kv_slots} | ({} if state_slots is None else {Kind.STATE: state_slots})
        self._tree = RadixTree(config.page_size, bigram=config.bigram)
        self._residency = Residency(self._tree, self._device_pools, controller.free_host, config.state_pool)
        self._locks = Locks(self._residency)
        self._matching = Matching(self._tree, self._residency)
        self._backups = Backups(self._residency, controller, config.page_size)
        save = self._backups.back_up if config.write_policy.writes_on_eviction else None
        self._eviction = Eviction(self._tree, self._residency, save)
        self._loading = Loading(self._residency, self._locks, controller, config.page_size)
        self._prefetching = Prefetching(self._residency, controller, self._backups, config.page_size)
        self._serve_shortages()

    # -- requests

    def match(self, tokens: Sequence[int], *, namespace: str | None = None, device_only: bool = False) -> MatchResult:
        """The longest prefix of `tokens` from which a request can go on. Changes nothing.

        Args:
            tokens: those that the request may take from the cache; at least one of its tokens has to be computed, so
                its last is not among them. With `bigram` it is: the last token has no row of its own there.
            namespace: what `namespace_seed` gives.
            device_only: leave out what would have to be loaded.
        """
        return self._matching.match(tokens, namespace, device_only=device_only)

    def lock(self, prefix: Prefix) -> PrefixLock:
        """Keep a prefix where it is until `unlock`: a match is a hit then, and refreshes what it consumes.

        Raises:
            StalePrefixError: something of it has been evicted or moved since it was found.
        """
        node = self._matching.locate(prefix)
        is_hit = isinstance(prefix, MatchResult)
        lock = self._locks.lock(node, with_state=is_hit)
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
        """Keep only the KV of a match that was locked: its state on the device has been copied, and may go.

        Raises:
            StalePrefixError: the lock is not held.
        """
        self._locks.release_state(lock)

    def load(self, lock: PrefixLock, state_slot: int | None = None) -> LoadResult | None:
        """Bring what a lock keeps on the host to the device: KV into the cache, the state into a slot of the request's.

        `start_loading` launches it; until then the slot must not be given back.

        Args:
            state_slot: where the state goes, if it comes from the host; None takes a slot, which is the caller's then.

        Returns:
            None where the device has no room for it; the lock is as before then.

        Raises:
            StalePrefixError: the lock is not held.
            InvalidTransferError: there is no such state slot, or another load of this step goes there; nothing changes.
        """
        states = self._device_pools.get(Kind.STATE)
        if state_slot is not None and (states is None or not 0 <= state_slot < states.size):
            raise InvalidTransferError(f"state_slot must be in [0, {states.size if states else 0}), got {state_slot}")
        return self._loading.load(lock, state_slot)

    def start_loading(self) -> int:
        """Launch the loads of this step; the id of the layer counter that its kernels wait for, -1 if no load is under way.

        Requests that loaded nothing wait as well: their prefix may be coming with another request's load.
        """
        return self._controller.start_loading()

    def insert(
        self,
        tokens: Sequence[int],
        kv_indices: torch.Tensor,
        states: Mapping[int, int] | None = None,
        *,
        namespace: str | None = None,
    ) -> InsertResult:
        """Take over the KV of the whole pages of `tokens`, and states.

        Rows of tokens that the cache has already go back to the pool unless they are the cache's own: the caller uses
        `device_indices` of the result from now on. The rows of the last, partial page stay with the caller.

        Args:
            tokens: all of them; with `bigram` also the token after the last that has a row.
            kv_indices: int64 on the CPU, the device slot of each token that has a row, in whole pages.
            states: for lengths on the checkpoint grid, device slots with the state after so many tokens.

        Raises:
            InvalidTransferError: there are not as many slots as tokens, or a state is not at a checkpoint of them.
        """
        pages = self._tree.whole_pages(tokens)
        states = states or {}
        self._check_insert(len(pages), kv_indices, states)
        node, new_states = self._lay(self._tree.root(namespace), pages, kv_indices, states)
        self._refresh(node)
        self._write_if_due(node)
        rows = self._residency.rows(self._residency.device, list(node.upward())[::-1])
        return InsertResult(len(pages), rows, 0, node.id, new_states)

    # -- room

    def alloc_kv(self, count: int) -> torch.Tensor | None:
        """Take device slots for tokens, whole pages, evicting for them; None if there are not enough."""
        return self._alloc(Kind.KV, count)

    def alloc_state(self, count: int = 1) -> torch.Tensor | None:
        """Take device slots for states, evicting for them; None if there are not enough."""
        return self._alloc(Kind.STATE, count)

    def evict(self, tokens: int = 0, states: int = 0) -> Evicted:
        """Free device slots of what is not locked, the least recently used first, KV before states."""
        evicted = self._eviction.device(tokens, states)
        # Copies have to be launched before anybody can be told to wait for them.
        self._controller.start_writing()
        return evicted

    def evict_host(self, tokens: int = 0, states: int = 0) -> Evicted:
        """Free host slots in the same way."""
        return self._eviction.host(tokens, states)

    # -- storage

    def prefetch_from_storage(self, request_id: str, tokens: Sequence[int], *, namespace: str | None = None) -> bool:
        """Begin to fetch what follows the match of `tokens`; False if nothing is fetched for this request.

        The storage is asked first, all ranks agree, and host memory is taken for what they agreed on: evicting for it,
        and cut to the longest prefix that fits and can be gone on from. Ends with `check_prefetch` or `end_prefetch`.
        """
        if request_id in self._prefetching:
            return True
        match = self.match(tokens, namespace=namespace)
        node = self._matching.locate(match) if match.length else self._tree.root(namespace)
        return self._prefetching.start(request_id, node, self._tree.whole_pages(tokens)[match.length :])

    def check_prefetch(self, request_id: str) -> bool:
        """Whether a request need not wait for a prefetch, or not any more: match again, it is on the host.

        As of the last `poll`, which leads all prefetches on with one agreement of the ranks.
        """
        return self._prefetching.check(request_id)

    def end_prefetch(self, request_id: str) -> int:
        """Stop a prefetch and keep what has come; returns that in tokens. For requests that are given up, too."""
        return self._prefetching.end(request_id)

    def end_prefetches(self) -> None:
        """Stop all prefetches, as before the storage is detached."""
        self._prefetching.end_all()

    def storage_changed(self) -> None:
        """Another storage was attached, or it was cleared: what is on the host goes there again when it is used."""
        for node in self._tree:
            node.stored.clear()

    # -- time

    def poll(self) -> None:
        """Launch the copies of this step, and take note of what is done."""
        self._controller.start_writing()
        self._controller.advance_prefetches()
        self._backups.poll()
        self._loading.poll()

    def idle(self) -> bool:
        """Whether nothing is under way on any tier."""
        return not (len(self._backups) or len(self._loading) or len(self._prefetching))

    def reset(self) -> None:
        """Forget everything and give all slots back. What is in the storage stays there.

        Raises:
            CacheInUseError: a prefix is locked; nothing has changed.
        """
        if len(self._locks):
            raise CacheInUseError(f"{len(self._locks)} prefixes are locked; unlock them before reset")
        self.end_prefetches()
        # What is launched holds its host slots by itself, and its device slots until they may be overwritten.
        self._controller.start_writing()
        self._controller.start_loading()
        self._backups.forget()
        self._loading.forget()
        self._residency.clear()
        self._tree.clear()

    def usage(self) -> CacheUsage:
        """What the cache holds now."""
        device, host = self._residency.device, self._residency.host
        return CacheUsage(
            device_tokens=device[Kind.KV].slots,
            device_states=device[Kind.STATE].slots,
            host_tokens=host[Kind.KV].slots,
            host_states=host[Kind.STATE].slots,
            evictable_tokens=device[Kind.KV].evictable_slots(),
            evictable_states=device[Kind.STATE].evictable_slots(),
            locks=len(self._locks),
            declined_writes=self._backups.declined,
            dropped_tokens=self._prefetching.dropped_tokens,
            tokens_stored_again=self._backups.stored_again,
        )

    def _lay(self, node: Node, tokens: Units, rows: torch.Tensor, states: Mapping[int, int]) -> tuple[Node, int]:
        """Lay tokens from the root on, in steps that end where a state belongs."""
        device, new_states = self._residency.device, 0
        for end in sorted({*states, len(tokens)}):
            node = self._residency.lay(device, node, tokens[node.end : end], rows[node.end : end])
            if end in states:
                if not self._residency.has_state(node):
                    # It had to be computed: the storage may have lost what it was given.
                    node.stored.discard(Kind.STATE)
                new_states += self._residency.place_state(device, node, rows.new_tensor([states[end]]))
        return node, new_states

    def _refresh(self, node: Node) -> None:
        """Make the path to a node, and the state after it, the most recently used on both tiers."""
        for tier in (self._residency.device, self._residency.host):
            for lru in tier.values():
                lru.touch(node)

    def _write_if_due(self, node: Node) -> None:
        """Write what the policy wants on the host by now."""
        due = next((each for each in node.upward() if self.config.write_policy.writes_on_hit(each.hits)), None)
        if due:
            self._backups.back_up(due)

    def _alloc(self, kind: Kind, count: int) -> torch.Tensor | None:
        pool = self._device_pools[kind]
        short = count - pool.available_size()
        if short > 0:
            self.evict(**{"tokens" if kind is Kind.KV else "states": short})
        slots = pool.alloc(count)
        if slots is not None:
            indices = HybridIndices(slots) if kind is Kind.KV else self._residency.states(slots)
            self._controller.before_overwrite(indices)
        return slots

    def _serve_shortages(self) -> None:
        """Let the controller make room, on every rank alike."""
        group, kv, state = self._controller.group, self.config.kv_pool, self.config.state_pool
        group.host.on_shortage(kv, lambda count: self.evict_host(tokens=count))
        group.device.on_shortage(kv, lambda count: self.evict(tokens=count))
        if self._residency.has_states:
            group.host.on_shortage(state, lambda count: self.evict_host(states=count))
            group.device.on_shortage(state, lambda count: self.evict(states=count))

    def _check_insert(self, length: int, rows: torch.Tensor, states: Mapping[int, int]) -> None:
        if rows.dim() != 1 or rows.numel() < length or rows.dtype != torch.int64:
            raise InvalidTransferError(f"kv_indices must be {length} slots of int64, got {tuple(rows.shape)} of {rows.dtype}")
        page = self.config.page_size
        pages = rows[:length].view(-1, page)
        if bool((pages != pages[:, :1] // page * page + torch.arange(page)).any()):
            raise InvalidTransferError(f"kv_indices must be whole pages of {page} consecutive slots")
        if states and not self._residency.has_states:
            raise InvalidTransferError("states were given, but the cache was made for a model without them")
        wrong = [end for end in states if not 0 < end <= length or end % self.config.grid]
        if wrong:
            raise InvalidTransferError(f"states must be after multiples of {self.config.grid} tokens up to {length}, not {wrong}")
        if len(set(states.values())) != len(states):
            raise InvalidTransferError(f"states must have a slot each, got {sorted(states.values())}")


def _check_pools(config: RadixCacheConfig, kv_slots: DeviceSlots, state_slots: DeviceSlots | None) -> None:
    if kv_slots.page_size != config.page_size:
        raise InvalidTransferError(f"kv_slots has pages of {kv_slots.page_size} slots, the cache of {config.page_size}")
    if (state_slots is None) != (config.checkpoint_grid is None):
        raise InvalidTransferError("state_slots and checkpoint_grid go together: give both, or neither")
