"""Prefetches from the storage, in two phases that all ranks agree on.

The ranks agree on the endpoint before memory is taken, and on what has arrived before it is
returned to the caller.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.pools import NO_SLOTS, HybridIndices
from hicache_storage.hybrid.ranks import reduce_each
from hicache_storage.hybrid.storage_io.prefetch_jobs import (
    PrefetchBuffers,
    PrefetchRequest,
    QueryJob,
    ReadJob,
    ReadStep,
    plan_reads,
)
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.hybrid.policies import PrefetchRules
    from hicache_storage.hybrid.pools import HostPoolGroup
    from hicache_storage.hybrid.ranks import RankGroup
    from hicache_storage.hybrid.storage_io.calls import StatsCounter
    from hicache_storage.hybrid.storage_io.workers import Job, StorageLink

logger = logging.getLogger(__name__)

MAX_STATE_READS = 3
"""Shorter endpoints that are tried when a prefix turns out to be incomplete on some rank."""


class PrefetchPhase(Enum):
    """Phase of a prefetch, the same on every rank."""

    QUERY = auto()
    READ = auto()
    DONE = auto()


class PrefetchOperation:
    """A prefetch in flight, made by `Prefetcher.begin`.

    Used by the scheduler's thread.
    """

    def __init__(self, request: PrefetchRequest, tokens: int, job: Job) -> None:
        self.tokens = tokens
        """Tokens asked for."""
        self.request = request
        self.started_at = time.monotonic()
        self.phase = PrefetchPhase.QUERY
        self.waits = True
        """Whether the policy, on every rank, lets the request wait on."""
        self.ends: list[int] = []
        """Endpoints that every rank could restore, up to the one that is read."""
        self.tried: set[int] = set()
        """Those of `ends` whose states were read again."""
        self.delivered = 0
        """Pages that every rank has, once the prefetch is done."""
        self.job: Job | None = job
        self.buffers: PrefetchBuffers | None = None

    @property
    def done(self) -> bool:
        """True once nothing more will arrive."""
        return self.phase is PrefetchPhase.DONE

    @property
    def ready(self) -> bool:
        """True if the request may go on, as of the last `advance`.

        It may when the prefetch is done, or the policy does not wait for the rest. Then
        `Prefetcher.terminate` returns what has arrived.
        """
        return self.done or not self.waits


class Prefetcher:
    """State machine of all prefetches.

    All methods are called by the scheduler's thread, in the same order on every rank. Workers only
    call the storage; every transition that follows from their results is agreed here.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        rank_group: RankGroup,
        rules: PrefetchRules,
        stats: StatsCounter,
        link: StorageLink,
    ) -> None:
        self._group = group
        self._rank_group = rank_group
        self._rules = rules
        self._stats = stats
        self._link = link
        self._live: list[PrefetchOperation] = []

    def begin(
        self,
        request_id: str,
        hashes: Sequence[str],
        prefix_hashes: Sequence[str] = (),
    ) -> PrefetchOperation | None:
        """Start to fetch the pages of a request that the storage has.

        Memory is taken once every rank has agreed on the hit.

        Args:
            request_id: for logs.
            hashes: keys of the pages after the prefix that is on the device or the host.
            prefix_hashes: keys of all pages before them.

        Returns:
            None if there is no storage, the span is too short, or too many tokens are in flight.
        """
        page_size, binding = self._group.page_size, self._link.binding
        length = len(hashes) * page_size
        if binding is None or not self._rules.is_worth(length, page_size):
            self._stats.count(prefetches_below_threshold=binding is not None)
            return None
        # No collective: prefetches in flight and sizes are the same on every rank, so all decide
        # alike.
        occupied = sum(operation.tokens for operation in self._live)
        if not self._rules.admits(occupied, self._group.size):
            self._stats.count(prefetches_rate_limited=1)
            return None
        request = PrefetchRequest(tuple(hashes), tuple(prefix_hashes), request_id)
        job = QueryJob(binding.calls, request)
        operation = PrefetchOperation(request, length, job)
        # Before `submit`: a thread that hangs is given up, so that the job gets one that serves.
        self._link.expire()
        binding.query.submit(job)
        self._live.append(operation)
        self._stats.count(prefetches=1)
        return operation

    def terminate(self, operation: PrefetchOperation) -> HybridIndices:
        """End a prefetch; returns the longest prefix that every rank has in all pools.

        The caller owns its host slots: KV from the first token asked for on, and the state at its
        end.

        A collective while pages are read. Does not wait for running calls: pages that they may
        still write to stay reserved until they return. A second call returns an empty prefix.
        """
        if operation not in self._live:
            return HybridIndices()
        if not operation.done:
            self._stop(operation)
        self._live.remove(operation)
        # The slots belong to the caller now: neither `abort` nor a second call frees them.
        buffers, operation.buffers = operation.buffers, None
        host = buffers.delivered(operation.delivered) if buffers else HybridIndices()
        self._stats.count(tokens_prefetched=host.tokens)
        return host

    def abort(self) -> None:
        """End all prefetches; they deliver nothing."""
        for operation in self._live:
            # Without a collective: nothing is delivered, on any rank.
            if operation.job is not None:
                operation.job.cancel()
            self._finish(operation, 0)
        self._live = []

    # One step ------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Advance all prefetches.

        One collective for all that are not done, and further ones where phases end.

        Raises:
            RankGroupError: a rank is gone.
        """
        unfinished = [operation for operation in self._live if not operation.done]
        if not unfinished:
            return
        self._link.expire()
        # Threads of the ranks finish at different times. A phase ends only when the minimum says
        # that all ranks have finished it, so that the collectives below match on every rank.
        votes = reduce_each(self._rank_group, map(self._votes, unfinished))
        ready = list[PrefetchOperation]()
        for operation, (finished, waits) in zip(unfinished, votes, strict=True):
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
        agreed = reduce_each(self._rank_group, map(_restorable_flags, operations))
        for operation, flags in zip(operations, agreed, strict=True):
            # An intersection, not the minimum of the longest: {3, 6} and {3, 7} give 3. At 6 the
            # second rank has no state.
            restorable = [end for end, flag in enumerate(flags) if flag and end]
            hit = (restorable[-1] if restorable else 0) * self._group.page_size
            self._stats.count(tokens_hit=hit)
            if not self._rules.is_worth(hit, self._group.page_size):
                self._finish(operation, 0)
            else:
                self._start_reading(operation, restorable)

    def _start_reading(self, operation: PrefetchOperation, restorable: list[int]) -> None:
        """Read the longest prefix that fits on every rank and is not below the threshold."""
        group, page_size, end = self._group, self._group.page_size, restorable[-1]
        fits, available = group.host.make_room(group.needs(end), self._rank_group)
        worth = [end for end in restorable if self._rules.is_worth(end * page_size, page_size)]
        if not fits:
            # Cut to an endpoint, not to the number of free pages: a prefix that ends between two
            # checkpoints has no state and restores nothing.
            end = next((end for end in reversed(worth) if _fits(group.needs(end), available)), 0)
        self._stats.count(tokens_without_room=(restorable[-1] - end) * page_size)
        if not end:
            self._finish(operation, 0)
            return
        operation.ends = [found for found in restorable if found <= end]
        plan = plan_reads(end, operation.ends, with_states=False)
        needs = group.needs(end)
        # A second slot keeps the last state while the next one is read, so that a prefetch that is
        # cut has an endpoint to continue from.
        two = group.needs(end, states=2)
        if group.has_states and len(plan) > 1 and _fits(two, available):
            plan = plan_reads(end, operation.ends, with_states=True)
            needs = two
        operation.phase = PrefetchPhase.READ
        # Memory may fail on one rank only. That rank takes part with zeros from here on; it must
        # not leave, as the others wait in the next collective.
        operation.buffers = self._allocate(needs)
        operation.job = None
        self._read(operation, plan)

    def _allocate(self, needs: Mapping[PoolName, int]) -> PrefetchBuffers | None:
        """Take the memory that every rank has free for a prefix; None if this rank fails."""
        try:
            taken = self._group.host.alloc(needs)
        except Exception:
            logger.exception("host memory could not be taken")
            return None
        if taken is None:
            return None
        states = taken.get(PoolName.MAMBA, NO_SLOTS)
        return PrefetchBuffers(self._group, taken[PoolName.KV], states)

    def _read(self, operation: PrefetchOperation, plan: Sequence[ReadStep]) -> None:
        binding, buffers = self._link.binding, operation.buffers
        if binding is not None and buffers is not None:
            operation.job = ReadJob(binding.calls, operation.request, buffers, plan)
            binding.read.submit(operation.job)

    # Delivery ------------------------------------------------------------------------------------

    def _agree_on_delivery(self, operations: Sequence[PrefetchOperation]) -> None:
        """Deliver the longest prefix that all ranks have, or read a state to extend it."""
        agreed = reduce_each(self._rank_group, map(_arrival_flags, operations))
        for operation, (pages, *flags) in zip(operations, agreed, strict=True):
            have = _last_flagged(operation.ends, flags)
            # Pages may have arrived up to an endpoint whose state was not read, as only that of the
            # longest was planned.
            untried = [end for end in operation.ends if end not in operation.tried]
            could = max((end for end in untried if end <= pages), default=0)
            if could > have and len(operation.tried) < MAX_STATE_READS:
                self._read_state(operation, could)
            else:
                self._finish(operation, have)

    def _read_state(self, operation: PrefetchOperation, end: int) -> None:
        """Read the state of another endpoint, if this rank does not have it."""
        # Before any return: the number of collectives depends on `tried`, so it is the same on
        # ranks that have nothing to read.
        operation.tried.add(end)
        buffers, job = operation.buffers, operation.job
        # An abandoned call may still write into a slot.
        usable = job is not None and not job.abandoned
        if usable and buffers is not None and not buffers.is_complete(end):
            self._read(operation, [ReadStep(end, end, with_state=True)])

    def _stop(self, operation: PrefetchOperation) -> None:
        if operation.job is not None:
            operation.job.cancel()
        have = 0
        if operation.phase is PrefetchPhase.READ:
            flags = self._rank_group.all_reduce_min(_arrival_flags(operation))[1:]
            have = _last_flagged(operation.ends, flags)
        self._finish(operation, have)

    def _finish(self, operation: PrefetchOperation, pages: int) -> None:
        """Keep so many pages and free all others.

        Pages that a running call may still write to stay reserved until it returns.
        """
        job = operation.job
        operation.phase = PrefetchPhase.DONE
        operation.delivered = pages
        operation.job = None
        buffers = operation.buffers
        if buffers is None:
            return
        kept = self._group.owned(buffers.delivered(pages))
        # Pages that are kept need no reservation: they have arrived, and no call writes to them
        # again.
        surplus = _without(buffers.all_slots(), kept)
        if job is not None and not job.query():
            # Before `free`, which would make them available at once.
            self._group.hold(surplus, job)
        self._group.host.free(surplus)


def _restorable_flags(operation: PrefetchOperation) -> list[int]:
    """Return 0 or 1 for each endpoint from 0, which always has 1, to the number of pages."""
    job = operation.job
    found = set(job.restorable) if isinstance(job, QueryJob) else set[int]()
    return [int(end in found or not end) for end in range(len(operation.request.keys) + 1)]


def _arrival_flags(operation: PrefetchOperation) -> list[int]:
    """Return the leading pages that have arrived, and 0 or 1 for each endpoint."""
    buffers, job = operation.buffers, operation.job
    if buffers is None:
        return [0] * (1 + len(operation.ends))
    # The job publishes pages and states under its lock; both must be of one moment.
    with nullcontext() if job is None else job.lock:
        return [buffers.pages, *(int(buffers.is_complete(end)) for end in operation.ends)]


def _last_flagged(ends: Sequence[int], flags: Sequence[int]) -> int:
    """Return the largest endpoint whose flag is set, 0 if there is none."""
    return max((end for end, flag in zip(ends, flags, strict=True) if flag), default=0)


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
