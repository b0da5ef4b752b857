"""Jobs of a prefetch in the worker threads, and the host pages that they read into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.pools import HybridIndices
from hicache_storage.hybrid.storage_io.calls import BATCH_PAGES, page_transfer
from hicache_storage.hybrid.storage_io.workers import Job
from hicache_storage.spec import AskedScope, PoolName, leading_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.hybrid.pools import HostPoolGroup
    from hicache_storage.hybrid.storage_io.calls import StorageCalls
    from hicache_storage.spec import PoolTransfer


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """Pages that a prefetch asks for."""

    keys: tuple[str, ...]
    prefix_keys: tuple[str, ...]
    """Keys of the pages before them, from the start of the sequence."""
    request_id: str


class PrefetchBuffers:
    """Host slots of a prefetch in flight, and the pages that have arrived there.

    There are slots for the states at one or two endpoints: while one is written, the other keeps
    its state.

    Args:
        group: the pools.
        kv: slots of the whole prefix.
        states: slots of states; none where the model has no states.
    """

    def __init__(self, group: HostPoolGroup, kv: torch.Tensor, states: torch.Tensor) -> None:
        self.group = group
        self.kv = kv
        self.states = states
        # Guarded by the lock of the job that writes; read under that lock, or after the job ended.
        self.pages = 0
        """Leading pages that have arrived, in KV and the pools in its slots."""
        self.arrived: dict[int, int] = {}
        """Endpoints whose state has arrived, with its number in `states`."""

    def transfers(
        self, request: PrefetchRequest, step: ReadStep, number: int | None
    ) -> list[PoolTransfer]:
        """Transfers of the pages of a step, and of its state into one of the slots."""
        transfers: list[PoolTransfer] = []
        size = self.group.page_size
        for entry in self.group.entries.values():
            if not entry.has_states:
                keys = request.keys[step.start : step.end]
                slots = self.kv[step.start * size : step.end * size]
            elif number is not None:
                # The state after p pages has the key of the last of them.
                keys = request.keys[step.end - 1 : step.end]
                slots = self.states[number : number + 1]
            else:
                continue
            if keys:
                transfers.append(page_transfer(entry, keys, slots))
        return transfers

    def is_complete(self, endpoint: int) -> bool:
        """Return whether the prefix of that length has arrived, with its state."""
        return endpoint <= self.pages and (endpoint in self.arrived or not self.states.numel())

    def take_state(self) -> int | None:
        """Take a slot to read a state into: an empty one, or the state of the shortest endpoint.

        Returns its number, None where the model has no states.
        """
        used = {number: end for end, number in self.arrived.items()}
        numbers = range(self.states.numel())
        taken = min(numbers, key=lambda number: used.get(number, 0), default=None)
        # Incomplete from now on: the read that follows overwrites it.
        self.arrived = {end: number for end, number in self.arrived.items() if number != taken}
        return taken

    def delivered(self, pages: int) -> HybridIndices:
        """Return the slots of a prefix that is complete."""
        kv = self.kv[: pages * self.group.page_size]
        if not pages or not self.states.numel():
            return HybridIndices(kv)
        number = self.arrived[pages]
        return HybridIndices(kv, self.states[number : number + 1], (pages,))

    def all_slots(self) -> dict[PoolName, torch.Tensor]:
        """Return all slots by pool."""
        return {PoolName.KV: self.kv, PoolName.MAMBA: self.states}


class QueryJob(Job):
    """Looks up the endpoints that the storage can restore."""

    def __init__(self, calls: StorageCalls, request: PrefetchRequest) -> None:
        super().__init__()
        self._calls = calls
        self._request = request
        self.restorable: list[int] = []
        """Endpoints that the storage can restore."""
        # Jobs that read have none: their requests wait as long as `PrefetchPolicy` says.
        self._asked = AskedScope()

    def perform(self) -> None:
        with self.lock:
            if not self.begin_call():
                return
        request = self._request
        with self._asked:
            self.restorable = self._calls.restorable(
                request.keys, request.prefix_keys, request.request_id
            )


@dataclass(frozen=True, slots=True)
class ReadStep:
    """Pages that one call reads; with `start` equal to `end` only the state."""

    start: int
    end: int
    with_state: bool
    """Whether a request can continue from `end`: its state is read as well."""


def plan_reads(endpoint: int, restorable: Sequence[int], *, with_states: bool) -> list[ReadStep]:
    """Divide the read of a prefix into calls.

    Args:
        endpoint: its length in pages, one of `restorable`.
        restorable: endpoints that all ranks agreed on.
        with_states: end calls at restorable endpoints before the last, unless that makes a call
            less than half as large.
    """
    plan = list[ReadStep]()
    start = 0
    while start < endpoint:
        limit = min(start + BATCH_PAGES, endpoint)
        shortest = start + BATCH_PAGES // 2
        found = [end for end in restorable if shortest <= end <= limit] if with_states else []
        end = limit if limit == endpoint or not found else found[-1]
        plan.append(ReadStep(start, end, end == endpoint or end in found))
        start = end
    return plan


class ReadJob(Job):
    """Reads a prefix step by step, until a page is missing."""

    def __init__(
        self,
        calls: StorageCalls,
        request: PrefetchRequest,
        buffers: PrefetchBuffers,
        plan: Sequence[ReadStep],
    ) -> None:
        super().__init__()
        self._calls = calls
        self._request = request
        self._buffers = buffers
        self._plan = plan

    def perform(self) -> None:
        for step in self._plan:
            with self.lock:
                if not self.begin_call():
                    return
                # Under the lock: the scheduler's thread may look at the states at any time.
                number = self._buffers.take_state() if step.with_state else None
            if not self._read(step, number):
                return

    def _read(self, step: ReadStep, number: int | None) -> bool:
        """Read a step, its state into a slot; returns whether all its pages arrived."""
        buffers, request = self._buffers, self._request
        # One call for pages and state, so that the store gets them as one batch (rule BU-1).
        transfers = buffers.transfers(request, step, number)
        before = (*request.prefix_keys, *request.keys[: min(step.start, step.end - 1)])
        answer = self._calls.read(transfers, before, request.request_id)
        state = answer.pop(PoolName.MAMBA, [False])
        arrived = min(map(leading_pages, answer.values()), default=0)
        with self.lock:
            if step.start < step.end:
                buffers.pages = step.start + arrived
            if number is not None and all(state):
                buffers.arrived[step.end] = number
        return arrived == step.end - step.start
