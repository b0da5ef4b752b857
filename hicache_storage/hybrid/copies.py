"""Write-backs and loads of all pools: queued by the cache, launched once a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from hicache_storage.hybrid.copies.operations import CacheOperation, LoadProgress, PendingCopy
from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer import Indices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid.copies.operations import SupportsDone
    from hicache_storage.hybrid.pools.group import HostPoolGroup
    from hicache_storage.hybrid.pools.indices import HybridIndices
    from hicache_storage.hybrid.pools.tiers import CollectiveAllocator, PoolTier
    from hicache_storage.hybrid.ranks.group import RankGroup
    from hicache_storage.hybrid.stats import StatsCounter
    from hicache_storage.spec import PoolName
    from hicache_storage.transfer import LayerCounter, PageTransfers

DoneT = TypeVar("DoneT", bound="SupportsDone")


class RunningCopies:
    """Operations of one direction that were launched and have not ended on every rank."""

    def __init__(self, rank_group: RankGroup) -> None:
        self._rank_group = rank_group
        self._operations: list[CacheOperation] = []

    def add(self, operation: CacheOperation) -> None:
        """Add an operation that was launched."""
        self._operations.append(operation)

    def completed(self) -> list[CacheOperation]:
        """Remove and return the operations that have ended on every rank.

        A collective while there are any.

        Raises:
            StreamFailedError: a copy of this rank failed; it votes that the copy has not ended.
        """
        # The same operations run on every rank, in the same order, so the test is the same on all.
        if not self._operations:
            return []
        votes, error = list[int](), None
        for operation in self._operations:
            try:
                votes.append(int(operation.done()))
            except Exception as failure:  # noqa: BLE001 - raised below, after the collective that the others wait for
                votes.append(0)
                error = failure
        agreed = self._rank_group.all_reduce_min(votes)
        outcomes = list(zip(self._operations, agreed, strict=True))
        self._operations = [operation for operation, vote in outcomes if not vote]
        if error is not None:
            raise error
        return [operation for operation, vote in outcomes if vote]

    def clear(self) -> None:
        """Drop all operations; their host pages stay reserved until the copies end."""
        self._operations = []


class DeviceCopies:
    """Write-backs and loads.

    All methods are called by the scheduler's thread, in the same order on every rank.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        transfers: PageTransfers,
        allocator: CollectiveAllocator,
        rank_group: RankGroup,
        stats: StatsCounter,
    ) -> None:
        self._group = group
        self._transfers = transfers
        self._allocator = allocator
        self._stats = stats
        self._queued_writes: list[CacheOperation] = []
        self._queued_loads: list[CacheOperation] = []
        self._writing = RunningCopies(rank_group)
        self._loading = RunningCopies(rank_group)
        self._counters: dict[int, LayerCounter] = {}
        self._last_consumer = 0

    def write(self, device: HybridIndices, node_id: int, priority: int) -> HybridIndices | None:
        """Take host slots for a span and queue its copy.

        None if there is not enough memory.
        """
        self._group.check(device)
        host = self._allocate(self._group.host, device, {})
        if host is None:
            self._stats.count(writes_without_room=1)
            return None
        operation = CacheOperation(device, host, [node_id], priority)
        # The cache may free the host slots before the copy has ended.
        self._group.hold(self._group.owned(host), operation.pending[0])
        self._queued_writes.append(operation)
        return host

    def load(
        self,
        host: HybridIndices,
        node_ids: Sequence[int],
        given: Mapping[PoolName, torch.Tensor],
        priority: int,
    ) -> HybridIndices | None:
        """Take device slots for a span, except those given, and queue its copy.

        None if there is not enough memory.
        """
        self._group.check(host)
        self._check_given(host, given)
        pending = PendingCopy()
        try:
            # Reserve the host pages before memory is taken: that may evict the node that holds
            # them. Where it fails, the reservation ends at once.
            self._group.hold(self._group.owned(host), pending)
            device = self._allocate(self._group.device, host, given)
        except BaseException:
            pending.mark_started(LoadProgress())
            raise
        if device is None:
            pending.mark_started(LoadProgress())
            self._stats.count(loads_without_room=1)
            return None
        self._queued_loads.append(CacheOperation(device, host, list(node_ids), priority, [pending]))
        return device

    def start_writing(self) -> int:
        """Launch the queued write-backs as one; returns the number of tokens."""
        if not self._queued_writes:
            return 0
        queued = _by_priority(self._queued_writes)
        operation = CacheOperation.merge_ops(queued, self._group.page_size)
        # Before `_start`, which may raise: a span that was refused must not be launched again.
        self._queued_writes = []
        self._start(operation, self._transfers.write_back)
        self._writing.add(operation)
        self._stats.count(tokens_written_back=operation.host.anchor.numel())
        return operation.host.anchor.numel()

    def start_loading(self) -> int:
        """Launch the queued loads as one.

        Returns the id of the counter of all running loads.

        -1 if no load is running.
        """
        # A request of this step may use pages of an earlier load that is still running.
        if not self._queued_loads:
            return next(reversed(self._counters), -1)
        queued = _by_priority(self._queued_loads)
        operation = CacheOperation.merge_ops(queued, self._group.page_size)
        self._queued_loads = []
        counter = self._start(operation, self._transfers.load)
        self._loading.add(operation)
        self._last_consumer += 1
        self._counters[self._last_consumer] = counter
        self._stats.count(tokens_loaded=operation.device.anchor.numel())
        return self._last_consumer

    def layer_counter(self, consumer: int) -> LoadProgress:
        """Return the progress of a step's loads, and of earlier ones still running."""
        counters = self._counters.items()
        # Without loads of later steps: kernels of this step would wait for pages that they do not
        # use.
        return LoadProgress([counter for started, counter in counters if started <= consumer])

    def completed_writes(self) -> list[int]:
        """Return the nodes whose write-back has ended on every rank, each once."""
        # Here, because it is called once in every step.
        self._group.release()
        return [node for operation in self._writing.completed() for node in operation.node_ids]

    def completed_loads(self) -> list[int]:
        """Return the nodes whose load has ended on every rank."""
        completed = [node for operation in self._loading.completed() for node in operation.node_ids]
        self._counters = {
            consumer: counter for consumer, counter in self._counters.items() if not counter.done()
        }
        return completed

    def reset(self) -> None:
        """Drop all copies; the host pages of running ones stay reserved until they end."""
        for operation in (*self._queued_writes, *self._queued_loads):
            operation.mark_started(LoadProgress())
        self._queued_writes = []
        self._queued_loads = []
        self._writing.clear()
        self._loading.clear()
        self._counters = {}

    def _allocate(
        self, tier: PoolTier, like: HybridIndices, given: Mapping[PoolName, torch.Tensor]
    ) -> HybridIndices | None:
        needs = {
            name: slots.numel()
            for name, slots in self._group.owned(like).items()
            if name not in given
        }
        taken = self._allocator.alloc(tier, needs)
        return None if taken is None else self._group.span({**taken, **given}, like.endpoints)

    def _check_given(self, host: HybridIndices, given: Mapping[PoolName, torch.Tensor]) -> None:
        for name, slots in given.items():
            wanted = host.side[name].numel() if name in host.side else 0
            if not wanted or slots.dtype != torch.int64 or slots.numel() != wanted:
                raise InvalidTransferError(
                    f"into: {name!r} must have {wanted} slots of int64, got {slots.numel()} of "
                    f"{slots.dtype}"
                    + ("" if wanted else "; the span has nothing for it, leave it out")
                )
            queued = [
                load.device.side[name] for load in self._queued_loads if name in load.device.side
            ]
            # Of two loads into one slot only the later one's bytes remain: a request would continue
            # from another's state.
            taken = torch.cat([*queued, slots])
            if bool((taken.sort().values.diff() == 0).any()):
                raise InvalidTransferError(
                    f"into: {name!r} has a slot that another load of this step goes to: "
                    f"{slots.tolist()}"
                )

    def _start(
        self, operation: CacheOperation, copy: Callable[[dict[str, Indices]], DoneT]
    ) -> DoneT:
        """Enqueue the copies of all pools; if that raises, the operation has ended."""
        pages: dict[str, Indices] = {}
        for name in self._group.entries:
            device, host = (
                self._group.slots(operation.device, name),
                self._group.slots(operation.host, name),
            )
            # A span may have no slots of a pool, and be a state alone.
            if device is not None and host is not None and device.numel():
                pages[name] = Indices(device, host)
        try:
            copies = copy(pages)
        except BaseException:
            operation.mark_started(LoadProgress())
            raise
        operation.mark_started(copies)
        return copies


def _by_priority(operations: Sequence[CacheOperation]) -> list[CacheOperation]:
    # A stable sort: within a priority the order of the calls is kept, which is the same on every
    # rank.
    return sorted(operations, key=lambda operation: operation.priority)
