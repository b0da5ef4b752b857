"""Jobs of a prefetch in the worker threads: lookup, pages, windows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.storage_io.calls import BATCH_PAGES
from hicache_storage.hybrid.storage_io.workers import Job
from hicache_storage.spec import AskedScope, leading_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hicache_storage.hybrid.storage_io.calls import StorageCalls
    from hicache_storage.hybrid.storage_io.prefetch_buffers import PrefetchBuffers, PrefetchRequest


class QueryJob(Job):
    """Looks up the endpoints that the storage can restore."""

    def __init__(self, calls: StorageCalls, request: PrefetchRequest) -> None:
        super().__init__()
        self._calls = calls
        self._request = request
        self._restorable: list[int] = []
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
            self._restorable = found

    def restorable_flags(self) -> list[int]:
        """Return 0 or 1 for each endpoint from 0 to the number of pages.

        Endpoint 0 always has 1.
        """
        with self.lock:
            # An abandoned call still publishes its result when it returns, after the ranks have
            # gone on.
            found = set[int]() if self.abandoned else set(self._restorable)
        return [1] + [int(end in found) for end in range(1, len(self._request.keys) + 1)]


@dataclass(frozen=True, slots=True)
class ReadStep:
    """Pages that one call reads."""

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
        pages = buffers.transfers(request, step.start, step.end)
        windows = buffers.window_transfers(request, step.end, number) if number is not None else []
        before = (*request.prefix_keys, *request.keys[: step.start])
        # One call for pages and windows, so that the store gets them as one batch (rule BU-1).
        answer = self._calls.read([*pages, *windows], before, request.request_id)
        arrived = min(leading_pages(answer[transfer.name]) for transfer in pages)
        with self.lock:
            # The scheduler has given an abandoned call up: what it decided on must not change.
            if self.abandoned:
                return False
            buffers.pages = step.start + arrived
            if number is not None and all(all(answer[transfer.name]) for transfer in windows):
                buffers.windows[step.end] = number
        return arrived == step.end - step.start


class WindowJob(Job):
    """Reads the windows of a shorter endpoint, after a prefix was incomplete."""

    def __init__(
        self, calls: StorageCalls, request: PrefetchRequest, buffers: PrefetchBuffers, endpoint: int
    ) -> None:
        super().__init__()
        self._calls = calls
        self._request = request
        self._buffers = buffers
        self._endpoint = endpoint

    def perform(self) -> None:
        with self.lock:
            number = self._buffers.take_window_set() if self.begin_call() else None
        if number is None:
            return
        request = self._request
        windows = self._buffers.window_transfers(request, self._endpoint, number)
        before = (*request.prefix_keys, *request.keys[: self._endpoint - 1])
        answer = self._calls.read(windows, before, request.request_id)
        with self.lock:
            if not self.abandoned and all(all(answer[transfer.name]) for transfer in windows):
                self._buffers.windows[self._endpoint] = number
