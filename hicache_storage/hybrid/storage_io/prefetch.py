"""Prefetches from the storage, in two phases that all ranks agree on.

The ranks agree on the endpoint before memory is taken, and on what has arrived before it is
returned to the caller.
"""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.hashing import page_hashes
from hicache_storage.hybrid.pools import HybridIndices
from hicache_storage.hybrid.ranks import reduce_each
from hicache_storage.hybrid.storage_io.prefetch_jobs import (
    PrefetchBuffers,
    PrefetchRequest,
    QueryJob,
    ReadJob,
    ReadStep,
    plan_reads,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.hybrid.policies import PrefetchRules
    from hicache_storage.hybrid.pools import HostPoolGroup
    from hicache_storage.hybrid.ranks import RankGroup
    from hicache_storage.hybrid.storage_io.calls import StatsCounter
    from hicache_storage.hybrid.storage_io.workers import Job, StorageLink
    from hicache_storage.spec import PoolName

logger = logging.getLogger(__name__)

MAX_WINDOW_READS = 3
"""Shorter endpoints that are tried when a prefix turns out to be incomplete on some rank."""


class PrefetchOutcome(StrEnum):
    """Reason for the length of a prefetch."""

    COMPLETE = "complete"
    """Everything that the ranks agreed on."""
    BELOW_THRESHOLD = "below_threshold"
    """The longest prefix that every rank can restore is below the threshold."""
    HOST_CAPACITY = "host_capacity"
    """Cut to the longest prefix that fits into host memory, or dropped where none fits."""
    STORAGE_TRANSFER = "storage_transfer"
    """Cut because pages that existed were not delivered on some rank."""
    STOPPED = "stopped"
    """Cut because it was terminated early: by policy, by the caller, by `detach` or `reset`."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefetchResult:
    """Prefix that a prefetch restored, of the same length on every rank.

    The caller owns the host slots.
    """

    tokens: int
    """Tokens restored, a multiple of the page size, counted from the first token asked for."""
    hashes: tuple[str, ...]
    """Their page hashes."""
    host: HybridIndices
    """Their host slots; the side pools have the pages of the window that ends at `tokens`."""
    outcome: PrefetchOutcome


class PrefetchPhase(Enum):
    """Phase of a prefetch, the same on every rank."""

    QUERY = auto()
    READ = auto()
    DONE = auto()


class PrefetchOperation:
    """A prefetch in flight, made by `Prefetcher.begin`.

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
        `Prefetcher.terminate` returns what has arrived. A collective, unless the prefetch is done.

        Raises:
            RankGroupError: a rank is gone.
        """
        self._owner.advance([self])
        return self.ready


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
        *,
        bigram: bool,
    ) -> None:
        self._bigram = bigram
        self._group = group
        self._rank_group = rank_group
        self._rules = rules
        self._stats = stats
        self._link = link
        self._live: list[PrefetchOperation] = []
        self._has_windows = any(entry.is_trailing for entry in group.side.values())

    def begin(
        self,
        request_id: str,
        tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_hashes: Sequence[str] = (),
    ) -> PrefetchOperation | None:
        """Start to fetch the tokens of a request that the storage has.

        Memory is taken once every rank has agreed on the hit.

        Args:
            request_id: for logs.
            tokens: those after the prefix that is on the device or the host; a partial page at the
                end is left out. With `bigram` one more than there are rows.
            last_hash: key of the page before them; at the start of a sequence the seed of its
                namespace, or None.
            prefix_hashes: keys of all pages before them.

        Returns:
            None if there is no storage, the span is too short, or too many tokens are in flight.
        """
        page_size, binding = self._group.page_size, self._link.binding
        keys = page_hashes(tokens, page_size, prior=last_hash, bigram=self._bigram)
        length = len(keys) * page_size
        if binding is None or not self._rules.is_worth(length, page_size):
            self._stats.count(prefetches_below_threshold=binding is not None)
            return None
        # No collective: prefetches in flight and sizes are the same on every rank, so all decide
        # alike.
        occupied = sum(operation.tokens for operation in self._live)
        if not self._rules.admits(occupied, self._group.size):
            self._stats.count(prefetches_rate_limited=1)
            return None
        request = PrefetchRequest(tuple(keys), tuple(prefix_hashes), request_id)
        job = QueryJob(binding.calls, request)
        operation = PrefetchOperation(self, request, length, job)
        # Before `submit`: a thread that hangs is given up, so that the job gets one that serves.
        self._link.expire()
        binding.query.submit(job)
        self._live.append(operation)
        self._stats.count(prefetches=1)
        return operation

    def terminate(self, operation: PrefetchOperation) -> PrefetchResult:
        """End a prefetch; returns the longest prefix that every rank has in all pools.

        A collective while pages are read. Does not wait for running calls: pages that they may
        still write to stay reserved until they return. A second call returns an empty prefix.
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

    def advance(self, operations: Sequence[PrefetchOperation] | None = None) -> None:
        """Advance prefetches, by default all.

        One collective for all that are not done, and further ones where phases end.
        """
        chosen = self._live if operations is None else operations
        unfinished = [operation for operation in chosen if not operation.done]
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
                self._finish(operation, 0, PrefetchOutcome.BELOW_THRESHOLD)
            else:
                self._start_reading(operation, restorable)

    def _start_reading(self, operation: PrefetchOperation, restorable: list[int]) -> None:
        """Read the longest prefix that fits on every rank and is not below the threshold."""
        group, page_size, hit = self._group, self._group.page_size, restorable[-1]
        fits, available = group.host.make_room(group.needs(hit), self._rank_group)
        worth = [end for end in restorable if self._rules.is_worth(end * page_size, page_size)]
        end = hit
        if not fits:
            # Cut to an endpoint, not to the number of free pages: a prefix that ends between two
            # checkpoints has no state and restores nothing.
            end = next((end for end in reversed(worth) if _fits(group.needs(end), available)), 0)
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
        self._read(operation, plan)

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
        sides = {name: slots.chunk(set_count) for name, slots in taken.items() if name not in whole}
        numbers = range(set_count if sides else 0)
        windows = [{name: slots[number] for name, slots in sides.items()} for number in numbers]
        return PrefetchBuffers(self._group, whole, windows)

    def _read(self, operation: PrefetchOperation, plan: Sequence[ReadStep]) -> None:
        binding, buffers = self._link.binding, operation.buffers
        if binding is not None and buffers is not None:
            operation.job = ReadJob(binding.calls, operation.request, buffers, plan)
            binding.read.submit(operation.job)

    def _is_trailing(self, name: PoolName) -> bool:
        return self._group.entries[name].is_trailing

    # Delivery ------------------------------------------------------------------------------------

    def _agree_on_delivery(self, operations: Sequence[PrefetchOperation]) -> None:
        """Deliver the longest prefix that all ranks have, or read windows to extend it."""
        agreed = reduce_each(self._rank_group, map(_arrival_flags, operations))
        for operation, (pages, *flags) in zip(operations, agreed, strict=True):
            have = _last_flagged(operation.ends, flags)
            # Pages may have arrived up to an endpoint whose windows were not read, as only those of
            # the longest were planned.
            untried = [end for end in operation.ends if end not in operation.tried]
            could = max((end for end in untried if end <= pages), default=0)
            if could > have and len(operation.tried) < MAX_WINDOW_READS:
                self._read_windows(operation, could)
            else:
                complete = have == operation.wanted
                outcome = operation.outcome if complete else PrefetchOutcome.STORAGE_TRANSFER
                self._finish(operation, have, outcome)

    def _read_windows(self, operation: PrefetchOperation, end: int) -> None:
        """Read the windows of another endpoint, if this rank does not have them."""
        # Before any return: the number of collectives depends on `tried`, so it is the same on
        # ranks that have nothing to read.
        operation.tried.add(end)
        buffers, job = operation.buffers, operation.job
        # An abandoned call may still write into a window set.
        usable = job is not None and not job.abandoned
        if usable and buffers is not None and not buffers.is_complete(end):
            self._read(operation, [ReadStep(end, end, with_windows=True)])

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
    """Return 0 or 1 for each endpoint from 0, which always has 1, to the number of pages."""
    job = operation.job
    found = set(job.restorable) if isinstance(job, QueryJob) else set[int]()
    return [int(end in found or not end) for end in range(len(operation.request.keys) + 1)]


def _arrival_flags(operation: PrefetchOperation) -> list[int]:
    """Return the leading pages that have arrived, and 0 or 1 for each endpoint."""
    buffers, job = operation.buffers, operation.job
    if buffers is None:
        return [0] * (1 + len(operation.ends))
    # The job publishes pages and windows under its lock; both must be of one moment.
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
