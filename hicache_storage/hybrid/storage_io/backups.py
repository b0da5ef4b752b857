"""Backups of host pages to the storage.

Pages that were not stored are tried again.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hicache_storage.hybrid.ranks import reduce_each
from hicache_storage.hybrid.storage_io.calls import BATCH_PAGES, page_transfer
from hicache_storage.hybrid.storage_io.workers import Job
from hicache_storage.spec import InvalidTransferError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from hicache_storage.hybrid.pools import HostPoolGroup, HybridIndices, PoolEntry
    from hicache_storage.hybrid.ranks import RankGroup
    from hicache_storage.hybrid.storage_io.calls import StatsCounter, StorageCalls
    from hicache_storage.hybrid.storage_io.workers import StorageLink
    from hicache_storage.spec import PoolTransfer

MAX_ATTEMPTS = 3
"""Attempts to store the pages of a backup, the first included."""
RETRY_SECONDS = 0.25
"""Delay before the second attempt; doubled before each further one."""


@dataclass(frozen=True, slots=True)
class BackupResult:
    """Result of a backup to the storage, the same on every rank."""

    operation_id: int
    complete: bool
    """Whether every pool of every rank has stored its pages."""
    lost_from: int | None = None
    """First page before the span that the storage of some rank has lost.

    Counted from the start of the sequence; the storage has stored the span itself. None where
    nothing is missing, or the check failed.
    """


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

    def __init__(self, calls: StorageCalls, backup: BackupOperation) -> None:
        super().__init__()
        self._calls = calls
        self._backup = backup

    def perform(self) -> None:
        backup = self._backup
        # At least one round: a span may be a state alone, without pages of KV.
        for start in range(0, max(1, backup.pages), BATCH_PAGES):
            # Read without the lock: as long as the job runs, only this thread changes `stored`.
            parts = [(pool, pool.missing(start, start + BATCH_PAGES)) for pool in backup.pools]
            parts = [(pool, numbers) for pool, numbers in parts if numbers]
            with self.lock:
                if not self.begin_call():
                    return
            if parts:
                self._store(parts, backup.keys[: backup.prefix_pages + start])
        if backup.prefix_pages and backup.pages and backup.complete():
            self._look_up_prefix()

    def _look_up_prefix(self) -> None:
        """Look up whether the storage still has the prefix that the span needs."""
        pages = self._backup.prefix_pages
        before, own = self._backup.keys[:pages], self._backup.keys[pages:]
        found = self._leading_pages(before, ())
        # A storage that fails seems to have nothing. A missing prefix counts only if the storage
        # has the span that it has just stored.
        if found is None or (found < pages and not self._leading_pages(own, before)):
            return
        with self.lock:
            self._backup.found = found

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
            for pool, numbers in parts:
                for number, stored in zip(numbers, answer[pool.entry.name], strict=True):
                    pool.stored[number] = stored


class BackupOperation:
    """A backup in flight; its host pages stay reserved until it ends, even if freed.

    What a job changes, it changes under its lock.

    Args:
        keys: of the prefix, and then of the span.
    """

    def __init__(
        self, operation_id: int, pools: Sequence[PoolPages], keys: Sequence[str], prefix_pages: int
    ) -> None:
        self.operation_id = operation_id
        self.pools = pools
        self.keys = keys
        self.prefix_pages = prefix_pages
        self.pages = len(keys) - prefix_pages
        self.found = prefix_pages
        """Leading pages of the prefix that the storage has; all if unknown."""
        self.attempts = 0
        self.retry_at = 0.0
        self.job: BackupJob | None = None
        """The last attempt."""
        self.ended = False
        """Whether no further attempt is made."""

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

    def votes(self) -> tuple[int, ...]:
        """Return this rank's votes: ended, all stored, prefix pages found."""
        if not self.ended:
            return 0, 0, 0
        with nullcontext() if self.job is None else self.job.lock:
            return 1, int(self.complete()), self.found


class StorageBackups:
    """All backups from the host to the storage.

    All methods are called by the scheduler's thread, in the same order on every rank.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        rank_group: RankGroup,
        stats: StatsCounter,
        link: StorageLink,
    ) -> None:
        self._group = group
        self._rank_group = rank_group
        self._stats = stats
        self._link = link
        self._live: list[BackupOperation] = []
        self._last_id = 0

    def cancel(self) -> None:
        """Make no further attempt; `completed` returns what each backup has stored."""
        for operation in self._live:
            operation.cancel()

    def begin(
        self, host: HybridIndices, hashes: Sequence[str], prefix_hashes: Sequence[str] = ()
    ) -> int:
        """Queue a backup of host pages whose copies from the device have ended; returns its id.

        Without a storage it ends at once, and nothing is stored.

        Args:
            host: all pools; must not be written to before `completed` has returned the id.
            hashes: one for each page of KV.
            prefix_hashes: keys of all pages before them.

        Raises:
            InvalidTransferError: the span does not fit the pools or the hashes.
        """
        self._group.check(host)
        pages = host.tokens // self._group.page_size
        if pages != len(hashes):
            raise InvalidTransferError(
                f"hashes must be one for each of {pages} pages, got {len(hashes)}"
            )
        if not prefix_hashes and 0 in host.endpoints:
            raise InvalidTransferError(
                "prefix_hashes is empty: a state at the start of a sequence has no key"
            )
        self._last_id += 1
        keys, prefix_pages = (*prefix_hashes, *hashes), len(prefix_hashes)
        entries = self._group.entries.values()
        pools = [self._pool_pages(host, entry, keys, prefix_pages) for entry in entries]
        operation = BackupOperation(self._last_id, pools, keys, prefix_pages)
        self._live.append(operation)
        # The cache may evict the span before it is stored; its slots must not be reused by then.
        self._group.hold(self._group.owned(host), operation)
        self._submit(operation)
        return operation.operation_id

    def completed(self) -> list[BackupResult]:
        """Return backups that have ended on every rank, in the order of `begin`.

        A collective while there are any.
        """
        self._link.expire()
        if not self._live:
            return []
        for operation in self._live:
            self._advance(operation)
        agreed = reduce_each(self._rank_group, (operation.votes() for operation in self._live))
        results, remaining = list[BackupResult](), list[BackupOperation]()
        for operation, (ended, complete, found) in zip(self._live, agreed, strict=True):
            if not ended:
                remaining.append(operation)
                continue
            lost_from = found if complete and found < operation.prefix_pages else None
            results.append(BackupResult(operation.operation_id, bool(complete), lost_from))
            pages = [page for pool in operation.pools for page in pool.stored]
            self._stats.count(pages_backed_up=sum(pages), pages_dropped=len(pages) - sum(pages))
        self._live = remaining
        return results

    def _pool_pages(
        self, host: HybridIndices, entry: PoolEntry, keys: Sequence[str], prefix_pages: int
    ) -> PoolPages:
        ends = self._group.endpoints(host, entry.name)
        binding = self._link.binding
        # Pages that another rank writes count as stored here; that rank reports them.
        elsewhere = binding is not None and not binding.identity.is_writer(entry.name)
        pool_keys = [keys[prefix_pages + end - 1] for end in ends]
        rows = self._group.slots(host, entry.name).view(-1, entry.host_pool.page_size)
        return PoolPages(entry, pool_keys, rows, ends, [elsewhere] * len(ends))

    def _submit(self, operation: BackupOperation) -> None:
        binding = self._link.binding
        if binding is None or operation.complete():
            operation.ended = True
            return
        operation.attempts += 1
        operation.job = BackupJob(binding.calls, operation)
        binding.backup.submit(operation.job)

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
