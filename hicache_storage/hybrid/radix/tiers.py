"""What the radix cache asks of the tiers below it: device slots, and the controller of copies and storage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from hicache_storage.hybrid.indices import BackupResult, HybridIndices, PrefetchResult
    from hicache_storage.spec import PoolName


class DeviceSlots(Protocol):
    """The slots of a device pool."""

    @property
    def page_size(self) -> int: ...

    @property
    def size(self) -> int:
        """Slots in the pool."""
        ...

    def alloc(self, count: int) -> torch.Tensor | None:
        """Take so many slots, whole pages: int64 on the CPU. None if fewer are free."""
        ...

    def free(self, indices: torch.Tensor) -> int: ...

    def available_size(self) -> int: ...


class PoolTier(Protocol):
    """All pools of one tier."""

    def on_shortage(self, name: PoolName, evict: Callable[[int], object]) -> None:
        """Say who frees so many slots of a pool, or what it can; asked by calls that take slots, on every rank alike."""
        ...


class PoolGroup(Protocol):
    """All pools."""

    @property
    def host(self) -> PoolTier: ...

    @property
    def device(self) -> PoolTier: ...


class Prefetch(Protocol):
    """A prefetch under way."""

    @property
    def done(self) -> bool:
        """Whether nothing more is to come."""
        ...

    @property
    def ready(self) -> bool:
        """Whether it is over, by its own end or by the prefetch policy; agreed by `advance_prefetches`."""
        ...


Operation = TypeVar("Operation", bound=Prefetch)


class TierController(Protocol[Operation]):
    """The part of the hybrid controller that the cache uses, all from the scheduler's thread; no call waits for a copy."""

    @property
    def group(self) -> PoolGroup:
        """The pools of both tiers."""
        ...

    @property
    def attached(self) -> bool:
        """Whether there is a storage now."""
        ...

    @property
    def bigram(self) -> bool:
        """Whether it makes page keys of pairs of tokens."""
        ...

    def write(self, transfers: HybridIndices, node_id: int) -> HybridIndices | None:
        """Take host slots for device slots and enqueue the copies; None, with nothing taken, if there is no room."""
        ...

    def start_writing(self) -> object:
        """Launch the copies to the host that were enqueued."""
        ...

    def completed_writes(self) -> list[int]:
        """The ids of writes that every rank has finished since the last call, in the order of `write`."""
        ...

    def load(
        self, host: HybridIndices, node_ids: Sequence[int], *, into: Mapping[PoolName, torch.Tensor] | None = None
    ) -> HybridIndices | None:
        """Take device slots for host slots, those in `into` excepted, and enqueue the copies; None if there is no room."""
        ...

    def start_loading(self) -> int:
        """Launch the loads that were enqueued, layer by layer; the id of the counter of all under way, -1 for none."""
        ...

    def completed_loads(self) -> list[int]:
        """The ids of loads that every rank has finished since the last call."""
        ...

    def before_overwrite(self, device: HybridIndices) -> None:
        """Let the compute stream wait for the copies that still use device slots."""
        ...

    def free_host(self, host: HybridIndices) -> None:
        """Give host slots back; those that a copy still uses are handed out when it is done."""
        ...

    def prefetch(
        self, request_id: str, tokens: Sequence[int], last_hash: str | None = None, prefix_hashes: Sequence[str] = ()
    ) -> Operation | None:
        """Ask the storage for the pages of `tokens`, which follow the page of `last_hash`; None if it is declined."""
        ...

    def advance_prefetches(self) -> None:
        """Lead all prefetches on by what has come since."""
        ...

    def terminate_prefetch(self, operation: Operation) -> PrefetchResult:
        """End a prefetch; what it brought belongs to the caller."""
        ...

    def write_storage(self, host: HybridIndices, hashes: Sequence[str], prefix_hashes: Sequence[str] = ()) -> int:
        """Store host pages under their hashes; returns the id of the operation, until whose end they stay as they are."""
        ...

    def completed_backups(self) -> list[BackupResult]:
        """The operations of `write_storage` that have ended on every rank since the last call."""
        ...
