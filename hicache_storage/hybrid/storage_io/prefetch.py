"""Prefetches from the storage, in two phases that all ranks agree on.

The ranks agree on the endpoint before memory is taken, and on what has arrived before it is
returned to the caller.
"""

from __future__ import annotations

import logging
import time
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.policies import max_fitting_endpoint
from hicache_storage.hybrid.pools.indices import HybridIndices
from hicache_storage.hybrid.storage_io.prefetch_buffers import PrefetchBuffers, PrefetchRequest
from hicache_storage.hybrid.storage_io.prefetch_jobs import (
    QueryJob,
    ReadJob,
    WindowJob,
    plan_reads,
)
from hicache_storage.hybrid.storage_io.results import PrefetchOutcome, PrefetchResult

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.hybrid.policies import PrefetchRules
    from hicache_storage.hybrid.pools.group import HostPoolGroup
    from hicache_storage.hybrid.pools.tiers import CollectiveAllocator
    from hicache_storage.hybrid.ranks.group import RankGroup
    from hicache_storage.hybrid.stats import StatsCounter
    from hicache_storage.hybrid.storage_io.binding import StorageBinding
    from hicache_storage.hybrid.storage_io.workers import Job
    from hicache_storage.spec import PoolName

logger = logging.getLogger(__name__)

MAX_WINDOW_READS = 3
"""Shorter endpoints that are tried when a prefix turns out to be incomplete on some rank."""


class PrefetchPhase(Enum):
    """Phase of a prefetch, the same on every rank."""

    QUERY = auto()
    READ = auto()
    DONE = auto()


class PrefetchOperation:
    """A prefetch in flight, made by `HybridCacheController.prefetch`.

    Used by the scheduler's thread.
    """

    def __init__(self, owner: Prefetcher, request: PrefetchRequest, tokens: int, job: Job) -> None:
        self.tokens = tokens
        """Tokens asked for."""
        self.request = request
        self.started_at = time.monotonic()
        self.phase = PrefetchPhase.QUERY
        self.outcome = PrefetchOutcome.STOPPED
        self.waits = True
        """Whether the policy, on every rank, lets the request wait on."""
        self.ends: list[int] = []
        """Endpoints that every rank could restore, up to the one that is read."""
        self.tried: set[int] = set()
        """Those of `ends` whose windows were read again."""
        self.delivered = 0
        """Pages that every rank has, once the prefetch is done."""
        self.job: Job | None = job
        self.buffers: PrefetchBuffers | None = None
        self._owner = owner

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def done(self) -> bool:
        """True once nothing more will arrive."""
        return self.phase is PrefetchPhase.DONE

    @property
    def ready(self) -> bool:
        """True if the request may go on, as of the last step of this prefetch."""
        return self.done or not self.waits

    @property
    def wanted(self) -> int:
        """Pages that are read."""
        return self.ends[-1] if self.ends else 0

    def poll(self) -> bool:
        """Advance the prefetch; returns whether the request may go on.

        It may when the prefetch is done, or the policy does not wait for the rest. Then
        `HybridCacheController.terminate_prefetch` returns what has arrived. A collective, unless
        the prefetch is done.

        Raises:
            RankGroupError: a rank is gone.
        """
        return self._owner.poll([self])[0]


class Prefetcher:
    """State machine of all prefetches.

    All methods are called by the scheduler's thread, in the same order on every rank. Workers only
    call the storage; every transition that follows from their results is agreed here.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        allocator: CollectiveAllocator,
        rank_group: RankGroup,
        rules: PrefetchRules,
        stats: StatsCounter,
    ) -> None:
        self._group = group
        self._allocator = allocator
        self._rank_group = rank_group
        self._rules = rules
        self._stats = stats
        self._live: list[PrefetchOperation] = []
        self._binding: StorageBinding | None = None
        self._has_windows = any(entry.is_trailing for entry in group.side.values())

    def attach(self, binding: StorageBinding) -> None:
        """Fetch from this storage from now on."""
        self._binding = binding

    def detach(self) -> None:
        """End all prefetches, and start no more."""
        self.abort()
        self._binding = None

    @property
    def occupied_tokens(self) -> int:
        """Tokens of prefetches whose results were not yet returned to the caller."""
        return sum(operation.tokens for operation in self._live)

    def begin(
        self, request_id: str, keys: Sequence[str], prefix_keys: Sequence[str]
    ) -> PrefetchOperation | None:
        """Look up which prefix of `keys` can be restored; None where the rules decline it."""
        tokens = len(keys) * self._group.page_size
        if self._binding is None or not self._rules.is_worth(tokens, self._group.page_size):
            self._stats.count(prefetches_below_threshold=self._binding is not None)
            return None
        # No collective: prefetches in flight and sizes are the same on every rank, so all decide
        # alike.
        if not self._rules.admits(self.occupied_tokens, self._group.size):
            self._stats.count(prefetches_rate_limited=1)
            return None
        request = PrefetchRequest(tuple(keys), tuple(prefix_keys), request_id)
        job = QueryJob(self._binding.calls, request)
        operation = PrefetchOperation(self, request, tokens, job)
        # Before `submit`: a thread that hangs is given up, so that the job gets one that serves.
        self._binding.expire()
        self._binding.query.submit(job)
        self._live.append(operation)
        self._stats.count(prefetches=1)
        return operation

    def poll(self, operations: Sequence[PrefetchOperation]) -> list[bool]:
        """Advance prefetches; returns for each whether its request may go on.

        One collective for all, and further ones where phases end.
        """
        unfinished = [operation for operation in operations if not operation.done]
        if unfinished:
            self._advance(unfinished)
        return [operation.ready for operation in operations]

    def advance(self) -> None:
        """Advance all prefetches."""
        self.poll(list(self._live))

    def terminate(self, operation: PrefetchOperation) -> PrefetchResult:
        """End a prefetch and return what every rank has.

        A collective while pages are read.
        """
        if operation not in self._live:
            return PrefetchResult(0, (), HybridIndices.empty(), operation.outcome)
        if not operation.done:
            self._stop(operation)
        self._live.remove(operation)
        host = self._delivered(operation)
        # The slots belong to the caller now: neither `abort` nor a second call frees them.
        operation.buffers = None
        tokens = operation.delivered * self._group.page_size
        self._stats.count(tokens_prefetched=tokens)
        hashes = operation.request.keys[: operation.delivered]
        return PrefetchResult(tokens, hashes, host, operation.outcome)

    def abort(self) -> None:
        """End all prefetches; they deliver nothing."""
        for operation in self._live:
            # Without a collective: nothing is delivered, on any rank.
            if operation.job is not None:
                operation.job.cancel()
            self._finish(operation, 0, PrefetchOutcome.STOPPED)
        self._live = []

    # One step ------------------------------------------------------------------------------------

    def _advance(self, operations: Sequence[PrefetchOperation]) -> None:
        if self._binding is not None:
            self._binding.expire()
        # Threads of the ranks finish at different times. A phase ends only when the minimum says
        # that all ranks have finished it, so that the collectives below match on every rank.
        votes = self._rank_group.all_reduce_min(
            [vote for operation in operations for vote in self._votes(operation)]
        )
        ready = list[PrefetchOperation]()
        for operation, finished, waits in zip(operations, votes[::2], votes[1::2], strict=True):
            operation.waits = bool(waits)
            if finished:
                ready.append(operation)
        queried = [operation for operation in ready if operation.phase is PrefetchPhase.QUERY]
        read = [operation for operation in ready if operation.phase is PrefetchPhase.READ]
        if queried:
            self._agree_on_endpoints(queried)
        if read:
            self._agree_on_delivery(read)

    def _votes(self, operation: PrefetchOperation) -> tuple[int, int]:
        """Return two flags of this rank: its job has finished.

        Its policy lets the request wait.
        """
        finished = operation.job is None or operation.job.finished()
        elapsed = time.monotonic() - operation.started_at
        return int(finished), int(not self._rules.stops_waiting(elapsed, operation.tokens))

    def _agree_on_endpoints(self, operations: Sequence[PrefetchOperation]) -> None:
        """Intersect the endpoints of all ranks, and start to read the longest that fits."""
        votes = iter(
            self._rank_group.all_reduce_min(
                [vote for operation in operations for vote in _restorable_flags(operation)]
            )
        )
        for operation in operations:
            flags = [next(votes) for _ in range(len(operation.request.keys) + 1)]
            # An intersection, not the minimum of the longest: {3, 6} and {3, 7} give 3. At 6 the
            # second rank has no state.
            restorable = [end for end, flag in enumerate(flags) if flag and end]
            hit = (restorable[-1] if restorable else 0) * self._group.page_size
            self._stats.count(tokens_hit=hit)
            if not self._rules.is_worth(hit, self._group.page_size):
                self._finish(operation, 0, PrefetchOutcome.BELOW_THRESHOLD)
            else:
                self._start_reading(operation, restorable)

    def _start_reading(self, operation: PrefetchOperation, restorable: list[int]) -> None:
        """Read the longest prefix that fits on every rank and is not below the threshold."""
        group, page_size, hit = self._group, self._group.page_size, restorable[-1]
        fits, available = self._allocator.ensure(group.host, group.needs(hit))
        worth = [end for end in restorable if self._rules.is_worth(end * page_size, page_size)]
        end = hit
        if not fits:
            # Cut to an endpoint, not to the number of free pages: a prefix that ends between two
            # checkpoints has no state and restores nothing.
            end = max_fitting_endpoint(worth, lambda end: _fits(group.needs(end), available))
        complete = end == hit
        operation.outcome = PrefetchOutcome.COMPLETE if complete else PrefetchOutcome.HOST_CAPACITY
        self._stats.count(tokens_without_room=(hit - end) * page_size)
        if not end:
            self._finish(operation, 0, PrefetchOutcome.HOST_CAPACITY)
            return
        operation.ends = [found for found in restorable if found <= end]
        plan = plan_reads(end, operation.ends, with_windows=False)
        set_count = 1
        # A second window set keeps the last complete window while the next one is read, so that a
        # prefetch that is cut has an endpoint to continue from.
        if self._has_windows and len(plan) > 1 and _fits(self._needs(end, 2), available):
            plan = plan_reads(end, operation.ends, with_windows=True)
            set_count = 2
        operation.phase = PrefetchPhase.READ
        # Memory may fail on one rank only. That rank takes part with zeros from here on; it must
        # not leave, as the others wait in the next collective.
        operation.buffers = self._allocate(end, set_count)
        operation.job = None
        if operation.buffers is not None and self._binding is not None:
            calls = self._binding.calls
            self._submit(operation, ReadJob(calls, operation.request, operation.buffers, plan))

    def _needs(self, end: int, set_count: int) -> dict[PoolName, int]:
        needs = self._group.needs(end)
        return {
            name: count * (set_count if self._is_trailing(name) else 1)
            for name, count in needs.items()
        }

    def _allocate(self, end: int, set_count: int) -> PrefetchBuffers | None:
        """Take the memory that every rank has free for a prefix; None if this rank fails."""
        needs = self._needs(end, set_count)
        try:
            taken = self._group.host.alloc(needs)
        except Exception:
            logger.exception("host memory could not be taken")
            return None
        if taken is None:
            return None
        whole = {name: slots for name, slots in taken.items() if not self._is_trailing(name)}
        windows = [
            {
                name: slots.chunk(set_count)[number]
                for name, slots in taken.items()
                if self._is_trailing(name)
            }
            for number in range(set_count if self._has_windows else 0)
        ]
        return PrefetchBuffers(self._group, whole, windows)

    def _submit(self, operation: PrefetchOperation, job: Job) -> None:
        operation.job = job
        if self._binding is not None:
            self._binding.read.submit(job)

    def _is_trailing(self, name: PoolName) -> bool:
        return self._group.entries[name].is_trailing

    # Delivery ------------------------------------------------------------------------------------

    def _agree_on_delivery(self, operations: Sequence[PrefetchOperation]) -> None:
        """Deliver the longest prefix that all ranks have, or read windows to extend it."""
        votes = iter(
            self._rank_group.all_reduce_min(
                [vote for operation in operations for vote in _arrival_flags(operation)]
            )
        )
        for operation in operations:
            pages, *flags = [next(votes) for _ in range(len(operation.ends) + 1)]
            have = _last_flagged(operation.ends, flags)
            # Pages may have arrived up to an endpoint whose windows were not read, as only those of
            # the longest were planned.
            untried = [end for end in operation.ends if end not in operation.tried]
            could = max((end for end in untried if end <= pages), default=0)
            if could > have and len(operation.tried) < MAX_WINDOW_READS:
                self._read_windows(operation, could)
            else:
                self._finish(operation, have, _outcome(operation, have))

    def _read_windows(self, operation: PrefetchOperation, end: int) -> None:
        """Read the windows of another endpoint, if this rank does not have them."""
        # Before any return: the number of collectives depends on `tried`, so it is the same on
        # ranks that have nothing to read.
        operation.tried.add(end)
        buffers, binding, job = operation.buffers, self._binding, operation.job
        # An abandoned call may still write into a window set.
        usable = job is not None and not job.abandoned
        if buffers is None or binding is None or not usable or buffers.is_complete(end):
            return
        self._submit(operation, WindowJob(binding.calls, operation.request, buffers, end))

    def _stop(self, operation: PrefetchOperation) -> None:
        if operation.job is not None:
            operation.job.cancel()
        have = 0
        if operation.phase is PrefetchPhase.READ:
            flags = self._rank_group.all_reduce_min(_arrival_flags(operation))[1:]
            have = _last_flagged(operation.ends, flags)
        complete = operation.phase is PrefetchPhase.READ and have == operation.wanted
        self._finish(operation, have, operation.outcome if complete else PrefetchOutcome.STOPPED)

    def _finish(self, operation: PrefetchOperation, pages: int, outcome: PrefetchOutcome) -> None:
        """Keep so many pages and free all others.

        Pages that a running call may still write to stay reserved until it returns.
        """
        job = operation.job
        operation.phase = PrefetchPhase.DONE
        operation.delivered = pages
        operation.outcome = outcome
        operation.job = None
        if operation.buffers is None:
            return
        kept = self._group.owned(self._delivered(operation))
        # Pages that are kept need no reservation: they have arrived, and no call writes to them
        # again.
        surplus = _without(operation.buffers.all_slots(), kept)
        if job is not None and not job.query():
            # Before `free`, which would make them available at once.
            self._group.hold(surplus, job)
        self._group.host.free(surplus)

    def _delivered(self, operation: PrefetchOperation) -> HybridIndices:
        """Return the slots of the delivered pages."""
        buffers, pages = operation.buffers, operation.delivered
        if buffers is None or not pages:
            return HybridIndices.empty()
        owned: dict[PoolName, torch.Tensor] = {}
        ends: dict[PoolName, tuple[int, ...]] = {}
        source = dict(buffers.slots)
        if buffers.window_sets:
            source |= buffers.window_sets[buffers.windows[pages]]
        for name, slots in source.items():
            entry = self._group.entries[name]
            ends[name] = entry.window(pages)
            owned[name] = slots[: len(ends[name]) * entry.host_pool.page_size]
        del ends[self._group.anchor.name]
        return self._group.span(owned, ends)


def _restorable_flags(operation: PrefetchOperation) -> list[int]:
    if isinstance(operation.job, QueryJob):
        return operation.job.restorable_flags()
    return [1] + [0] * len(operation.request.keys)


def _arrival_flags(operation: PrefetchOperation) -> list[int]:
    """Return the leading pages that have arrived, and 0 or 1 for each endpoint."""
    buffers, job = operation.buffers, operation.job
    if buffers is None:
        return [0] * (1 + len(operation.ends))
    if job is None:
        return [buffers.pages, *(int(buffers.is_complete(end)) for end in operation.ends)]
    # The job publishes pages and windows under its lock; both must be of one moment.
    with job.lock:
        return [buffers.pages, *(int(buffers.is_complete(end)) for end in operation.ends)]


def _last_flagged(ends: Sequence[int], flags: Sequence[int]) -> int:
    """Return the largest endpoint whose flag is set, 0 if there is none."""
    return max((end for end, flag in zip(ends, flags, strict=True) if flag), default=0)


def _outcome(operation: PrefetchOperation, pages: int) -> PrefetchOutcome:
    return operation.outcome if pages == operation.wanted else PrefetchOutcome.STORAGE_TRANSFER


def _fits(needs: Mapping[PoolName, int], available: Mapping[PoolName, int]) -> bool:
    return all(count <= available[name] for name, count in needs.items())


def _without(
    slots: Mapping[PoolName, torch.Tensor], kept: Mapping[PoolName, torch.Tensor]
) -> dict[PoolName, torch.Tensor]:
    """Return the slots that are not in `kept`."""
    return {
        name: rows[~torch.isin(rows, kept[name])] if name in kept else rows
        for name, rows in slots.items()
    }
