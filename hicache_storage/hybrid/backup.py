"""Backups of host pages to storage: what is stored stays stored, the rest is tried again."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.indices import BackupResult
from hicache_storage.hybrid.storage_calls import BATCH_PAGES, page_transfer
from hicache_storage.hybrid.workers import Job
from hicache_storage.spec import InvalidTransferError, leading_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.hybrid.agreement import Agreement
    from hicache_storage.hybrid.attachment import Attachment
    from hicache_storage.hybrid.groups import HostPoolGroup, PoolEntry
    from hicache_storage.hybrid.indices import HybridIndices
    from hicache_storage.hybrid.stats import StatsCounter
    from hicache_storage.hybrid.storage_calls import StorageCalls
    from hicache_storage.spec import PoolName, PoolTransfer

MAX_ATTEMPTS = 3
RETRY_SECONDS = 0.25
"""Before the second attempt; twice as long before each further one."""


@dataclass(slots=True, eq=False)
class PoolPages:
    """One pool's pages of a backup."""

    entry: PoolEntry
    keys: list[str]
    rows: torch.Tensor
    """(pages, slots per page)."""
    endpoints: tuple[int, ...]
    stored: list[bool]

    def missing(self, start: int, end: int) -> list[int]:
        """Pages at endpoints in (start, end] that are not stored; a state where the span begins counts to its first page."""
        return [
            number
            for number, at in enumerate(self.endpoints)
            if not self.stored[number] and (start < at <= end or start == at == 0)
        ]

    def transfer(self, numbers: Sequence[int]) -> PoolTransfer:
        """Some of the pages, as a share of a set."""
        return page_transfer(self.entry, [self.keys[number] for number in numbers], self.rows[list(numbers)].view(-1))


class BackupJob(Job):
    """Stores what is not stored yet, the pools of each part of the span in one call; then looks for the pages before it."""

    def __init__(self, calls: StorageCalls, pools: Sequence[PoolPages], pages: int, chain: Sequence[str], prefix: int) -> None:
        super().__init__()
        self._calls, self._pools, self._pages = calls, pools, pages
        self._chain, self._prefix = chain, prefix
        self.found = prefix
        """Leading pages of the prefix that are there, or all for all that is known; guarded by `lock`."""

    def perform(self) -> None:
        for start in range(0, max(1, self._pages), BATCH_PAGES):
            parts = [(pool, pool.missing(start, start + BATCH_PAGES)) for pool in self._pools]
            parts = [(pool, numbers) for pool, numbers in parts if numbers]
            with self.lock:
                if not self.begin_call():
                    return
            if parts:
                self._store(parts, self._chain[: self._prefix + start])
        if self._prefix and self._pages and all(all(pool.stored) for pool in self._pools):
            self._look_back()

    def _look_back(self) -> None:
        """Find out whether the storage still has what the span is of use with."""
        before, own = self._chain[: self._prefix], self._chain[self._prefix :]
        found = self._leading(before, ())
        # A storage that fails has nothing, neither what it has just taken.
        if found is None or (found < self._prefix and not self._leading(own, before)):
            return
        with self.lock:
            if not self.abandoned:
                self.found = found

    def _leading(self, keys: Sequence[str], prefix_keys: Sequence[str]) -> int | None:
        with self.lock:
            if not self.begin_call():
                return None
        return self._calls.leading(keys, prefix_keys)

    def _store(self, parts: Sequence[tuple[PoolPages, list[int]]], prefix_keys: Sequence[str]) -> None:
        answer = self._calls.write([pool.transfer(numbers) for pool, numbers in parts], prefix_keys)
        with self.lock:
            if self.abandoned:
                return
            for pool, numbers in parts:
                for number, ok in zip(numbers, answer[pool.entry.name], strict=True):
                    pool.stored[number] = ok


class BackupOperation:
    """A span on its way to storage; its host pages rest if they are freed meanwhile."""

    def __init__(self, operation_id: int, pools: Sequence[PoolPages], pages: int, chain: Sequence[str], prefix: int) -> None:
        self.operation_id = operation_id
        self.pools, self.pages = pools, pages
        self.attempts = 0
        self.retry_at = 0.0
        self.job: BackupJob | None = None
        self.over = False
        """Whether no further attempt is made."""
        self._chain, self.prefix = chain, prefix

    def next_job(self, calls: StorageCalls) -> BackupJob:
        """Another attempt."""
        self.attempts += 1
        self.job = BackupJob(calls, self.pools, self.pages, self._chain, self.prefix)
        return self.job

    def query(self) -> bool:
        """Whether the storage is done with the pages."""
        return self.over and (self.job is None or self.job.query())

    def complete(self) -> bool:
        """Whether all is stored."""
        return all(all(pool.stored) for pool in self.pools)

    def found(self) -> int:
        """Leading pages of the prefix that are there; all where that is not known."""
        return self.prefix if self.job is None else self.job.found

    def stored_pages(self) -> int:
        """Leading pages of the span that are stored in all pools, with all side pages that end in them."""
        limit = self.pages
        for pool in self.pools:
            first = leading_pages(pool.stored)
            if first < len(pool.stored):
                limit = min(limit, max(0, pool.endpoints[first] - 1))
        return limit


class Backups:
    """Leads backups to their end. All methods are called by the scheduler's thread, alike on every rank."""

    def __init__(self, group: HostPoolGroup, agreement: Agreement, stats: StatsCounter) -> None:
        self._group, self._agreement, self._stats = group, agreement, stats
        self._live: list[BackupOperation] = []
        self._attachment: Attachment | None = None
        self._ids = 0

    def attach(self, attachment: Attachment) -> None:
        """Store to this storage from now on."""
        self._attachment = attachment

    def detach(self) -> None:
        """Make no further attempt. What is stored stays; `completed` tells how far each backup came."""
        for operation in self._live:
            if operation.job is not None:
                operation.job.cancel()
            operation.over = True
        self._attachment = None

    def reset(self) -> None:
        """Forget all backups."""
        for operation in self._live:
            if operation.job is not None:
                operation.job.cancel()
            operation.over = True
        self._live = []

    def begin(self, host: HybridIndices, hashes: Sequence[str], prefix_hashes: Sequence[str]) -> int:
        """Store a span; the operation's id. Without a storage it is over at once, and nothing is stored.

        Raises:
            InvalidTransferError: the span does not fit the pools or the hashes.
        """
        self._group.check(host)
        pages = host.anchor.numel() // self._group.page_size
        if pages != len(hashes):
            raise InvalidTransferError(f"hashes must be one for each of {pages} pages, got {len(hashes)}")
        if not prefix_hashes and any(0 in ends for ends in host.endpoints.values()):
            raise InvalidTransferError("prefix_hashes is empty: a state where the sequence begins has no key")
        self._ids += 1
        chain = (*prefix_hashes, *hashes)
        pools = [pool for name in self._group.entries if (pool := self._pool_pages(host, name, chain, len(prefix_hashes)))]
        operation = BackupOperation(self._ids, pools, pages, chain, len(prefix_hashes))
        self._live.append(operation)
        self._group.hold(self._group.owned(host), operation)
        self._submit(operation)
        return operation.operation_id

    def completed(self) -> list[BackupResult]:
        """Backups that are over on every rank, in the order in which they began. A collective while there are any."""
        if self._attachment is not None:
            self._attachment.expire()
        if not self._live:
            return []
        for operation in self._live:
            self._lead(operation)
        votes = self._agreement.minimum([vote for operation in self._live for vote in _votes(operation)])
        results, left = list[BackupResult](), list[BackupOperation]()
        agreed = zip(votes[::4], votes[1::4], votes[2::4], votes[3::4], strict=True)
        for operation, (over, stored, complete, found) in zip(self._live, agreed, strict=True):
            if over:
                lost_from = found if complete and found < operation.prefix else None
                results.append(BackupResult(operation.operation_id, stored, bool(complete), lost_from))
                self._count(operation)
            else:
                left.append(operation)
        self._live = left
        return results

    def _pool_pages(self, host: HybridIndices, name: PoolName, chain: Sequence[str], prefix: int) -> PoolPages | None:
        slots, ends = self._group.slots(host, name), self._group.endpoints(host, name)
        if slots is None or not ends:
            return None
        entry = self._group.entries[name]
        writer = self._attachment is not None and self._attachment.identity.is_writer(name)
        # What another rank writes is that rank's to report.
        stored = [self._attachment is not None and not writer] * len(ends)
        return PoolPages(entry, [chain[prefix + end - 1] for end in ends], slots.view(len(ends), -1), ends, stored)

    def _submit(self, operation: BackupOperation) -> None:
        if self._attachment is None or operation.complete():
            operation.over = True
        else:
            self._attachment.backup.submit(operation.next_job(self._attachment.calls))

    def _lead(self, operation: BackupOperation) -> None:
        """Decide, after an attempt, whether there is another."""
        job = operation.job
        if operation.over or job is None or not job.finished():
            return
        if operation.complete() or job.abandoned or operation.attempts >= MAX_ATTEMPTS:
            operation.over = True
        elif not operation.retry_at:
            operation.retry_at = time.monotonic() + RETRY_SECONDS * 2 ** (operation.attempts - 1)
        elif time.monotonic() >= operation.retry_at:
            operation.retry_at = 0.0
            self._stats.count(backup_retries=1)
            self._submit(operation)

    def _count(self, operation: BackupOperation) -> None:
        stored = sum(sum(pool.stored) for pool in operation.pools)
        total = sum(len(pool.stored) for pool in operation.pools)
        self._stats.count(pages_backed_up=stored, pages_dropped=total - stored)


def _votes(operation: BackupOperation) -> tuple[int, int, int, int]:
    """Whether it is over on this rank, how much is stored, whether that is all, and how much of what is before it is there."""
    if not operation.over:
        return 0, 0, 0, 0
    if operation.job is None:
        return 1, operation.stored_pages(), int(operation.complete()), operation.found()
    with operation.job.lock:
        return 1, operation.stored_pages(), int(operation.complete()), operation.found()
