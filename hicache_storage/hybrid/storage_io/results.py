"""Results of prefetches and backups."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hicache_storage.hybrid.pools.indices import HybridIndices


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


@dataclass(frozen=True, slots=True)
class BackupResult:
    """Result of a backup to the storage, the same on every rank."""

    operation_id: int
    stored_pages: int
    """Leading pages of the span that every pool of every rank has stored.

    All side pages that end in them are stored as well.
    """
    complete: bool
    """Whether that is all of them."""
    lost_from: int | None = None
    """First page before the span that the storage of some rank has lost.

    Counted from the start of the sequence; the storage has stored the span itself. None where
    nothing is missing, or the check failed.
    """
