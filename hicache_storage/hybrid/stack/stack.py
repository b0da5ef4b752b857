"""Assembled cache of a hybrid model, built from one config: on every rank, or on none."""

from __future__ import annotations

import time
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import torch
import torch.distributed as dist

from hicache_storage.hybrid.controller import HybridCacheController
from hicache_storage.hybrid.pools import HostPoolGroup, PoolEntry
from hicache_storage.hybrid.radix import HiMambaRadixCache
from hicache_storage.hybrid.ranks import (
    SingleRank,
    TorchRankGroup,
    check_consistent,
    make_on_all_ranks,
)
from hicache_storage.hybrid.storage_io.workers import StorageAttachedError
from hicache_storage.pools import DevicePool, PagedHostPool
from hicache_storage.spec import ConfigError, PoolName
from hicache_storage.transfer import (
    CudaDevice,
    CudaStream,
    PageTransfers,
    PoolPair,
    StreamSimulator,
)

if TYPE_CHECKING:
    from hicache_storage.hybrid.ranks import RankGroup
    from hicache_storage.hybrid.stack.config import StackConfig
    from hicache_storage.spec import HiCacheStorage, StorageIdentity
    from hicache_storage.transfer import Device, Stream

SHARED_FIELDS: Final = ("model", "kv_dtype", "revision", "tenant", "adapter", "salt")
"""Fields of an identity that are equal on all ranks."""
POLL_SECONDS: Final = 0.0005
"""Time between two polls of `drain`."""


@dataclass(frozen=True, slots=True, eq=False)
class StackPools:
    """Pools of a stack by name, and the copies between them."""

    device_pools: dict[PoolName, DevicePool]
    host_pools: dict[PoolName, PagedHostPool]
    compute: Stream
    transfers: PageTransfers
    group: HostPoolGroup


class HybridStack:
    """Cache on three tiers. To be closed.

    Made by `build_hybrid_stack`.
    Called by one thread, the scheduler's; with several ranks in the same order on each.
    """

    def __init__(
        self,
        config: StackConfig,
        pools: StackPools,
        controller: HybridCacheController,
        cache: HiMambaRadixCache,
        closing: ExitStack,
    ) -> None:
        self.config = config
        self.controller = controller
        self.cache = cache
        self.device_pools = pools.device_pools
        """By name: KV, and those of states and of an indexer where the model has them."""
        self.host_pools = pools.host_pools
        self.transfers = pools.transfers
        """Copies between the pools, for another controller over them."""
        self.compute = pools.compute
        """The stream whose kernels read and write the device pools."""
        self._rank_group = controller.rank_group
        self._closing = closing

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def attach(self, storage: HiCacheStorage) -> None:
        """Use a storage from now on, on every rank or on none; the stack owns it.

        A collective.

        Args:
            storage: of an identity that `config.identity` has made.

        Raises:
            StorageAttachedError: there is one already; the new one is unchanged.
            ConfigError: it is for other bytes than the stack's, or ranks have storages of different
                models or tenants; the message names the field. The storage is unchanged.
            OtherRankError: another rank's storage is for other bytes than its stack's.
            HiCacheError: as `HybridCacheController.attach` raises it; the stack is as before.
        """
        if self.controller.attached:
            raise StorageAttachedError("a storage is attached; detach it first")
        identity = storage.identity
        check_consistent(
            self._rank_group,
            {name: getattr(identity, name) for name in SHARED_FIELDS},
            _identity_error(self.config, identity),
        )
        self.controller.attach(storage)
        # The new storage has none of the pages that were stored in the former one.
        self.cache.storage_changed()

    def detach(self) -> None:
        """Stop using the storage, and close it; pages that have arrived are kept.

        Idempotent.
        """
        # Before `detach`, which drops the pages of running prefetches.
        self.cache.end_prefetches()
        self.controller.detach()

    def drain(self, seconds: float) -> bool:
        """Poll until no operation is running on any tier, or the time is over.

        A collective.

        Returns:
            Whether all operations have ended.
        """
        end = time.monotonic() + seconds
        while not self.cache.idle():
            # The clocks of ranks differ, and the number of their collectives must not.
            if not self._rank_group.all_reduce_min([int(time.monotonic() < end)])[0]:
                return False
            self.cache.poll()
            time.sleep(POLL_SECONDS)
        return True

    def close(self) -> None:
        """Drop queued operations, close the storage, and wait for running copies.

        Idempotent.

        The pools are not used afterwards. Does not wait for backups: `drain` does.

        Raises:
            StreamFailedError: a copy has failed; everything is closed all the same.
        """
        self._closing.close()


def build_hybrid_stack(
    config: StackConfig,
    *,
    rank_group: RankGroup | None = None,
    streams: tuple[Device, Stream] | None = None,
) -> HybridStack:
    """Build the cache of a model. A collective.

    A config that differs between ranks where it must not is refused on all of them before memory is
    allocated.

    Args:
        rank_group: the ranks of the replica; None makes a group over torch.distributed if there are
            several.
        streams: the device that makes the streams of the copies, and the model's stream, both owned
            by the caller. None means the current CUDA stream of `config.device`, or on the CPU a
            simulator that the stack closes.

    Raises:
        ConfigError: the device does not exist, or ranks are not those of torch.distributed or have
            different configs; the message names the field. Nothing is open then.
        OtherRankError: another rank refuses its config, or fails.
        HiCacheError: as pools raise it; nothing is open then.
    """
    with ExitStack() as failing:
        # Closes what the stack will own.
        closing = failing.enter_context(ExitStack())
        group = rank_group or _make_rank_group(config, closing)
        check_consistent(group, _rank_invariants(config))
        pools = make_on_all_ranks(group, "pools", lambda: build_pools(config, streams, closing))
        controller = HybridCacheController(
            pools.group,
            transfers=pools.transfers,
            parallel=config.parallel,
            rank_group=group,
            rules=config.prefetch,
            storage_call_seconds=config.storage_call_seconds,
            stop_seconds=config.stop_seconds,
        )
        closing.callback(controller.close)
        cache = HiMambaRadixCache(
            controller,
            checkpoint_grid=config.checkpoint_grid,
            write_policy=config.write_policy,
        )
        stack = HybridStack(config, pools, controller, cache, closing)
        failing.pop_all()
    return stack


def _make_rank_group(config: StackConfig, closing: ExitStack) -> RankGroup:
    if config.parallel.replica_size == 1:
        return SingleRank()
    if not dist.is_initialized():
        raise ConfigError(
            f"parallel has {config.parallel.replica_size} ranks that serve together, and "
            "torch.distributed is not initialized; call init_process_group before, or pass "
            "rank_group"
        )
    rank_group = TorchRankGroup.of(config.parallel)
    closing.callback(rank_group.close)
    return rank_group


def _own_streams(place: torch.device, closing: ExitStack) -> tuple[Device, Stream]:
    if place.type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"device is {str(place)!r}, and CUDA is not available here; pass 'cpu'"
            )
        return CudaDevice(place), CudaStream(torch.cuda.current_stream(place))
    simulator = StreamSimulator()
    closing.callback(simulator.close)
    return simulator, simulator.stream("compute")


def _rank_invariants(config: StackConfig) -> dict[str, object]:
    """Return the values that must be equal on all ranks, as messages name them."""
    return {
        # Not their geometries: stages of a pipeline have different layers.
        "pools": sorted(config.pools),
        "page_size": config.page_size,
        "checkpoint_grid": config.checkpoint_grid,
        "device_tokens": config.device_tokens,
        "device_states": config.device_states,
        "host_tokens": config.host_tokens,
        "host_states": config.host_states,
        "layout": config.layout,
        "write_policy": config.write_policy,
        "prefetch": config.prefetch,
        "kv_replicated": config.attention.replicated,
    }


def build_pools(
    config: StackConfig, streams: tuple[Device, Stream] | None, closing: ExitStack
) -> StackPools:
    """Allocate all pools, and make the engine that copies between them.

    Args:
        streams: the device of the copies' streams, and the model's stream; None to make them.
        closing: waits for running copies.

    Raises:
        ConfigError: the device does not exist.
        InvalidPoolError: there is not enough memory, or the device cannot access it.
    """
    place = torch.device(config.device)
    # Before the context below, whose error does not say which devices there are.
    device, compute = streams or _own_streams(place, closing)
    device_pools: dict[PoolName, DevicePool] = {}
    host_pools: dict[PoolName, PagedHostPool] = {}
    # CUDA locks host memory in the context of the current device.
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        for name, geometry in config.pools.items():
            on_device, on_host, page_size = config.slots_of(name)
            device_pools[name] = DevicePool(
                geometry, size=on_device, page_size=page_size, device=config.device
            )
            host_pools[name] = PagedHostPool(
                geometry,
                size=on_host,
                page_size=page_size,
                layout=config.layout_of(name),
            )
        pairs = {str(name): PoolPair(device_pools[name], host_pools[name]) for name in host_pools}
        transfers = PageTransfers(device, compute, pairs)
    # `ExitStack` closes in reverse: first the controller, then running copies are waited for, then
    # the simulator that runs them is closed.
    closing.callback(transfers.close)
    group = HostPoolGroup(
        PoolEntry(
            name=name,
            host_pool=host_pool,
            host_slots=transfers.host_slots[name],
            # An indexer has one key for each row of KV, so it needs no slots of its own.
            device_pool=None if name is PoolName.INDEXER else device_pools[name],
        )
        for name, host_pool in host_pools.items()
    )
    return StackPools(device_pools, host_pools, compute, transfers, group)


def _identity_error(config: StackConfig, identity: StorageIdentity) -> ConfigError | None:
    """Error where a storage is for other bytes than those of the pools."""
    wanted = config.identity("any")
    # The other fields are the operator's, or checked by the controller.
    for name in ("page_size", "layout", "kv_replicated"):
        found, ours = getattr(identity, name), getattr(wanted, name)
        if found != ours:
            return ConfigError(
                f"the storage's identity has {name}={found!r}, the stack {ours!r}; create the "
                "storage with config.identity()"
            )
    return None
