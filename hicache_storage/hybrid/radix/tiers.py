"""Interfaces of the radix cache to device slots and the hybrid controller."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from hicache_storage.hybrid.pools.indices import HybridIndices
    from hicache_storage.hybrid.storage_io.results import BackupResult, PrefetchResult
    from hicache_storage.spec import PoolName


class DeviceSlots(Protocol):
    """Slot allocator of a device pool."""

    @property
    def page_size(self) -> int: ...

    @property
    def size(self) -> int:
        """Number of slots in the pool."""
        ...

    def alloc(self, count: int) -> torch.Tensor | None:
        """Take so many slots, whole pages: int64 on the CPU. None if fewer are free."""
        ...

    def free(self, indices: torch.Tensor) -> int: ...

    def available_size(self) -> int: ...


class ShortageHooks(Protocol):
    """The pools of one tier, which call an evictor when slots are short."""

    def on_shortage(self, name: PoolName, evict: Callable[[int], object]) -> None:
        """Register the evictor of a pool: it frees so many slots, or as many as it can.

        Calls that take slots call it, on every rank alike.
        """
        ...


class PoolTiers(Protocol):
    """All pools, by tier."""

    @property
    def host(self) -> ShortageHooks: ...

    @property
    def device(self) -> ShortageHooks: ...


class Prefetch(Protocol):
    """A running prefetch."""

    @property
    def done(self) -> bool:
        """True once nothing more will arrive."""
        ...

    @property
    def ready(self) -> bool:
        """True if it is done, or the policy does not wait for it.

        Agreed by `advance_prefetches`.
        """
        ...


Operation = TypeVar("Operation", bound=Prefetch)


class TierController(Protocol[Operation]):
    """The hybrid controller, as far as the cache uses it.

    Called by the scheduler's thread; no call waits for a copy.
    """

    @property
    def group(self) -> PoolTiers:
        """The pools of both tiers."""
        ...

    @property
    def attached(self) -> bool:
        """True if a storage is attached."""
        ...

    @property
    def bigram(self) -> bool:
        """True if page keys are of pairs of tokens."""
        ...

    def write(self, transfers: HybridIndices, node_id: int) -> HybridIndices | None:
        """Take host slots for device slots and queue the copies; None if too few are free."""
        ...

    def start_writing(self) -> object:
        """Launch the queued copies to the host."""
        ...

    def completed_writes(self) -> list[int]:
        """Return the ids of writes that have ended on every rank, each once, in order."""
        ...

    def load(
        self,
        host: HybridIndices,
        node_ids: Sequence[int],
        *,
        into: Mapping[PoolName, torch.Tensor] | None = None,
    ) -> HybridIndices | None:
        """Take device slots for host slots, except those in `into`, and queue the copies.

        None if too few are free.
        """
        ...

    def start_loading(self) -> int:
        """Launch the queued loads.

        Returns the id of the counter of all running loads, -1 for none.
        """
        ...

    def completed_loads(self) -> list[int]:
        """Return the ids of loads that have ended on every rank, each once."""
        ...

    def before_overwrite(self, device: HybridIndices) -> None:
        """Let the compute stream wait for the copies that still use device slots."""
        ...

    def free_host(self, host: HybridIndices) -> None:
        """Free host slots; those that a copy still uses stay reserved until it ends."""
        ...

    def prefetch(
        self,
        request_id: str,
        tokens: Sequence[int],
        last_hash: str | None = None,
        prefix_hashes: Sequence[str] = (),
    ) -> Operation | None:
        """Start to fetch the pages of `tokens`, which follow the page of `last_hash`.

        None if it is declined.
        """
        ...

    def advance_prefetches(self) -> None:
        """Advance all prefetches."""
        ...

    def terminate_prefetch(self, operation: Operation) -> PrefetchResult:
        """End a prefetch; the slots of the result belong to the caller."""
        ...

    def write_storage(
        self, host: HybridIndices, hashes: Sequence[str], prefix_hashes: Sequence[str] = ()
    ) -> int:
        """Store host pages under their hashes; returns the id of the operation.

        The pages must not change until it ends.
        """
        ...

    def completed_backups(self) -> list[BackupResult]:
        """Return the backups that have ended on every rank, each once."""
        ...
