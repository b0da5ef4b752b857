"""Removals: pages that have ceased to exist, for listeners such as routers and directories."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from hicache_storage.spec.errors import InvalidTransferError

if TYPE_CHECKING:
    from hicache_storage.spec.transfers import PoolName


class RemovalReason(StrEnum):
    """Cause of a removal, as far as the store knows it."""

    EVICTED = "evicted"
    DELETED = "deleted"
    CLEARED = "cleared"
    DAMAGED = "damaged"
    """Found damaged, and removed or hidden (rule GET-7)."""
    UNKNOWN = "unknown"


class RemovalScope(StrEnum):
    """Scope of the removals that a storage reports."""

    NONE = "none"
    PROCESS = "process"
    """Those that storages of this process have made."""
    STORE = "store"
    """Also those of other processes and nodes, and of the store itself."""


@dataclass(frozen=True, slots=True)
class Removal:
    """One page that has ceased to exist."""

    pool: PoolName
    key: str
    reason: RemovalReason = RemovalReason.UNKNOWN
    seconds: float = 0.0
    """Time of the removal in seconds since 1970; 0 if it is not known."""
    by: str = ""
    """Process or server that has removed the page; empty if it is not known."""


@dataclass(frozen=True, slots=True)
class Removals:
    """Answer of `removals()`."""

    removed: list[Removal]
    """In the order in which the storage has learned of them."""
    cursor: int
    """Argument of the next call."""
    lost: bool = False
    """Removals may be missing: compare what is known with `batch_present`."""


def check_cursor(since: object) -> None:
    """Check the argument `since` of `removals()`.

    Raises:
        InvalidTransferError: it is neither None nor an integer.
    """
    if since is not None and type(since) is not int:
        raise InvalidTransferError(
            f"since must be the cursor of an earlier answer, or None, got {since!r:.80}"
        )


def no_removals(since: int | None) -> Removals:
    """Answer in the place of a call that has not reached the store: the next one catches up.

    Raises:
        InvalidTransferError: the cursor is none.
    """
    check_cursor(since)
    # No storage hands out 0, so that a watch which has not begun is answered with `lost` later.
    return Removals([], since or 0)
