"""A controller in memory whose copies take effect as late as the contract allows, and two tiers of
integers to copy.

A copy happens when something waits for it: an acknowledgement, a fence, a counter. Until then a
cache that lets go of slots too early has their contents replaced under the copy, and a wrong value
shows on the next hit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch

from hicache_storage.hybrid import BackupResult, PrefetchOutcome, PrefetchResult
from hicache_storage.hybrid.policies import max_fitting_endpoint
from hicache_storage.hybrid.pools import HybridIndices
from hicache_storage.pools import SlotAllocator
from hicache_storage.spec import PoolName, PoolPresence, common_hit
from hicache_storage.spec.policies import PoolHitPolicy
from hicache_storage.transfer import HostSlots

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

KV, MAMBA = PoolName.KV, PoolName.MAMBA


class Evictors:
    """Who makes room in the pools of a tier."""

    def __init__(self) -> None:
        self.by_pool: dict[PoolName, Callable[[int], object]] = {}

    def on_shortage(self, name: PoolName, evict: Callable[[int], object]) -> None:
        self.by_pool[name] = evict


class Group(NamedTuple):
    host: Evictors
    device: Evictors


class Gate:
    """An event that comes when it is told to."""

    def __init__(self) -> None:
        self.passed = False

    def query(self) -> bool:
        return self.passed


@dataclass(eq=False)
class Copy:
    """Slots of one pool to slots of another, for both pools."""

    sources: dict[PoolName, torch.Tensor]
    targets: dict[PoolName, torch.Tensor]
    read: dict[PoolName, torch.Tensor]
    write: dict[PoolName, torch.Tensor]
    ticket: int
    gate: Gate = field(default_factory=Gate)
    consumer: int = 0
    """Of a load, the counter of the step that began it."""

    def run(self) -> None:
        if not self.gate.passed:
            for name, target in self.targets.items():
                self.write[name][target] = self.read[name][self.sources[name]]
            self.gate.passed = True

    def touches(
        self, slots: dict[PoolName, torch.Tensor], side: dict[PoolName, torch.Tensor]
    ) -> bool:
        mine = self.sources if self.read is side else self.targets
        return any(
            bool(torch.isin(mine[name], slots[name]).any()) for name in slots if name in mine
        )


def by_pool(indices: HybridIndices) -> dict[PoolName, torch.Tensor]:
    return {KV: indices.anchor, **indices.side}


@dataclass(eq=False)
class Fetch:
    """A prefetch; it reads when it has been led on often enough."""

    keys: list[str]
    steps: int
    result: PrefetchResult | None = None

    @property
    def ready(self) -> bool:
        return self.result is not None

    @property
    def done(self) -> bool:
        return self.ready


class StandInController:
    """What the cache needs of a controller; `storage` is a dict by pool and page hash, None when
    detached."""

    bigram = False

    def __init__(
        self,
        sizes: dict[str, int],
        page_size: int,
        *,
        states: bool,
        seed: int = 0,
        threshold: int = 0,
    ) -> None:
        self.page_size, self.states, self.threshold, self.random = (
            page_size,
            states,
            threshold,
            Random(seed),
        )
        self.kv_slots = SlotAllocator(sizes["device_kv"], page_size)
        self.state_slots = SlotAllocator(sizes["device_states"], 1) if states else None
        self.host = {KV: SlotAllocator(sizes["host_kv"], page_size)}
        if states:
            self.host[MAMBA] = SlotAllocator(sizes["host_states"], 1)
        self.host_slots = {name: HostSlots(pool) for name, pool in self.host.items()}
        self.device_memory = {KV: torch.zeros(sizes["device_kv"], dtype=torch.int64)}
        self.host_memory = {KV: torch.zeros(sizes["host_kv"], dtype=torch.int64)}
        if states:
            self.device_memory[MAMBA] = torch.zeros(sizes["device_states"], dtype=torch.int64)
            self.host_memory[MAMBA] = torch.zeros(sizes["host_states"], dtype=torch.int64)
        self.storage: dict[tuple[str, str], int | tuple[int, ...]] | None = {}
        self.refuse_backups = False
        self.group = Group(Evictors(), Evictors())
        self.queued: list[Copy] = []
        self.writes: list[Copy] = []
        self.queued_loads: list[Copy] = []
        self.loads: list[Copy] = []
        self.backups: list[tuple[int, HybridIndices, list[str], list[str], Gate]] = []
        self.fetches: list[Fetch] = []
        self.tickets = 0
        self.consumers = 0
        self.loses = False
        """Whether the storage has lost pages, so that chains there have holes."""

    @property
    def attached(self) -> bool:
        return self.storage is not None

    # -- copies

    def write(self, transfers: HybridIndices, node_id: int) -> HybridIndices | None:
        needs = {name: slots.numel() for name, slots in by_pool(transfers).items()}
        taken = self._alloc(self.host_slots, self.group.host.by_pool, needs)
        if taken is None:
            return None
        copy = Copy(by_pool(transfers), taken, self.device_memory, self.host_memory, node_id)
        self._hold(taken, copy.gate)
        self.queued.append(copy)
        return self._span(taken, transfers)

    def start_writing(self) -> None:
        self.writes += self.queued
        self.queued = []

    def completed_writes(self) -> list[int]:
        return self._completed(self.writes)

    def load(
        self, host: HybridIndices, node_ids: Sequence[int], *, into=None
    ) -> HybridIndices | None:
        pools = {KV: self.kv_slots} | ({MAMBA: self.state_slots} if self.state_slots else {})
        needs = {name: slots.numel() for name, slots in by_pool(host).items() if name not in into}
        taken = self._alloc(pools, self.group.device.by_pool, needs)
        if taken is None:
            return None
        taken |= into
        (ticket,) = node_ids
        copy = Copy(by_pool(host), taken, self.host_memory, self.device_memory, ticket)
        self._hold(by_pool(host), copy.gate)
        self.queued_loads.append(copy)
        return self._span(taken, host)

    def start_loading(self) -> int:
        if not self.queued_loads:
            return max((load.consumer for load in self.loads), default=-1)
        self.consumers += 1
        for load in self.queued_loads:
            # A load is behind the copies that use what it reads and writes.
            self._finish(load.targets, self.device_memory)
            self._finish(load.sources, self.host_memory)
            load.consumer = self.consumers
        self.loads += self.queued_loads
        self.queued_loads = []
        return self.consumers

    def wait_for_loads(self, consumer: int) -> None:
        """What a model does before it reads what was loaded."""
        assert not self.queued_loads
        for load in self.loads:
            if load.consumer <= consumer:
                load.run()

    def completed_loads(self) -> list[int]:
        return self._completed(self.loads)

    def before_overwrite(self, device: HybridIndices) -> None:
        self._finish(by_pool(device), self.device_memory)

    def free_host(self, indices: HybridIndices) -> None:
        for name, slots in by_pool(indices).items():
            if slots.numel():
                self.host_slots[name].free(slots)

    # -- storage

    def prefetch(
        self,
        request_id: str,
        tokens: Sequence[int],
        last_hash: str | None,
        prefix_hashes: Sequence[str],
    ) -> Fetch | None:
        from hicache_storage.hybrid.hashing import page_hashes

        assert list(prefix_hashes)[-1:] == [last_hash] or not prefix_hashes
        if len(tokens) < self.threshold:
            return None
        self.fetches.append(
            Fetch(page_hashes(tokens, self.page_size, prior=last_hash), self.random.randint(1, 3))
        )
        return self.fetches[-1]

    def advance_prefetches(self) -> None:
        for fetch in self.fetches:
            fetch.steps -= 1
            if fetch.steps <= 0 and fetch.result is None:
                fetch.result = self._read_storage(fetch.keys)

    def terminate_prefetch(self, operation: Fetch) -> PrefetchResult:
        self.fetches.remove(operation)
        return operation.result or PrefetchResult(
            0, (), HybridIndices.empty(), PrefetchOutcome.STOPPED
        )

    def restorable(self, keys: Sequence[str]) -> Sequence[int]:
        """Where a prefix of these pages can end, in pages, by what the storage has."""
        stored = self.storage or {}
        presence = [
            PoolPresence(
                MAMBA, [(MAMBA, key) in stored for key in keys], PoolHitPolicy.TRAILING_PAGES
            )
        ]
        return common_hit(
            [(KV, key) in stored for key in keys], presence if self.states else []
        ).restorable_prefix_pages

    def lose(self, share: float, *, while_read: bool) -> None:
        """Let the storage lose some of what it has."""
        self.loses = True
        for key in sorted(self.storage or {}):
            if self.random.random() < share:
                del self.storage[key]

    def _read_storage(self, keys: list[str]) -> PrefetchResult:
        stored = self.storage or {}
        pages, taken = self._room_for(self.restorable(keys))
        if not pages:
            return PrefetchResult(0, (), HybridIndices.empty(), PrefetchOutcome.HOST_CAPACITY)
        rows = [value for key in keys[:pages] for value in stored[KV, key]]
        self.host_memory[KV][taken[KV]] = torch.tensor(rows)
        if self.states:
            self.host_memory[MAMBA][taken[MAMBA]] = stored[MAMBA, keys[pages - 1]]
        side = {MAMBA: taken[MAMBA]} if self.states else {}
        host = HybridIndices(taken[KV], side, dict.fromkeys(side, (pages,)))
        return PrefetchResult(
            pages * self.page_size, tuple(keys[:pages]), host, PrefetchOutcome.COMPLETE
        )

    def write_storage(
        self, host: HybridIndices, hashes: Sequence[str], prefix_hashes: Sequence[str]
    ) -> int:
        assert self.storage is not None
        assert host.anchor.numel() == len(hashes) * self.page_size
        assert self.loses or all(
            (KV, key) in self.storage or self._is_under_way(key) for key in prefix_hashes
        ), "a hole"
        self.tickets += 1
        gate = Gate()
        self._hold(by_pool(host), gate)
        self.backups.append((self.tickets, host, list(hashes), list(prefix_hashes), gate))
        return self.tickets

    def completed_backups(self) -> list[BackupResult]:
        count = self.random.randint(0, len(self.backups))
        done, self.backups = self.backups[:count], self.backups[count:]
        return [self._store(*backup) for backup in done]

    def detach(self) -> None:
        """The storage goes; what was to be stored does not go to the next one."""
        self.kept, self.storage = self.storage, None
        self.backups = [(ticket, host, [], [], gate) for ticket, host, _, _, gate in self.backups]

    def attach(self, *, empty: bool = False) -> None:
        """The storage comes back, or another one does."""
        self.storage = {} if empty else self.kept

    def arriving(self) -> set[int]:
        """Device slots of KV whose load has not run."""
        loads = [load for load in (*self.queued_loads, *self.loads) if not load.gate.passed]
        return {slot for load in loads for slot in load.targets[KV].tolist()}

    def prefetched_slots(self):
        """Host slots of prefetches that have not been handed over."""
        for fetch in self.fetches:
            if fetch.result is not None:
                yield from by_pool(fetch.result.host).items()

    def close(self) -> None:
        """Nothing to end."""

    def _store(
        self, ticket: int, host: HybridIndices, hashes: list[str], before: list[str], gate: Gate
    ) -> BackupResult:
        gate.passed = True
        if self.refuse_backups or self.storage is None or not hashes:
            return BackupResult(ticket, 0, complete=False)
        for key, page in zip(
            hashes, self.host_memory[KV][host.anchor].view(-1, self.page_size).tolist(), strict=True
        ):
            self.storage.setdefault((KV, key), tuple(page))
        for end, slot in zip(host.endpoints.get(MAMBA, ()), host.side.get(MAMBA, ()), strict=True):
            self.storage.setdefault((MAMBA, hashes[end - 1]), int(self.host_memory[MAMBA][slot]))
        lost_from = next(
            (page for page, key in enumerate(before) if (KV, key) not in self.storage), None
        )
        return BackupResult(ticket, len(hashes), complete=True, lost_from=lost_from)

    def _is_under_way(self, key: str) -> bool:
        return self.refuse_backups or any(key in hashes for _, _, hashes, _, _ in self.backups)

    def _room_for(self, restorable: Sequence[int]) -> tuple[int, dict[PoolName, torch.Tensor]]:
        if not restorable:
            return 0, {}

        def needs(pages: int) -> dict[PoolName, int]:
            return {KV: pages * self.page_size} | ({MAMBA: 1} if self.states else {})

        def fits(pages: int) -> bool:
            return all(
                self.host_slots[name].available_size() >= count
                for name, count in needs(pages).items()
            )

        self._make_room(self.host_slots, self.group.host.by_pool, needs(restorable[-1]))
        pages = max_fitting_endpoint(restorable, fits)
        pages = pages if pages * self.page_size >= self.threshold else 0
        taken = self._alloc(self.host_slots, {}, needs(pages)) if pages else {}
        assert taken is not None
        return pages, taken

    # -- slots

    def _alloc(self, pools, evictors, needs) -> dict[PoolName, torch.Tensor] | None:
        self._make_room(pools, evictors, needs)
        if any(pools[name].available_size() < count for name, count in needs.items()):
            return None
        none = torch.empty(0, dtype=torch.int64)
        return {name: pools[name].alloc(count) if count else none for name, count in needs.items()}

    def _make_room(self, pools, evictors, needs) -> None:
        short = {name: count - pools[name].available_size() for name, count in needs.items()}
        for name, count in sorted(short.items()):
            if count > 0 and name in evictors:
                evictors[name](count)

    def _span(self, taken: dict[PoolName, torch.Tensor], like: HybridIndices) -> HybridIndices:
        return HybridIndices(
            taken[KV], {name: slots for name, slots in taken.items() if name != KV}, like.endpoints
        )

    def _hold(self, slots: dict[PoolName, torch.Tensor], gate: Gate) -> None:
        for name, indices in slots.items():
            if indices.numel():
                self.host_slots[name].hold(indices, gate)

    def _finish(
        self, slots: dict[PoolName, torch.Tensor], memory: dict[PoolName, torch.Tensor]
    ) -> None:
        for copy in (*self.writes, *self.loads):
            if copy.touches(slots, memory):
                copy.run()

    def _completed(self, copies: list[Copy]) -> list[int]:
        count = self.random.randint(0, len(copies))
        done = copies[:count]
        del copies[:count]
        for copy in done:
            copy.run()
        return [copy.ticket for copy in done]
