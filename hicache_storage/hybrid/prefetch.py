"""Prefetches from storage: agreed by all ranks before memory is taken, and again before anything is handed over."""

from __future__ import annotations

import logging
import time
from enum import Enum, auto
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.indices import HybridIndices, PrefetchOutcome, PrefetchResult
from hicache_storage.hybrid.policies import longest_fitting
from hicache_storage.hybrid.reading import Chain, Landing, QueryJob, ReadJob, WindowJob, stages

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hicache_storage.hybrid.agreement import Agreement
    from hicache_storage.hybrid.attachment import Attachment
    from hicache_storage.hybrid.groups import HostPoolGroup
    from hicache_storage.hybrid.policies import PrefetchRules
    from hicache_storage.hybrid.stats import StatsCounter
    from hicache_storage.hybrid.tiers import AgreedRoom
    from hicache_storage.hybrid.workers import Job
    from hicache_storage.spec import PoolName

logger = logging.getLogger(__name__)

MAX_WINDOW_READS = 3
"""Other endpoints that are tried when a prefix turns out to be cut on some rank."""


class Phase(Enum):
    """How far a prefetch has come; the same on every rank."""

    QUERY = auto()
    READ = auto()
    DONE = auto()


class PrefetchOperation:
    """A prefetch on its way. Used by the scheduler's thread; made by `HybridCacheController.prefetch`."""

    def __init__(self, owner: Prefetcher, chain: Chain, tokens: int, job: Job) -> None:
        self.tokens = tokens
        """Tokens asked for."""
        self.chain = chain
        self.began = time.monotonic()
        self.phase = Phase.QUERY
        self.outcome = PrefetchOutcome.STOPPED
        self.waits = True
        """Whether the policy, on every rank, lets the request wait on."""
        self.ends: list[int] = []
        """Endpoints up to the one that is read, that every rank said it could restore."""
        self.tried: set[int] = set()
        """Of those, the ones whose windows were read again."""
        self.delivered = 0
        """When done: pages that every rank has."""
        self.job: Job | None = job
        self.landing: Landing | None = None
        self._owner = owner

    @property
    def request_id(self) -> str:
        return self.chain.request_id

    @property
    def done(self) -> bool:
        """Whether nothing more is to come."""
        return self.phase is Phase.DONE

    @property
    def ready(self) -> bool:
        """Whether the request may go on, as the ranks agreed when they last led this prefetch on."""
        return self.done or not self.waits

    @property
    def wanted(self) -> int:
        """Pages that are read."""
        return self.ends[-1] if self.ends else 0

    def poll(self) -> bool:
        """Whether the request may go on: the prefetch is done, or the policy does not wait for the rest.

        Then `HybridCacheController.terminate_prefetch` hands over what there is. A collective, except where it is done.

        Raises:
            AgreementError: a rank is gone.
        """
        return self._owner.poll([self])[0]


class Prefetcher:
    """Leads prefetches through their phases. All methods are called by the scheduler's thread, alike on every rank.

    Workers only call the storage; each step that follows from what they found is agreed here.
    """

    def __init__(
        self, group: HostPoolGroup, room: AgreedRoom, agreement: Agreement, rules: PrefetchRules, stats: StatsCounter
    ) -> None:
        self._group, self._room, self._agreement = group, room, agreement
        self._rules, self._stats = rules, stats
        self._live: list[PrefetchOperation] = []
        self._attachment: Attachment | None = None
        self._has_windows = any(entry.is_trailing for entry in group.side.values())

    def attach(self, attachment: Attachment) -> None:
        """Fetch from this storage from now on."""
        self._attachment = attachment

    def detach(self) -> None:
        """End all prefetches, and begin none."""
        self.abort()
        self._attachment = None

    @property
    def occupied_tokens(self) -> int:
        """Asked for by prefetches that were not handed over yet."""
        return sum(operation.tokens for operation in self._live)

    def begin(self, request_id: str, keys: Sequence[str], prefix_keys: Sequence[str]) -> PrefetchOperation | None:
        """Ask which part of a chain can be restored; None where a prefetch is not worth it, or not now."""
        tokens = len(keys) * self._group.page_size
        if self._attachment is None or not self._rules.is_worth(tokens, self._group.page_size):
            self._stats.count(prefetches_below_threshold=self._attachment is not None)
            return None
        if not self._rules.admits(self.occupied_tokens, self._group.size):
            self._stats.count(prefetches_rate_limited=1)
            return None
        chain = Chain(tuple(keys), tuple(prefix_keys), request_id)
        job = QueryJob(self._attachment.calls, chain)
        operation = PrefetchOperation(self, chain, tokens, job)
        self._attachment.expire()
        self._attachment.query.submit(job)
        self._live.append(operation)
        self._stats.count(prefetches=1)
        return operation

    def poll(self, operations: Sequence[PrefetchOperation]) -> list[bool]:
        """Lead prefetches on; for each whether its request may go on. One collective for all, more where phases end."""
        going = [operation for operation in operations if not operation.done]
        if going:
            self._advance(going)
        return [operation.ready for operation in operations]

    def advance(self) -> None:
        """Lead all prefetches on."""
        self.poll(list(self._live))

    def terminate(self, operation: PrefetchOperation) -> PrefetchResult:
        """End a prefetch and hand over what every rank has. A collective, where pages are being read."""
        if operation not in self._live:
            return PrefetchResult(0, (), HybridIndices.empty(), operation.outcome)
        if not operation.done:
            self._stop(operation)
        self._live.remove(operation)
        host = self._delivered(operation)
        operation.landing = None
        tokens = operation.delivered * self._group.page_size
        self._stats.count(tokens_prefetched=tokens)
        return PrefetchResult(tokens, operation.chain.keys[: operation.delivered], host, operation.outcome)

    def abort(self) -> None:
        """End all prefetches; they deliver nothing."""
        for operation in self._live:
            if operation.job is not None:
                operation.job.cancel()
            self._finish(operation, 0, PrefetchOutcome.STOPPED)
        self._live = []

    # One step ----------------------------------------------------------------------------------------------------

    def _advance(self, going: Sequence[PrefetchOperation]) -> None:
        if self._attachment is not None:
            self._attachment.expire()
        votes = self._agreement.minimum([vote for operation in going for vote in self._votes(operation)])
        ready = list[PrefetchOperation]()
        for operation, finished, waits in zip(going, votes[::2], votes[1::2], strict=True):
            operation.waits = bool(waits)
            if finished:
                ready.append(operation)
        queried = [operation for operation in ready if operation.phase is Phase.QUERY]
        read = [operation for operation in ready if operation.phase is Phase.READ]
        if queried:
            self._agree_on_endpoints(queried)
        if read:
            self._agree_on_delivery(read)

    def _votes(self, operation: PrefetchOperation) -> tuple[int, int]:
        """Whether this rank is ready for the next step, and lets the request wait."""
        finished = operation.job is None or operation.job.finished()
        elapsed = time.monotonic() - operation.began
        return int(finished), int(not self._rules.stops_waiting(elapsed, operation.tokens))

    def _agree_on_endpoints(self, operations: Sequence[PrefetchOperation]) -> None:
        """Intersect what the ranks can restore, take memory for the longest, and let it be read."""
        legal = iter(self._agreement.minimum([vote for operation in operations for vote in _legal(operation)]))
        for operation in operations:
            marks = [next(legal) for _ in range(len(operation.chain.keys) + 1)]
            restorable = [end for end, mark in enumerate(marks) if mark and end]
            hit = (restorable[-1] if restorable else 0) * self._group.page_size
            self._stats.count(tokens_hit=hit)
            if not self._rules.is_worth(hit, self._group.page_size):
                self._finish(operation, 0, PrefetchOutcome.BELOW_THRESHOLD)
            else:
                self._take_memory(operation, restorable)

    def _take_memory(self, operation: PrefetchOperation, restorable: list[int]) -> None:
        """Begin to read the longest prefix that fits on every rank, not under the threshold."""
        group, page_size, hit = self._group, self._group.page_size, restorable[-1]
        fits, available = self._room.make(group.host, group.needs(hit))
        worth = [end for end in restorable if self._rules.is_worth(end * page_size, page_size)]
        end = hit if fits else longest_fitting(worth, lambda end: _fits(group.needs(end), available))
        operation.outcome = PrefetchOutcome.COMPLETE if end == hit else PrefetchOutcome.HOST_CAPACITY
        self._stats.count(tokens_without_room=(hit - end) * page_size)
        if not end:
            self._finish(operation, 0, PrefetchOutcome.HOST_CAPACITY)
            return
        operation.ends = [found for found in restorable if found <= end]
        plan = stages(end, operation.ends, saves=False)
        sets = 1
        if self._has_windows and len(plan) > 1 and _fits(self._needs(end, 2), available):
            plan, sets = stages(end, operation.ends, saves=True), 2
        operation.phase = Phase.READ
        operation.landing = self._land(end, sets)
        operation.job = None
        if operation.landing is not None and self._attachment is not None:
            self._read(operation, ReadJob(self._attachment.calls, operation.chain, operation.landing, plan))

    def _needs(self, end: int, sets: int) -> dict[PoolName, int]:
        needs = self._group.needs(end)
        return {name: count * (sets if self._is_trailing(name) else 1) for name, count in needs.items()}

    def _land(self, end: int, sets: int) -> Landing | None:
        """Memory for a prefix, of which there is enough on every rank; None where this rank fails all the same."""
        needs = self._needs(end, sets)
        try:
            taken = self._group.host.alloc(needs)
        except Exception:
            logger.exception("host memory could not be taken")
            return None
        if taken is None:
            return None
        whole = {name: slots for name, slots in taken.items() if not self._is_trailing(name)}
        windows = [
            {name: slots.chunk(sets)[number] for name, slots in taken.items() if self._is_trailing(name)}
            for number in range(sets if self._has_windows else 0)
        ]
        return Landing(self._group, whole, windows)

    def _read(self, operation: PrefetchOperation, job: Job) -> None:
        operation.job = job
        if self._attachment is not None:
            self._attachment.read.submit(job)

    def _is_trailing(self, name: PoolName) -> bool:
        return self._group.entries[name].is_trailing

    # What every rank has -----------------------------------------------------------------------------------------

    def _agree_on_delivery(self, operations: Sequence[PrefetchOperation]) -> None:
        """Hand over the longest prefix that is there on every rank; read other windows where that makes it longer."""
        votes = iter(self._agreement.minimum([vote for operation in operations for vote in _arrived(operation)]))
        for operation in operations:
            reach, *marks = [next(votes) for _ in range(len(operation.ends) + 1)]
            have = max((end for end, mark in zip(operation.ends, marks, strict=True) if mark), default=0)
            could = max((end for end in operation.ends if end <= reach and end not in operation.tried), default=0)
            if could > have and len(operation.tried) < MAX_WINDOW_READS:
                self._read_windows(operation, could)
            else:
                self._finish(operation, have, _outcome(operation, have))

    def _read_windows(self, operation: PrefetchOperation, end: int) -> None:
        """Read the windows of another endpoint, where this rank does not have them."""
        operation.tried.add(end)
        landing, attachment, job = operation.landing, self._attachment, operation.job
        # A call that was given up may still write into a set.
        usable = job is not None and not job.abandoned
        if landing is not None and attachment is not None and usable and not landing.deliverable(end):
            self._read(operation, WindowJob(attachment.calls, operation.chain, landing, end))

    def _stop(self, operation: PrefetchOperation) -> None:
        if operation.job is not None:
            operation.job.cancel()
        have = 0
        if operation.phase is Phase.READ:
            marks = self._agreement.minimum(_arrived(operation))[1:]
            have = max((end for end, mark in zip(operation.ends, marks, strict=True) if mark), default=0)
        complete = operation.phase is Phase.READ and have == operation.wanted
        self._finish(operation, have, operation.outcome if complete else PrefetchOutcome.STOPPED)

    def _finish(self, operation: PrefetchOperation, pages: int, outcome: PrefetchOutcome) -> None:
        """Keep so many pages and free all others, which rest while a call may still write into them."""
        operation.phase, operation.delivered, operation.outcome = Phase.DONE, pages, outcome
        job, operation.job = operation.job, None
        if operation.landing is None:
            return
        kept = self._group.owned(self._delivered(operation))
        surplus = _without(_all_slots(operation.landing), kept, self._group)
        if job is not None and not job.query():
            self._group.hold(surplus, job)
        self._group.host.free(surplus)

    def _delivered(self, operation: PrefetchOperation) -> HybridIndices:
        """The slots of what is handed over."""
        landing, pages = operation.landing, operation.delivered
        if landing is None or not pages:
            return HybridIndices.empty()
        owned: dict[PoolName, torch.Tensor] = {}
        ends: dict[PoolName, tuple[int, ...]] = {}
        source = {**landing.slots, **(landing.sets[landing.held[pages]] if landing.sets else {})}
        for name, slots in source.items():
            ends[name] = self._group.entries[name].window(pages)
            owned[name] = slots[: len(ends[name]) * self._group.entries[name].host_pool.page_size]
        del ends[self._group.anchor.name]
        return self._group.span(owned, ends)


def _legal(operation: PrefetchOperation) -> list[int]:
    if isinstance(operation.job, QueryJob):
        return operation.job.legal()
    return [1] + [0] * len(operation.chain.keys)


def _arrived(operation: PrefetchOperation) -> list[int]:
    """Leading pages that are there, and for each endpoint whether its prefix is."""
    landing, job = operation.landing, operation.job
    if landing is None:
        return [0] * (1 + len(operation.ends))
    if job is None:
        return [landing.pages, *(int(landing.deliverable(end)) for end in operation.ends)]
    with job.lock:
        return [landing.pages, *(int(landing.deliverable(end)) for end in operation.ends)]


def _outcome(operation: PrefetchOperation, pages: int) -> PrefetchOutcome:
    return operation.outcome if pages == operation.wanted else PrefetchOutcome.STORAGE_TRANSFER


def _fits(needs: Mapping[PoolName, int], available: Mapping[PoolName, int]) -> bool:
    return all(count <= available[name] for name, count in needs.items())


def _all_slots(landing: Landing) -> dict[PoolName, torch.Tensor]:
    slots = {name: [rows] for name, rows in landing.slots.items()}
    for rows in landing.sets:
        for name, more in rows.items():
            slots.setdefault(name, []).append(more)
    return {name: torch.cat(parts) for name, parts in slots.items()}


def _without(
    slots: Mapping[PoolName, torch.Tensor], kept: Mapping[PoolName, torch.Tensor], group: HostPoolGroup
) -> dict[PoolName, torch.Tensor]:
    """The slots that are not kept."""
    return {name: rows[~torch.isin(rows, kept[name])] if name in kept else rows for name, rows in slots.items()}
