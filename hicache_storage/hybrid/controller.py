"""Controller that moves pages of a hybrid model between device, host and storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hicache_storage.hybrid.copies import CacheOperation, CopyQueue
from hicache_storage.hybrid.policies import PrefetchRules
from hicache_storage.hybrid.ranks import ParallelConfig, SingleRank, check_consistent
from hicache_storage.hybrid.storage_io.backups import StorageBackups
from hicache_storage.hybrid.storage_io.calls import StatsCounter
from hicache_storage.hybrid.storage_io.prefetch import Prefetcher
from hicache_storage.hybrid.storage_io.workers import (
    StorageAttachedError,
    StorageBinding,
    StorageLink,
    call_with_timeout,
    close_quietly,
)
from hicache_storage.spec import (
    ConfigError,
    StorageUnavailableError,
)
from hicache_storage.transfer import LayerCounter

if TYPE_CHECKING:
    from hicache_storage.hybrid.pools import HostPoolGroup, HybridIndices, PoolTier
    from hicache_storage.hybrid.ranks import RankGroup
    from hicache_storage.hybrid.storage_io.calls import ControllerStats
    from hicache_storage.spec import HiCacheStorage
    from hicache_storage.transfer import PageTransfers

ATTACH_SECONDS = 300.0
"""Time limit for opening a storage and registering the pools."""


class HybridCacheController:
    """Copies spans of pages between device and host, and to and from a storage.

    All methods are called by one thread, the scheduler's, and none waits for a copy or for the
    storage. Where several ranks serve a request together, each calls the same methods in the same
    order; methods marked as a collective then return the same on all of them. A storage that
    raises, gives invalid answers or hangs causes misses on all ranks, and nothing else.

    Host slots belong to the caller from the moment a method returns them. Slots that a copy or a
    call of the storage still uses stay reserved after `free_host` until it ends.

    Making a controller is a collective, too.

    Args:
        group: the pools.
        transfers: copies the pools, by their names; its `host_slots` are those of the entries.
        parallel: position of this rank.
        rank_group: the ranks of the replica; may be left out for a single one.
        rules: rules of prefetches.
        storage_call_seconds: time after which a call of the storage is abandoned; more than the
            storage's own deadline.
        stop_seconds: time that `detach` waits for each of the threads.

    Raises:
        ConfigError: `rank_group` has not as many ranks as `parallel`, or another rank has other
            pools, slots or rules; the message names the difference. A pipeline stage without
            layers of a kind needs that pool all the same.
        OtherRankError: another rank has refused.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        transfers: PageTransfers,
        *,
        parallel: ParallelConfig | None = None,
        rank_group: RankGroup | None = None,
        rules: PrefetchRules | None = None,
        storage_call_seconds: float = 30.0,
        stop_seconds: float = 2.0,
    ) -> None:
        rank_group = rank_group or SingleRank()
        self.group = group
        self.parallel = parallel or ParallelConfig()
        rules = rules or PrefetchRules()
        invariants = _rank_invariants(group, rules)
        # A wrong size is passed on, not raised: the other ranks wait in this collective.
        check_consistent(rank_group, invariants, _size_error(rank_group, self.parallel))
        self.rank_group = rank_group
        self._transfers = transfers
        self._call_seconds = storage_call_seconds
        self._stop_seconds = stop_seconds
        self._counter = StatsCounter()
        self._writes = CopyQueue(group, rank_group, transfers.write_back)
        self._loads = CopyQueue(group, rank_group, transfers.load)
        self._link = StorageLink()
        self.prefetcher = Prefetcher(group, rank_group, rules, self._counter, self._link)
        """Reads spans of pages from the storage to the host."""
        self.backups = StorageBackups(group, rank_group, self._counter, self._link)
        """Writes spans of host pages to the storage."""

    # Device and host -----------------------------------------------------------------------------

    def write(self, device: HybridIndices, node_id: int) -> HybridIndices | None:
        """Take host slots for device pages and queue their copy.

        A collective. Evicts once if the host has too few free slots.

        Args:
            device: all pools.
            node_id: returned by `completed_writes`. The device pages may be freed once
                `start_writing` has launched the copy: `before_overwrite` keeps them until it ends.

        Returns:
            The host slots, to be read once `completed_writes` has returned the id; None if some
            rank has not enough memory.

        Raises:
            InvalidTransferError: the span does not fit the pools; nothing is taken.
        """
        self.group.check(device)
        host = self._allocate(self.group.host, device)
        if host is None:
            self._counter.count(writes_without_room=1)
            return None
        operation = CacheOperation(host, node_id, device)
        # The cache may free the host slots before the copy has ended.
        self.group.hold(self.group.owned(host), operation)
        self._writes.queued.append(operation)
        return host

    def start_writing(self) -> int:
        """Launch all queued write-backs as one operation; returns the number of tokens.

        Raises:
            InvalidTransferError: a device slot is out of range; none of the queued spans is copied,
                and `completed_writes` returns none of their ids.
        """
        tokens = self._writes.launch()
        self._counter.count(tokens_written_back=tokens)
        return tokens

    def completed_writes(self) -> list[int]:
        """Return node ids whose write-back has ended on every rank, each once.

        A collective while there are any.
        """
        return self._writes.completed()

    def load(self, host: HybridIndices, node_id: int) -> HybridIndices | None:
        """Take device slots for host pages and queue their copy.

        A collective. Evicts once if the device has too few free slots.

        Args:
            host: all pools. A state may be loaded alone, without KV.
            node_id: returned by `completed_loads`; until then host and device pages must not be
                evicted.

        Returns:
            The device slots; None if some rank has not enough memory.

        Raises:
            InvalidTransferError: the span does not fit the pools; nothing is taken.
        """
        self.group.check(host)
        operation = CacheOperation(host, node_id)
        device = None
        try:
            # Reserve the host pages before memory is taken: that may evict the node that holds
            # them.
            self.group.hold(self.group.owned(host), operation)
            device = self._allocate(self.group.device, host)
        finally:
            if device is None:
                operation.is_queued = False
        if device is None:
            self._counter.count(loads_without_room=1)
            return None
        operation.device = device
        self._loads.queued.append(operation)
        return device

    def start_loading(self) -> LayerCounter:
        """Launch all queued loads as one operation; returns the counter of this step's kernels.

        Called in every step: the counter covers earlier loads as well, which come first on the same
        stream, and whose pages requests of this step may use. Where no load is running it waits for
        nothing.

        Raises:
            InvalidTransferError: as for `start_writing`; also where two loads have one device page.
        """
        self._counter.count(tokens_loaded=self._loads.launch())
        return self._loads.running[-1][0] if self._loads.running else LayerCounter(())

    def completed_loads(self) -> list[int]:
        """Return node ids whose load has ended on every rank, each once.

        A collective while there are any.
        """
        return self._loads.completed()

    def before_overwrite(self, device: HybridIndices) -> None:
        """Let the compute stream wait for the copies of device pages to be overwritten.

        Rule ST-1.
        """
        # Derived pools as well: an indexer lies in the slots of KV.
        self._transfers.before_overwrite(
            {str(name): self.group.slots(device, name) for name in self.group.entries}
        )

    def free_host(self, host: HybridIndices) -> None:
        """Free host slots of all pools.

        Slots that a copy or a call of the storage uses stay reserved until it ends.

        Raises:
            SlotError: slots were not allocated, or are freed twice; those of other pools are free.
        """
        self.group.host.free(self.group.owned(host))

    # Storage -------------------------------------------------------------------------------------

    @property
    def attached(self) -> bool:
        """True if a storage is attached."""
        return self._link.binding is not None

    def attach(self, storage: HiCacheStorage) -> None:
        """Use a storage from now on, on every rank or on none. A collective.

        The controller owns the storage: `detach` closes it. An attach that fails closes it as well,
        and leaves the controller as it was.

        Args:
            storage: of this rank's identity; it is opened, and the pools are registered with it.

        Raises:
            StorageAttachedError: there is one already; the new one is unchanged.
            StorageUnavailableError: it failed on another rank, or cannot be reached.
            HiCacheError: the error of the storage on this rank, such as `InvalidPoolError`.
        """
        if self.attached:
            # Without a collective: every rank attaches and detaches in the same order, so all
            # raise.
            raise StorageAttachedError("a storage is attached; detach it first")
        # A storage that failed on one rank only would let the ranks see different hits: all ranks
        # attach, or none.
        error = self._register(storage)
        if not self.rank_group.all_reduce_min([int(error is None)])[0]:
            close_quietly(storage, self._stop_seconds, self._counter)
            raise error or StorageUnavailableError("another rank could not attach its storage")
        self._link.binding = StorageBinding(storage, self.group, self._call_seconds, self._counter)

    def detach(self) -> None:
        """Stop using the storage and close it. Idempotent.

        Prefetches deliver nothing more; backups make no further attempt. Returns within a few times
        `stop_seconds`, even if the storage hangs.
        """
        # Operations end before the workers are stopped, so that no retry is submitted to them.
        binding = self._link.binding
        self._link.binding = None
        # Threads and storage are released even if a pool refuses its slots.
        try:
            self.prefetcher.abort()
            self.backups.cancel()
        finally:
            if binding is not None:
                binding.close(self._stop_seconds)

    def close(self) -> None:
        """Drop all queued copies and detach; does not wait for running copies."""
        self._writes.reset()
        self._loads.reset()
        self.detach()

    def stats(self) -> ControllerStats:
        """Return a snapshot of this rank's counters."""
        return self._counter.snapshot()

    def _allocate(self, tier: PoolTier, like: HybridIndices) -> HybridIndices | None:
        """Take as many slots as a span has, on every rank or on none."""
        needs = {name: slots.numel() for name, slots in self.group.owned(like).items()}
        fits, _ = tier.make_room(needs, self.rank_group)
        taken = tier.alloc(needs) if fits else None
        return None if taken is None else self.group.span(taken, like.endpoints)

    def _register(self, storage: HiCacheStorage) -> BaseException | None:
        """Open a storage and register all pools, in the order of their names."""

        def register() -> None:
            storage.open()
            for entry in self.group.entries.values():
                storage.register_mem_host_pool_v2(entry.host_pool, entry.name)
            # After the last pool, as the contract says; drivers may check the complete set here.
            storage.on_host_pools_registered()

        try:
            self.parallel.check(storage.identity)
            call_with_timeout("attach", register, ATTACH_SECONDS)
        except BaseException as error:  # noqa: BLE001 - raised once the other ranks know
            return error
        return None


def _size_error(rank_group: RankGroup, parallel: ParallelConfig) -> ConfigError | None:
    """Error where the rank group has another size than `parallel`."""
    if rank_group.size == parallel.replica_size:
        return None
    return ConfigError(
        f"rank_group is over {rank_group.size} ranks, but parallel has {parallel.replica_size}; "
        "make it with TorchRankGroup.of(parallel)"
    )


def _rank_invariants(group: HostPoolGroup, rules: PrefetchRules) -> dict[str, object]:
    """Return the values on which decisions, and the lengths of collectives, depend."""
    entries = group.entries.values()
    return {
        "page size": group.page_size,
        "pools": list(group.entries),
        "slots of host pools": [entry.host_pool.size for entry in entries],
        "slots of device pools": [getattr(entry.device_pool, "size", None) for entry in entries],
        "prefetch rules": rules,
    }
