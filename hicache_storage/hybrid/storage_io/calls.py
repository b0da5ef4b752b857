"""Checked calls of a storage, and the counters: errors and invalid answers are counted misses."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from hicache_storage.spec import HiCacheStorageExtraInfo, PoolName, PoolTransfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from hicache_storage.hybrid.pools import HostPoolGroup, PoolEntry
    from hicache_storage.spec import HiCacheStorage
    from hicache_storage.transfer.streams import Completion

logger = logging.getLogger(__name__)

# As many as SGLang moves in one call (its STORAGE_BATCH_SIZE).
BATCH_PAGES = 128
"""Pages of KV that one call moves."""

_RAISED = object()
"""Result of a call that raised."""


@dataclass(slots=True)
class ControllerStats:
    """Counters since the controller was made.

    A snapshot where `HybridCacheController.stats` returns it.
    """

    tokens_written_back: int = 0
    tokens_loaded: int = 0
    writes_without_room: int = 0
    loads_without_room: int = 0
    prefetches: int = 0
    """Started; declined ones are counted by the next two fields."""
    prefetches_below_threshold: int = 0
    """Declined because the span is too short."""
    prefetches_rate_limited: int = 0
    tokens_prefetched: int = 0
    """Delivered to the caller."""
    tokens_hit: int = 0
    """Tokens of the longest prefixes that all ranks could restore."""
    tokens_without_room: int = 0
    """Tokens of `tokens_hit` that were cut off for lack of host memory."""
    pages_backed_up: int = 0
    """Pages of all pools: stored by this rank, found in storage, or written by another rank."""
    pages_dropped: int = 0
    """Pages of all pools that were not stored in the last attempt."""
    backup_retries: int = 0
    storage_errors: int = 0
    """Calls of the storage that raised."""
    invalid_answers: int = 0
    """Answers of the storage with a wrong type or length."""
    abandoned_calls: int = 0
    """Calls of the storage that did not return in time."""
    stuck_calls: int = 0
    """Abandoned calls that have not returned yet; their pages stay reserved."""


class StatsCounter:
    """Thread-safe `ControllerStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = ControllerStats()
        self._stuck: list[Completion] = []

    def count(self, **amounts: int) -> None:
        """Add amounts to counters, by their names."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._stats, name, getattr(self._stats, name) + amount)

    def abandoned(self, job: Completion) -> None:
        """Count an abandoned call, which is stuck until the job has ended."""
        self.count(abandoned_calls=1)
        with self._lock:
            self._stuck = [*self._still_stuck(), job]

    def snapshot(self) -> ControllerStats:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._stats, stuck_calls=len(self._still_stuck()))

    def _still_stuck(self) -> list[Completion]:
        return [job for job in self._stuck if not job.query()]


class StorageCalls:
    """Data path of one storage, called by the worker threads. Raises nothing.

    Args:
        storage: the pools of `group` are registered with it.
        call_seconds: deadline that is passed to the storage.
        stats: counts the failures.
    """

    def __init__(
        self,
        storage: HiCacheStorage,
        group: HostPoolGroup,
        call_seconds: float,
        stats: StatsCounter,
    ) -> None:
        self._storage = storage
        self._group = group
        self._call_seconds = call_seconds
        self._stats = stats
        # Written by three threads without a lock: a race costs a log line of the wrong level.
        self._failing = False

    def restorable(
        self, keys: Sequence[str], prefix_keys: Sequence[str], request_id: str | None = None
    ) -> list[int]:
        """Return the endpoints of `keys`, in pages, that all pools can restore."""
        return self._exists(keys, self._group.entries.values(), prefix_keys, request_id)

    def leading_pages(self, keys: Sequence[str], prefix_keys: Sequence[str]) -> int:
        """Count the leading pages of `keys` that exist in all pools, whatever their states."""
        entries = [entry for entry in self._group.entries.values() if not entry.has_states]
        return max(self._exists(keys, entries, prefix_keys), default=0)

    def read(
        self,
        transfers: Sequence[PoolTransfer],
        prefix_keys: Sequence[str],
        request_id: str | None = None,
    ) -> dict[PoolName, list[bool]]:
        """Read pages; returns by pool, for each page, whether it was delivered."""
        info = self._info(prefix_keys, request_id)
        return self._pages(transfers, lambda: self._storage.batch_get_v2(transfers, info))

    def write(
        self, transfers: Sequence[PoolTransfer], prefix_keys: Sequence[str]
    ) -> dict[PoolName, list[bool]]:
        """Store pages; returns by pool, for each page, whether it is stored."""
        info = self._info(prefix_keys)
        return self._pages(transfers, lambda: self._storage.batch_set_v2(transfers, info))

    def _exists(
        self,
        keys: Sequence[str],
        entries: Iterable[PoolEntry],
        prefix_keys: Sequence[str],
        request_id: str | None = None,
    ) -> list[int]:
        info = self._info(prefix_keys, request_id)
        transfers = [
            PoolTransfer(
                entry.name,
                # A prefix needs one state: of these keys only the number counts.
                keys=list(keys[-1:] if entry.has_states else keys),
                hit_policy=entry.hit_policy,
            )
            for entry in entries
            # KV is asked about through the chain itself.
            if entry.name != PoolName.KV
        ]
        answer = self._call(lambda: self._storage.batch_exists_v2(list(keys), transfers, info))
        if answer is _RAISED:
            return []
        answer = getattr(answer, "restorable_prefix_pages", answer)
        ends, pages = _items(answer), len(keys)
        # An endpoint beyond the keys would make the caller allocate pages that nobody asked for.
        # `type`, because a bool is an `int`.
        if ends is None or not all(type(end) is int and 1 <= end <= pages for end in ends):
            self._count_invalid(f"endpoints of {pages} pages", answer)
            return []
        self._failing = False
        return sorted(set(cast("list[int]", ends)))

    def _info(
        self, prefix_keys: Sequence[str], request_id: str | None = None
    ) -> HiCacheStorageExtraInfo:
        return HiCacheStorageExtraInfo(list(prefix_keys), self._call_seconds, request_id)

    def _call(self, call: Callable[[], object]) -> object:
        try:
            return call()
        except BaseException as error:  # noqa: BLE001 - also the SystemExit of a driver that calls sys.exit
            self._stats.count(storage_errors=1)
            self._log_fault(f"the storage raised {type(error).__name__}: {error}")
            return _RAISED

    def _pages(
        self, transfers: Sequence[PoolTransfer], call: Callable[[], object]
    ) -> dict[PoolName, list[bool]]:
        """Make a call and return its answer by pool.

        Pages of a pool with an invalid answer count as missing.
        """
        answer = self._call(call)
        given = cast("dict[object, object]", answer) if isinstance(answer, dict) else None
        checked: dict[PoolName, list[bool]] = {}
        for transfer in transfers:
            pages, count = _items(given and given.get(transfer.name)), len(transfer.keys or ())
            if (
                pages is not None
                and len(pages) == count
                and all(isinstance(page, bool) for page in pages)
            ):
                checked[transfer.name] = cast("list[bool]", pages)
                self._failing = False
                continue
            # Only this pool's pages: the answers for the others are usable.
            checked[transfer.name] = [False] * count
            if answer is not _RAISED:
                self._count_invalid(f"{count} pages of {transfer.name!r}", pages)
        return checked

    def _count_invalid(self, asked: str, answer: object) -> None:
        self._stats.count(invalid_answers=1)
        self._log_fault(f"the storage was asked for {asked} and answered {answer!r:.80}")

    def _log_fault(self, message: str) -> None:
        """Log the first of consecutive faults as a warning, the others for debugging."""
        logger.log(
            logging.DEBUG if self._failing else logging.WARNING, "%s; counted as a miss", message
        )
        self._failing = True


def _items(answer: object) -> list[object] | None:
    """Return the items of a list or tuple; None for any other type."""
    return list(cast("Sequence[object]", answer)) if isinstance(answer, (list, tuple)) else None


def page_transfer(entry: PoolEntry, keys: Sequence[str], slots: torch.Tensor) -> PoolTransfer:
    """Return the transfer of one pool; `slots` are whole pages, one for each key."""
    return PoolTransfer(
        entry.name, host_indices=slots, keys=list(keys), hit_policy=entry.hit_policy
    )
