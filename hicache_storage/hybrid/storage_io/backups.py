"""Backups of host pages to the storage.

Pages that were not stored are tried again.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.storage_io.calls import BATCH_PAGES, page_transfer
from hicache_storage.hybrid.storage_io.results import BackupResult
from hicache_storage.hybrid.storage_io.workers import Job
from hicache_storage.spec import InvalidTransferError, leading_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.hybrid.pools.group import HostPoolGroup, PoolEntry
    from hicache_storage.hybrid.pools.indices import HybridIndices
    from hicache_storage.hybrid.ranks.group import RankGroup
    from hicache_storage.hybrid.stats import StatsCounter
    from hicache_storage.hybrid.storage_io.binding import StorageBinding
    from hicache_storage.hybrid.storage_io.calls import StorageCalls
    from hicache_storage.spec import PoolName, PoolTransfer

MAX_ATTEMPTS = 3
"""Attempts to store the pages of a backup, the first included."""
RETRY_SECONDS = 0.25
"""Delay before the second attempt; doubled before each further one."""


@dataclass(slots=True, eq=False)
class PoolPages:
    """Pages of one pool in a backup."""

    entry: PoolEntry
    keys: list[str]
    rows: torch.Tensor
    """(pages, slots per page)."""
    endpoints: tuple[int, ...]
    stored: list[bool]

    def missing(self, start: int, end: int) -> list[int]:
        """Return the numbers of pages at endpoints in (start, end] that are not stored.

        A state at the start of the span, endpoint 0, counts to its first page.
        """
        return [
            number
            for number, at in enumerate(self.endpoints)
            if not self.stored[number] and (start < at <= end or start == at == 0)
        ]

    def transfer(self, numbers: Sequence[int]) -> PoolTransfer:
        """Return the transfer of some of the pages."""
        keys = [self.keys[number] for number in numbers]
        return page_transfer(self.entry, keys, self.rows[list(numbers)].view(-1))


class BackupJob(Job):
    """One attempt: stores the missing pages, then looks up the prefix before the span.

    Each call stores the pages of all pools in one part of the span.
    """

    def __init__(
        self,
        calls: StorageCalls,
        pools: Sequence[PoolPages],
        pages: int,
        keys: Sequence[str],
        prefix_pages: int,
    ) -> None:
        super().__init__()
        self._calls = calls
        self._pools = pools
        self._pages = pages
        self._keys = keys
        self._prefix_pages = prefix_pages
        self.found = prefix_pages
        """Leading pages of the prefix that the storage has; all if unknown. Guarded by `lock`."""

    def perform(self) -> None:
        # At least one round: a span may be a state alone, without pages of the anchor.
        for start in range(0, max(1, self._pages), BATCH_PAGES):
            # Read without the lock: as long as the job runs, only this thread changes `stored`.
            parts = [(pool, pool.missing(start, start + BATCH_PAGES)) for pool in self._pools]
            parts = [(pool, numbers) for pool, numbers in parts if numbers]
            with self.lock:
                if not self.begin_call():
                    return
            if parts:
                self._store(parts, self._keys[: self._prefix_pages + start])
        all_stored = all(all(pool.stored) for pool in self._pools)
        if self._prefix_pages and self._pages and all_stored:
            self._look_up_prefix()

    def _look_up_prefix(self) -> None:
        """Look up whether the storage still has the prefix that the span needs."""
        before, own = self._keys[: self._prefix_pages], self._keys[self._prefix_pages :]
        found = self._leading_pages(before, ())
        # A storage that fails seems to have nothing. A missing prefix counts only if the storage
        # has the span that it has just stored.
        if found is None or (found < self._prefix_pages and not self._leading_pages(own, before)):
            return
        with self.lock:
            if not self.abandoned:
                self.found = found

    def _leading_pages(self, keys: Sequence[str], prefix_keys: Sequence[str]) -> int | None:
        with self.lock:
            if not self.begin_call():
                return None
        return self._calls.leading_pages(keys, prefix_keys)

    def _store(
        self, parts: Sequence[tuple[PoolPages, list[int]]], prefix_keys: Sequence[str]
    ) -> None:
        transfers = [pool.transfer(numbers) for pool, numbers in parts]
        answer = self._calls.write(transfers, prefix_keys)
        with self.lock:
            # The scheduler has already reported an abandoned attempt: its pages must not change.
            if self.abandoned:
                return
            for pool, numbers in parts:
                for number, stored in zip(numbers, answer[pool.entry.name], strict=True):
                    pool.stored[number] = stored


class BackupOperation:
    """A backup in flight; its host pages stay reserved until it ends, even if freed."""

    def __init__(
        self,
        operation_id: int,
        pools: Sequence[PoolPages],
        pages: int,
        keys: Sequence[str],
        prefix_pages: int,
    ) -> None:
        self.operation_id = operation_id
        self.pools = pools
        self.pages = pages
        self.attempts = 0
        self.retry_at = 0.0
        self.job: BackupJob | None = None
        self.ended = False
        """Whether no further attempt is made."""
        self._keys = keys
        self.prefix_pages = prefix_pages

    def next_job(self, calls: StorageCalls) -> BackupJob:
        """Return the job of another attempt."""
        self.attempts += 1
        self.job = BackupJob(calls, self.pools, self.pages, self._keys, self.prefix_pages)
        return self.job

    def cancel(self) -> None:
        """Make no further attempt, and no further call in the current one."""
        if self.job is not None:
            self.job.cancel()
        self.ended = True

    def query(self) -> bool:
        """Return whether the storage does not use the pages any more."""
        return self.ended and (self.job is None or self.job.query())

    def complete(self) -> bool:
        """Return whether all pages are stored."""
        return all(all(pool.stored) for pool in self.pools)

    def found(self) -> int:
        """Return the leading pages of the prefix that the storage has; all if unknown."""
        return self.prefix_pages if self.job is None else self.job.found

    def stored_pages(self) -> int:
        """Return the leading pages that all pools have stored, with their side pages."""
        limit = self.pages
        for pool in self.pools:
            first = leading_pages(pool.stored)
            if first < len(pool.stored):
                limit = min(limit, max(0, pool.endpoints[first] - 1))
        return limit


class StorageBackups:
    """All backups from the host to the storage.

    All methods are called by the scheduler's thread, in the same order on every rank.
    """

    def __init__(self, group: HostPoolGroup, rank_group: RankGroup, stats: StatsCounter) -> None:
        self._group = group
        self._rank_group = rank_group
        self._stats = stats
        self._live: list[BackupOperation] = []
        self._binding: StorageBinding | None = None
        self._last_id = 0

    def attach(self, binding: StorageBinding) -> None:
        """Store to this storage from now on."""
        self._binding = binding

    def detach(self) -> None:
        """Make no further attempt; `completed` returns how many pages each backup stored."""
        for operation in self._live:
            operation.cancel()
        self._binding = None

    def reset(self) -> None:
        """Cancel all backups, and return no results for them."""
        for operation in self._live:
            operation.cancel()
        self._live = []

    def begin(
        self, host: HybridIndices, hashes: Sequence[str], prefix_hashes: Sequence[str]
    ) -> int:
        """Store a span; returns the operation's id.

        Without a storage the backup ends at once, and nothing is stored.

        Raises:
            InvalidTransferError: the span does not fit the pools or the hashes.
        """
        self._group.check(host)
        pages = host.anchor.numel() // self._group.page_size
        if pages != len(hashes):
            raise InvalidTransferError(
                f"hashes must be one for each of {pages} pages, got {len(hashes)}"
            )
        if not prefix_hashes and any(0 in ends for ends in host.endpoints.values()):
            raise InvalidTransferError(
                "prefix_hashes is empty: a state at the start of a sequence has no key"
            )
        self._last_id += 1
        keys, prefix_pages = (*prefix_hashes, *hashes), len(prefix_hashes)
        found = (self._pool_pages(host, name, keys, prefix_pages) for name in self._group.entries)
        pools = [pool for pool in found if pool]
        operation = BackupOperation(self._last_id, pools, pages, keys, prefix_pages)
        self._live.append(operation)
        # The cache may evict the span before it is stored; its slots must not be reused by then.
        self._group.hold(self._group.owned(host), operation)
        self._submit(operation)
        return operation.operation_id

    def completed(self) -> list[BackupResult]:
        """Return backups that have ended on every rank, in the order of `begin`.

        A collective while there are any.
        """
        if self._binding is not None:
            self._binding.expire()
        if not self._live:
            return []
        for operation in self._live:
            self._advance(operation)
        votes = self._rank_group.all_reduce_min(
            [vote for operation in self._live for vote in _votes(operation)]
        )
        results, remaining = list[BackupResult](), list[BackupOperation]()
        agreed = zip(votes[::4], votes[1::4], votes[2::4], votes[3::4], strict=True)
        for operation, vote in zip(self._live, agreed, strict=True):
            ended, stored, complete, found = vote
            if ended:
                lost_from = found if complete and found < operation.prefix_pages else None
                result = BackupResult(operation.operation_id, stored, bool(complete), lost_from)
                results.append(result)
                self._count(operation)
            else:
                remaining.append(operation)
        self._live = remaining
        return results

    def _pool_pages(
        self, host: HybridIndices, name: PoolName, keys: Sequence[str], prefix_pages: int
    ) -> PoolPages | None:
        slots, ends = self._group.slots(host, name), self._group.endpoints(host, name)
        if slots is None or not ends:
            return None
        entry = self._group.entries[name]
        writer = self._binding is not None and self._binding.identity.is_writer(name)
        # Pages that another rank writes count as stored here; that rank reports them.
        stored = [self._binding is not None and not writer] * len(ends)
        pool_keys = [keys[prefix_pages + end - 1] for end in ends]
        return PoolPages(entry, pool_keys, slots.view(len(ends), -1), ends, stored)

    def _submit(self, operation: BackupOperation) -> None:
        if self._binding is None or operation.complete():
            operation.ended = True
        else:
            self._binding.backup.submit(operation.next_job(self._binding.calls))

    def _advance(self, operation: BackupOperation) -> None:
        """Decide after an attempt whether to make another one."""
        job = operation.job
        if operation.ended or job is None or not job.finished():
            return
        # An abandoned call may still read the pages; another attempt would hang as well.
        if operation.complete() or job.abandoned or operation.attempts >= MAX_ATTEMPTS:
            operation.ended = True
        elif not operation.retry_at:
            # The scheduler's thread does not sleep: it looks again in a later step.
            delay = RETRY_SECONDS * 2 ** (operation.attempts - 1)
            operation.retry_at = time.monotonic() + delay
        elif time.monotonic() >= operation.retry_at:
            operation.retry_at = 0.0
            self._stats.count(backup_retries=1)
            self._submit(operation)

    def _count(self, operation: BackupOperation) -> None:
        stored = sum(sum(pool.stored) for pool in operation.pools)
        total = sum(len(pool.stored) for pool in operation.pools)
        self._stats.count(pages_backed_up=stored, pages_dropped=total - stored)


def _votes(operation: BackupOperation) -> tuple[int, int, int, int]:
    """Return this rank's votes: ended, pages stored, all stored, prefix pages found."""
    if not operation.ended:
        return 0, 0, 0, 0
    if operation.job is None:
        return 1, operation.stored_pages(), int(operation.complete()), operation.found()
    with operation.job.lock:
        return 1, operation.stored_pages(), int(operation.complete()), operation.found()
