"""Jobs of a prefetch in the worker threads, and the host pages that they read into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.storage_io.calls import BATCH_PAGES, page_transfer
from hicache_storage.hybrid.storage_io.workers import Job
from hicache_storage.spec import AskedScope, leading_pages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.hybrid.pools import HostPoolGroup
    from hicache_storage.hybrid.storage_io.calls import StorageCalls
    from hicache_storage.spec import PoolName, PoolTransfer


@dataclass(frozen=True, slots=True)
class PrefetchRequest:
    """Pages that a prefetch asks for."""

    keys: tuple[str, ...]
    prefix_keys: tuple[str, ...]
    """Keys of the pages before them, from the start of the sequence."""
    request_id: str


class PrefetchBuffers:
    """Host slots of a prefetch in flight, and the pages that have arrived there.

    Pools of which a prefix needs only the last pages have one set of slots for each of at most two
    endpoints: while one set is written, the window in the other one stays complete.

    Args:
        group: the pools.
        slots: of pools that a prefix needs completely, by name: the anchor's and those of side
            pools.
        window_sets: of the other pools.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        slots: Mapping[PoolName, torch.Tensor],
        window_sets: Sequence[Mapping[PoolName, torch.Tensor]],
    ) -> None:
        self.group = group
        self.slots = slots
        self.window_sets = window_sets
        # Guarded by the lock of the job that writes; read under that lock, or after the job ended.
        self.pages = 0
        """Leading pages that have arrived, in all pools of `slots`."""
        self.windows: dict[int, int] = {}
        """Endpoints whose windows have arrived, with the number of the window set."""

    def transfers(
        self, request: PrefetchRequest, step: ReadStep, number: int | None
    ) -> list[PoolTransfer]:
        """Transfers of the pages of a step, and of its windows into one of the window sets."""
        transfers: list[PoolTransfer] = []
        for entry in self.group.entries.values():
            owner = self.group.owner(entry)
            size = owner.host_pool.page_size
            if not owner.is_trailing:
                keys = request.keys[step.start : step.end]
                slots = self.slots[owner.name][step.start * size : step.end * size]
            elif number is not None:
                # The state after p pages has the key of the last of them.
                keys = tuple(request.keys[end - 1] for end in owner.window(step.end))
                # Near the start of a sequence a window has fewer pages than its slots.
                slots = self.window_sets[number][owner.name][: len(keys) * size]
            else:
                continue
            if keys:
                transfers.append(page_transfer(entry, keys, slots))
        return transfers

    def is_complete(self, endpoint: int) -> bool:
        """Return whether the prefix of that length has arrived in all pools."""
        return endpoint <= self.pages and (endpoint in self.windows or not self.window_sets)

    def take_window_set(self) -> int | None:
        """Take a window set to read into.

        Returns its number, None where no pool has windows.

        Takes an empty set, or the one whose endpoint is the shortest.
        """
        used = {number: end for end, number in self.windows.items()}
        numbers = range(len(self.window_sets))
        taken = min(numbers, key=lambda number: used.get(number, 0), default=None)
        # Incomplete from now on: the read that follows overwrites it.
        self.windows = {end: number for end, number in self.windows.items() if number != taken}
        return taken

    def all_slots(self) -> dict[PoolName, torch.Tensor]:
        """Return all slots by pool, including those of the window sets."""
        slots = {name: [rows] for name, rows in self.slots.items()}
        for window_set in self.window_sets:
            for name, rows in window_set.items():
                slots.setdefault(name, []).append(rows)
        return {name: torch.cat(parts) for name, parts in slots.items()}


class QueryJob(Job):
    """Looks up the endpoints that the storage can restore."""

    def __init__(self, calls: StorageCalls, request: PrefetchRequest) -> None:
        super().__init__()
        self._calls = calls
        self._request = request
        self.restorable: list[int] = []
        """Endpoints that the storage can restore; guarded by `lock`."""
        # Jobs that read have none: their requests wait as long as `PrefetchPolicy` says.
        self._asked = AskedScope()

    def perform(self) -> None:
        with self.lock:
            if not self.begin_call():
                return
        request = self._request
        with self._asked:
            found = self._calls.restorable(request.keys, request.prefix_keys, request.request_id)
        with self.lock:
            # The ranks have gone on without the answer of an abandoned call.
            if not self.abandoned:
                self.restorable = found


@dataclass(frozen=True, slots=True)
class ReadStep:
    """Pages that one call reads; with `start` equal to `end` only those of windows."""

    start: int
    end: int
    with_windows: bool
    """Whether a request can continue from `end`: the pages of its window are read as well."""


def plan_reads(endpoint: int, restorable: Sequence[int], *, with_windows: bool) -> list[ReadStep]:
    """Divide the read of a prefix into calls.

    Args:
        endpoint: its length in pages, one of `restorable`.
        restorable: endpoints that all ranks agreed on.
        with_windows: end calls at restorable endpoints before the last, unless that makes a call
            less than half as large.
    """
    plan = list[ReadStep]()
    start = 0
    while start < endpoint:
        limit = min(start + BATCH_PAGES, endpoint)
        shortest = start + BATCH_PAGES // 2
        found = [end for end in restorable if shortest <= end <= limit] if with_windows else []
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
                # Under the lock: the scheduler's thread may look at the window sets at any time.
                number = self._buffers.take_window_set() if step.with_windows else None
            if not self._read(step, number):
                return

    def _read(self, step: ReadStep, number: int | None) -> bool:
        """Read a step, its windows into a window set.

        Returns whether all its pages arrived.
        """
        buffers, request = self._buffers, self._request
        # One call for pages and windows, so that the store gets them as one batch (rule BU-1).
        transfers = buffers.transfers(request, step, number)
        before = (*request.prefix_keys, *request.keys[: min(step.start, step.end - 1)])
        answer = self._calls.read(transfers, before, request.request_id)
        entries = buffers.group.entries
        arrived = min(
            (
                leading_pages(pages)
                for name, pages in answer.items()
                if not entries[name].is_trailing
            ),
            default=0,
        )
        with self.lock:
            # The scheduler has given an abandoned call up: what it decided on must not change.
            if self.abandoned:
                return False
            if step.start < step.end:
                buffers.pages = step.start + arrived
            if number is not None and all(
                all(pages) for name, pages in answer.items() if entries[name].is_trailing
            ):
                buffers.windows[step.end] = number
        return arrived == step.end - step.start
