"""`HybridCacheController`: pages of a hybrid model between device, host and storage, the same decisions on every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from hicache_storage.hybrid.agreement import SingleRank
from hicache_storage.hybrid.alike import check_alike
from hicache_storage.hybrid.attachment import Attachment, StorageAttachedError, bounded, close_quietly, register
from hicache_storage.hybrid.backup import Backups
from hicache_storage.hybrid.device_copies import DeviceCopies
from hicache_storage.hybrid.hashing import page_hashes
from hicache_storage.hybrid.parallel import ParallelConfig
from hicache_storage.hybrid.policies import PrefetchRules
from hicache_storage.hybrid.prefetch import Prefetcher
from hicache_storage.hybrid.stats import StatsCounter
from hicache_storage.hybrid.tiers import AgreedRoom
from hicache_storage.hybrid.transfers import PoolwiseTransfers
from hicache_storage.spec import ConfigError, StorageUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    import torch

    from hicache_storage.hybrid.agreement import Agreement
    from hicache_storage.hybrid.groups import HostPoolGroup
    from hicache_storage.hybrid.indices import BackupResult, HybridIndices, PrefetchResult
    from hicache_storage.hybrid.prefetch import PrefetchOperation
    from hicache_storage.hybrid.stats import ControllerStats
    from hicache_storage.hybrid.transfers import Arrivals, SpanTransfers
    from hicache_storage.spec import HiCacheStorage, PoolName

STORAGE_CALL_SECONDS = 30.0
ATTACH_SECONDS = 300.0
"""Registering a large host pool for RDMA takes minutes."""
STOP_SECONDS = 2.0


class HybridCacheController:
    """Copies spans of pages between device and host, and exchanges them with a storage.

    All methods are called by one thread, the scheduler's, and none waits for a copy or for the storage. Where several
    ranks serve a request together, each calls the same methods in the same order; those marked as a collective then
    return the same on all of them. A storage that raises, gives invalid answers or hangs makes misses on all ranks, and nothing
    else.

    Host slots belong to the caller from the moment a method returns them. Slots that a copy or a call of the storage
    still uses rest after `free_host`, and are not handed out before it is over.

    Args:
        group: the pools.
        transfers: copies all pools at once, such as `HybridTransfers` of which the entries have their engines; None copies
            each pool by itself.
        parallel: this rank.
        agreement: decides with the other ranks; may be left out for a single one.
        rules: which prefetches are begun and how long a request waits.
        bigram: page keys are of pairs of tokens, as for EAGLE; a `HiMambaRadixCache` above has the same in its config.
        storage_call_seconds: after which a call of the storage is left behind; more than the storage's own deadline.
        attach_seconds: how long opening a storage and registering the pools may take.
        stop_seconds: how long `detach` waits for each of the threads.

    Making one is a collective, too.

    Raises:
        ConfigError: `agreement` is not over as many ranks as `parallel` has, or another rank has other pools, slots or rules;
            the message names what differs. A pipeline stage without layers of a kind needs that pool all the same.
        OtherRankError: another rank has refused.
    """

    def __init__(
        self,
        group: HostPoolGroup,
        *,
        transfers: SpanTransfers | None = None,
        parallel: ParallelConfig | None = None,
        agreement: Agreement | None = None,
        rules: PrefetchRules | None = None,
        bigram: bool = False,
        storage_call_seconds: float = STORAGE_CALL_SECONDS,
        attach_seconds: float = ATTACH_SECONDS,
        stop_seconds: float = STOP_SECONDS,
    ) -> None:
        self.group = group
        self.parallel = parallel or ParallelConfig()
        agreement = agreement or SingleRank()
        rules = rules or PrefetchRules()
        check_alike(agreement, _decisive(group, rules, bigram), _refusal(agreement, self.parallel))
        self._agreement, self._bigram = agreement, bigram
        self._call_seconds, self._attach_seconds, self._stop_seconds = storage_call_seconds, attach_seconds, stop_seconds
        self._counter = StatsCounter()
        room = AgreedRoom(agreement)
        self._copies = DeviceCopies(group, transfers or PoolwiseTransfers(group), room, agreement, self._counter)
        self._prefetcher = Prefetcher(group, room, agreement, rules, self._counter)
        self._backups = Backups(group, agreement, self._counter)
        self._attachment: Attachment | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # Device and host ---------------------------------------------------------------------------------------------

    def write(self, transfers: HybridIndices, node_id: int, *, priority: int = 0) -> HybridIndices | None:
        """Take host slots for device pages and queue their copy; evicts once where the host is short. A collective.

        Args:
            transfers: on the device, all pools.
            node_id: told by `completed_writes`. The device pages may be given away once `start_writing` has begun the copy:
                whoever overwrites them calls `before_overwrite`.
            priority: smaller is copied earlier within a step.

        Returns:
            The host slots, to be read once the write is told to be over; None if there is no room on some rank.

        Raises:
            InvalidTransferError: the span does not fit the pools; nothing is taken.
        """
        return self._copies.write(transfers, node_id, priority)

    def start_writing(self) -> int:
        """Start all queued write-backs as one operation; returns the number of tokens.

        Raises:
            InvalidTransferError: a device slot is out of range; none of the queued spans is copied, nor told.
        """
        return self._copies.start_writing()

    def completed_writes(self) -> list[int]:
        """Node ids whose write-back is over on every rank, each told once. A collective while there are any."""
        return self._copies.completed_writes()

    def load(
        self,
        host: HybridIndices,
        node_ids: Sequence[int],
        *,
        into: Mapping[PoolName, torch.Tensor] | None = None,
        priority: int = 0,
    ) -> HybridIndices | None:
        """Take device slots for host pages and queue their copy; evicts once where the device is short. A collective.

        Args:
            host: on the host, all pools. A state may be loaded alone, with an empty anchor.
            node_ids: told by `completed_loads`; until then host and device pages must not be evicted.
            into: device slots of side pools that the caller has, such as a request's own state; the others are taken.
            priority: smaller is copied earlier within a step.

        Returns:
            The device slots; None if there is no room on some rank.

        Raises:
            InvalidTransferError: the span does not fit the pools, or `into` the span; nothing is taken.
        """
        return self._copies.load(host, node_ids, into or {}, priority)

    def start_loading(self) -> int:
        """Start all queued loads as one operation; returns the id for `layer_counter`, -1 if no load is under way.

        To be called in every step: its counter is also that of earlier loads whose pages requests of this step may use.

        Raises:
            InvalidTransferError: as for `start_writing`; also where two loads go into one device page.
        """
        return self._copies.start_loading()

    def layer_counter(self, consumer: int) -> Arrivals:
        """What a step's kernels wait for, layer by layer, before they use cached pages; waits for nothing for -1."""
        return self._copies.layer_counter(consumer)

    def completed_loads(self) -> list[int]:
        """Node ids whose load is over on every rank, each told once. A collective while there are any."""
        return self._copies.completed_loads()

    def before_overwrite(self, device: HybridIndices) -> None:
        """Let the compute stream wait for the copies that use device pages, before kernels overwrite them (rule ST-1)."""
        for name, entry in self.group.entries.items():
            slots = self.group.slots(device, name)
            if slots is not None and slots.numel():
                entry.copies.before_overwrite(slots)

    def free_host(self, host: HybridIndices) -> None:
        """Give back host slots of all pools.

        Raises:
            SlotError: of slots that were not handed out, or are given back twice; the other pools' are free.
        """
        self.group.free_host(host)

    # Storage -----------------------------------------------------------------------------------------------------

    @property
    def bigram(self) -> bool:
        """Whether page keys are of pairs of tokens."""
        return self._bigram

    @property
    def attached(self) -> bool:
        """Whether there is a storage."""
        return self._attachment is not None

    def attach(self, storage: HiCacheStorage) -> None:
        """Use a storage from now on, on every rank or on none. A collective.

        The controller owns the storage: `detach` closes it, and so does an attach that fails, which leaves the controller
        as it was.

        Args:
            storage: of this rank's identity; it is opened, and the pools are registered with it.

        Raises:
            StorageAttachedError: there is one already; the new one is not touched.
            StorageUnavailableError: it failed on another rank, or cannot be reached.
            HiCacheError: whatever the storage raised on this rank, such as `InvalidPoolError` for a pool.
        """
        if self._attachment is not None:
            raise StorageAttachedError("a storage is attached; detach it first")
        error = self._register(storage)
        if not self._agreement.minimum([int(error is None)])[0]:
            close_quietly(storage, self._stop_seconds, self._counter)
            raise error or StorageUnavailableError("another rank could not attach its storage")
        self._attachment = Attachment(storage, self.group, self._call_seconds, self._counter)
        self._prefetcher.attach(self._attachment)
        self._backups.attach(self._attachment)

    def detach(self) -> None:
        """Stop using the storage and close it. Prefetches deliver nothing more; backups end as far as they came.

        Returns within a few times `stop_seconds` whatever the storage does. Idempotent.
        """
        attachment, self._attachment = self._attachment, None
        self._prefetcher.detach()
        self._backups.detach()
        if attachment is not None:
            attachment.close(self._stop_seconds)

    def prefetch(
        self, request_id: str, tokens: Sequence[int], last_hash: str | None = None, prefix_hashes: Sequence[str] = ()
    ) -> PrefetchOperation | None:
        """Begin to fetch what storage has of a request's tokens; takes no memory before every rank agreed on the hit.

        Args:
            request_id: for logs.
            tokens: those after the prefix that is on the device or the host; a part of a page at the end is left out. With
                `bigram` one more than there are rows.
            last_hash: key of the page before them; at the start of a sequence the seed of its namespace, or None.
            prefix_hashes: keys of all pages before them.

        Returns:
            None if there is no storage, the span is too short, or too much is being fetched already.
        """
        return self._prefetcher.begin(
            request_id, page_hashes(tokens, self.group.page_size, prior=last_hash, bigram=self._bigram), prefix_hashes
        )

    def advance_prefetches(self) -> None:
        """Lead all prefetches on, to be called once a step; `PrefetchOperation.poll` does it for one. A collective."""
        self._prefetcher.advance()

    def terminate_prefetch(self, operation: PrefetchOperation) -> PrefetchResult:
        """End a prefetch, and hand over the longest prefix that is there on every rank, in all pools. A collective.

        Does not wait for calls that run: pages that they may still write to rest until they are over. A second call hands
        over nothing.
        """
        return self._prefetcher.terminate(operation)

    def write_storage(self, host: HybridIndices, hashes: Sequence[str], prefix_hashes: Sequence[str] = ()) -> int:
        """Queue a backup of host pages, whose copies from the device are over; returns its id.

        Args:
            host: all pools; not to be written to before the backup is told to be over.
            hashes: one for each page of the anchor.
            prefix_hashes: keys of all pages before them.

        Raises:
            InvalidTransferError: the span does not fit the pools or the hashes.
        """
        return self._backups.begin(host, hashes, prefix_hashes)

    def completed_backups(self) -> list[BackupResult]:
        """Backups that are over on every rank, each told once. A collective while there are any."""
        return self._backups.completed()

    # All of it ---------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Drop everything queued and on its way; the storage stays attached. Does not wait.

        Slots that prefetches hold are freed; those that were handed over stay the caller's.
        """
        self._prefetcher.abort()
        self._backups.reset()
        self._copies.reset()

    def close(self) -> None:
        """Reset, and detach. Copies that run are not waited for."""
        try:
            self.reset()
        finally:
            self.detach()

    def stats(self) -> ControllerStats:
        """A snapshot of this rank's counters."""
        return self._counter.snapshot()

    def _register(self, storage: HiCacheStorage) -> BaseException | None:
        try:
            self.parallel.check(storage.identity)
            bounded("attach", lambda: register(storage, self.group), self._attach_seconds)
        except BaseException as error:  # noqa: BLE001 - raised once the other ranks know
            return error
        return None


def _refusal(agreement: Agreement, parallel: ParallelConfig) -> ConfigError | None:
    if agreement.size == parallel.replica_size:
        return None
    return ConfigError(
        f"agreement is over {agreement.size} ranks, but parallel has {parallel.replica_size}; "
        "make it with GroupAgreement.of(parallel)"
    )


def _decisive(group: HostPoolGroup, rules: PrefetchRules, bigram: bool) -> dict[str, object]:
    """What ranks would come to other decisions by, or agree on vectors of other lengths."""
    entries = group.entries.values()
    return {
        "page size": group.page_size,
        "pools": [(entry.name, entry.hit_policy, entry.window_pages, entry.indices_from_pool) for entry in entries],
        "slots of host pools": [entry.host_pool.size for entry in entries],
        "slots of device pools": [getattr(entry.device_pool, "size", None) for entry in entries],
        "prefetch rules": rules,
        "kind of page keys": bigram,
    }
