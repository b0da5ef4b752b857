"""The jobs of a prefetch: what can be restored, its pages, and the states of another endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.storage_calls import BATCH_PAGES, page_transfer
from hicache_storage.hybrid.workers import Job
from hicache_storage.spec import leading_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from hicache_storage.hybrid.groups import HostPoolGroup, PoolEntry
    from hicache_storage.hybrid.storage_calls import StorageCalls
    from hicache_storage.spec import PoolName, PoolTransfer


@dataclass(frozen=True, slots=True)
class Chain:
    """The pages that a prefetch asks for."""

    keys: tuple[str, ...]
    prefix_keys: tuple[str, ...]
    """Keys of the pages before them, from the start of the sequence."""
    request_id: str


class QueryJob(Job):
    """Asks which endpoints can be restored."""

    def __init__(self, calls: StorageCalls, chain: Chain) -> None:
        super().__init__()
        self._calls, self._chain = calls, chain
        self._restorable: list[int] = []

    def perform(self) -> None:
        with self.lock:
            if not self.begin_call():
                return
        found = self._calls.restorable(self._chain.keys, self._chain.prefix_keys, self._chain.request_id)
        with self.lock:
            self._restorable = found

    def legal(self) -> list[int]:
        """0 or 1 for each endpoint from 0 to the length of the chain; nothing can always be restored."""
        with self.lock:
            found = set[int]() if self.abandoned else set(self._restorable)
        return [1] + [int(end in found) for end in range(1, len(self._chain.keys) + 1)]


@dataclass(frozen=True, slots=True)
class Stage:
    """Pages that one call reads."""

    start: int
    end: int
    saves: bool
    """Whether the prefix up to `end` can be gone on from: the pages of its window are read as well."""


def stages(endpoint: int, restorable: Sequence[int], *, saves: bool) -> list[Stage]:
    """The calls that read a prefix.

    Args:
        endpoint: its length in pages, one of `restorable`.
        restorable: endpoints that all ranks agreed on.
        saves: end calls at endpoints on the way, where that does not make a call less than half as large.
    """
    plan, start = list[Stage](), 0
    while start < endpoint:
        limit = min(start + BATCH_PAGES, endpoint)
        found = [end for end in restorable if start + BATCH_PAGES // 2 <= end <= limit] if saves else []
        end = limit if limit == endpoint or not found else found[-1]
        plan.append(Stage(start, end, end == endpoint or end in found))
        start = end
    return plan


class Landing:
    """The host pages that a prefetch reads into, and what has arrived.

    Pools of which a prefix needs only the last pages have one set of slots for each of at most two endpoints: while one is
    read, the one before stays whole.

    Args:
        group: the pools.
        slots: of pools that a prefix needs all of, by name: the anchor's and those of side pools.
        sets: of the other pools.
    """

    def __init__(
        self, group: HostPoolGroup, slots: Mapping[PoolName, torch.Tensor], sets: Sequence[Mapping[PoolName, torch.Tensor]]
    ) -> None:
        self.group, self.slots, self.sets = group, slots, sets
        # Guarded by the lock of the job that writes; read when the job is over, or under that lock.
        self.pages = 0
        """Leading pages that are there, of all pools with slots in `slots`."""
        self.held: dict[int, int] = {}
        """Endpoints whose windows are there: the number of the set."""

    def transfers(self, chain: Chain, start: int, end: int) -> list[PoolTransfer]:
        """Pages [start, end) of all pools but those with windows."""
        found: list[tuple[PoolEntry, int, torch.Tensor]] = []
        for entry in self.group.entries.values():
            owner = self.group.owner(entry)
            if owner.name in self.slots:
                found.append((entry, owner.host_pool.page_size, self.slots[owner.name]))
        return [page_transfer(entry, chain.keys[start:end], slots[start * size : end * size]) for entry, size, slots in found]

    def window_transfers(self, chain: Chain, endpoint: int, number: int) -> list[PoolTransfer]:
        """The windows that end at an endpoint, into one of the sets."""
        transfers: list[PoolTransfer] = []
        for entry in self.group.entries.values():
            owner = self.group.owner(entry)
            if owner.is_trailing:
                ends = owner.window(endpoint)
                slots = self.sets[number][owner.name][: len(ends) * owner.host_pool.page_size]
                transfers.append(page_transfer(entry, [chain.keys[end - 1] for end in ends], slots))
        return transfers

    def deliverable(self, endpoint: int) -> bool:
        """Whether the prefix of that length is all there."""
        return endpoint <= self.pages and (endpoint in self.held or not self.sets)

    def empty_set(self) -> int | None:
        """A set to read into: one that holds nothing, or what the shortest prefix needs. None where no pool has windows."""
        used = {number: end for end, number in self.held.items()}
        number = min(range(len(self.sets)), key=lambda number: used.get(number, 0), default=None)
        self.held = {end: other for end, other in self.held.items() if other != number}
        return number


class ReadJob(Job):
    """Reads a prefix, stage by stage, until something is missing."""

    def __init__(self, calls: StorageCalls, chain: Chain, landing: Landing, plan: Sequence[Stage]) -> None:
        super().__init__()
        self._calls, self._chain, self._landing, self._plan = calls, chain, landing, plan

    def perform(self) -> None:
        for stage in self._plan:
            with self.lock:
                if not self.begin_call():
                    return
                number = self._landing.empty_set() if stage.saves else None
            if not self._read(stage, number):
                return

    def _read(self, stage: Stage, number: int | None) -> bool:
        """Read a stage, with its windows into a set; whether all its pages are there."""
        landing, chain = self._landing, self._chain
        pages = landing.transfers(chain, stage.start, stage.end)
        windows = landing.window_transfers(chain, stage.end, number) if number is not None else []
        answer = self._calls.read([*pages, *windows], (*chain.prefix_keys, *chain.keys[: stage.start]), chain.request_id)
        arrived = min(leading_pages(answer[transfer.name]) for transfer in pages)
        with self.lock:
            if self.abandoned:
                return False
            landing.pages = stage.start + arrived
            if number is not None and all(all(answer[transfer.name]) for transfer in windows):
                landing.held[stage.end] = number
        return arrived == stage.end - stage.start


class WindowJob(Job):
    """Reads the windows of one endpoint, after a prefix that was to be longer has turned out to be cut."""

    def __init__(self, calls: StorageCalls, chain: Chain, landing: Landing, endpoint: int) -> None:
        super().__init__()
        self._calls, self._chain, self._landing, self._endpoint = calls, chain, landing, endpoint

    def perform(self) -> None:
        with self.lock:
            number = self._landing.empty_set() if self.begin_call() else None
        if number is None:
            return
        windows = self._landing.window_transfers(self._chain, self._endpoint, number)
        before = (*self._chain.prefix_keys, *self._chain.keys[: self._endpoint - 1])
        answer = self._calls.read(windows, before, self._chain.request_id)
        with self.lock:
            if not self.abandoned and all(all(answer[transfer.name]) for transfer in windows):
                self._landing.held[self._endpoint] = number
