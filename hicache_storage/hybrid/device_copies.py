"""Write-back and load of all pools at once: queued by the cache, started once a step, told when they are over."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import torch

from hicache_storage.hybrid.operations import CacheOperation, Flight, Over
from hicache_storage.hybrid.transfers import AllArrivals
from hicache_storage.spec import InvalidTransferError
from hicache_storage.transfer import Indices

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from hicache_storage.hybrid.agreement import Agreement
    from hicache_storage.hybrid.groups import HostPoolGroup
    from hicache_storage.hybrid.indices import HybridIndices
    from hicache_storage.hybrid.operations import Done
    from hicache_storage.hybrid.stats import StatsCounter
    from hicache_storage.hybrid.tiers import AgreedRoom, PoolTier
    from hicache_storage.hybrid.transfers import Arrivals, SpanTransfers
    from hicache_storage.spec import PoolName

DoneT = TypeVar("DoneT", bound="Done")


class InFlight:
    """Operations of one direction that have begun, until they are over on every rank."""

    def __init__(self, agreement: Agreement) -> None:
        self._agreement = agreement
        self._operations: list[CacheOperation] = []

    def add(self, operation: CacheOperation) -> None:
        """One more."""
        self._operations.append(operation)

    def completed(self) -> list[CacheOperation]:
        """Those that are over on every rank, no longer kept. A collective while there are any.

        Raises:
            StreamFailedError: a copy of this rank failed; the others are told that it is not over.
        """
        if not self._operations:
            return []
        votes, error = list[int](), None
        for operation in self._operations:
            try:
                votes.append(int(operation.over()))
            except Exception as failure:  # noqa: BLE001 - raised below, after the collective that the others wait for
                votes.append(0)
                error = failure
        agreed = self._agreement.minimum(votes)
        over = [operation for operation, vote in zip(self._operations, agreed, strict=True) if vote]
        self._operations = [operation for operation, vote in zip(self._operations, agreed, strict=True) if not vote]
        if error is not None:
            raise error
        return over

    def clear(self) -> None:
        """Forget them; their host pages rest until they are over."""
        self._operations = []


class DeviceCopies:
    """Both directions. All methods are called by the scheduler's thread, alike on every rank."""

    def __init__(
        self, group: HostPoolGroup, transfers: SpanTransfers, room: AgreedRoom, agreement: Agreement, stats: StatsCounter
    ) -> None:
        self._group, self._transfers, self._room, self._stats = group, transfers, room, stats
        self._writes: list[CacheOperation] = []
        self._loads: list[CacheOperation] = []
        self._writing, self._loading = InFlight(agreement), InFlight(agreement)
        self._counters: dict[int, Arrivals] = {}
        self._consumers = 0

    def write(self, device: HybridIndices, node_id: int, priority: int) -> HybridIndices | None:
        """Take host slots for a span and queue its copy; None without room."""
        self._group.check(device)
        host = self._allocate(self._group.host, device, {})
        if host is None:
            self._stats.count(writes_without_room=1)
            return None
        operation = CacheOperation(device, host, [node_id], priority)
        self._group.hold(self._group.owned(host), operation.flights[0])
        self._writes.append(operation)
        return host

    def load(
        self, host: HybridIndices, node_ids: Sequence[int], given: Mapping[PoolName, torch.Tensor], priority: int
    ) -> HybridIndices | None:
        """Take device slots for a span, except those given, and queue its copy; None without room."""
        self._group.check(host)
        self._check_given(host, given)
        flight = Flight()
        try:
            # Before memory is taken, which may evict what holds these pages, and which a refusal must not leave behind.
            self._group.hold(self._group.owned(host), flight)
            device = self._allocate(self._group.device, host, given)
        except BaseException:
            flight.started(Over())
            raise
        if device is None:
            flight.started(Over())
            self._stats.count(loads_without_room=1)
            return None
        self._loads.append(CacheOperation(device, host, list(node_ids), priority, [flight]))
        return device

    def start_writing(self) -> int:
        """Start the queued write-backs as one; the number of tokens."""
        if not self._writes:
            return 0
        operation, self._writes = CacheOperation.merge_ops(_by_priority(self._writes), self._group.page_size), []
        self._start(operation, self._transfers.write_back)
        self._writing.add(operation)
        self._stats.count(tokens_written_back=operation.host.anchor.numel())
        return operation.host.anchor.numel()

    def start_loading(self) -> int:
        """Start the queued loads as one; the id of the counter of all loads under way, -1 if there are none."""
        if not self._loads:
            return next(reversed(self._counters), -1)
        operation, self._loads = CacheOperation.merge_ops(_by_priority(self._loads), self._group.page_size), []
        counter = self._start(operation, self._transfers.load)
        self._loading.add(operation)
        self._consumers += 1
        self._counters[self._consumers] = counter
        self._stats.count(tokens_loaded=operation.device.anchor.numel())
        return self._consumers

    def layer_counter(self, consumer: int) -> Arrivals:
        """What a step waits for: its own loads, and earlier ones that were not over when they were last asked for."""
        return AllArrivals([counter for started, counter in self._counters.items() if started <= consumer])

    def completed_writes(self) -> list[int]:
        """Nodes whose write-back is over on every rank, each as often as it was written."""
        self._group.release()
        return [node for operation in self._writing.completed() for node in operation.node_ids]

    def completed_loads(self) -> list[int]:
        """Nodes whose load is over on every rank."""
        completed = [node for operation in self._loading.completed() for node in operation.node_ids]
        self._counters = {consumer: counter for consumer, counter in self._counters.items() if not counter.done()}
        return completed

    def reset(self) -> None:
        """Drop what has not begun, and forget the rest; their host pages rest until the copies are over."""
        for operation in (*self._writes, *self._loads):
            operation.started(Over())
        self._writes, self._loads = [], []
        self._writing.clear()
        self._loading.clear()
        self._counters = {}

    def _allocate(self, tier: PoolTier, like: HybridIndices, given: Mapping[PoolName, torch.Tensor]) -> HybridIndices | None:
        needs = {name: slots.numel() for name, slots in self._group.owned(like).items() if name not in given}
        taken = self._room.alloc(tier, needs)
        return None if taken is None else self._group.span({**taken, **given}, like.endpoints)

    def _check_given(self, host: HybridIndices, given: Mapping[PoolName, torch.Tensor]) -> None:
        for name, slots in given.items():
            wanted = host.side[name].numel() if name in host.side else 0
            if not wanted or slots.dtype != torch.int64 or slots.numel() != wanted:
                raise InvalidTransferError(
                    f"into: {name!r} must have {wanted} slots of int64, got {slots.numel()} of {slots.dtype}"
                    + ("" if wanted else "; the span has nothing for it, leave it out")
                )
            queued = [load.device.side[name] for load in self._loads if name in load.device.side]
            taken = torch.cat([*queued, slots])
            if bool((taken.sort().values.diff() == 0).any()):
                raise InvalidTransferError(f"into: {name!r} has a slot that another load of this step goes to: {slots.tolist()}")

    def _start(self, operation: CacheOperation, copy: Callable[[dict[str, Indices]], DoneT]) -> DoneT:
        """Enqueue the copies of all pools; where that is refused, the operation is over."""
        pages: dict[str, Indices] = {}
        for name in self._group.entries:
            device, host = self._group.slots(operation.device, name), self._group.slots(operation.host, name)
            if device is not None and host is not None and device.numel():
                pages[name] = Indices(device, host)
        try:
            copies = copy(pages)
        except BaseException:
            operation.started(Over())
            raise
        operation.started(copies)
        return copies


def _by_priority(operations: Sequence[CacheOperation]) -> list[CacheOperation]:
    return sorted(operations, key=lambda operation: operation.priority)
