"""Assembled cache: pools, controller, radix cache, and a replaceable storage."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from hicache_storage.hybrid.ranks import make_on_all_ranks
from hicache_storage.hybrid.stack.config import OPERATOR_FIELDS
from hicache_storage.hybrid.storage_io.workers import StorageAttachedError
from hicache_storage.plugins import create_storage
from hicache_storage.spec import ConfigError, HiCacheStorage, PoolName

if TYPE_CHECKING:
    from types import TracebackType

    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.pools import HostPoolGroup
    from hicache_storage.hybrid.radix import HiMambaRadixCache
    from hicache_storage.hybrid.stack.config import StackConfig, StorageConfig
    from hicache_storage.pools import (
        DevicePool,
        PagedHostPool,
    )
    from hicache_storage.transfer import PageTransfers, Stream

POLL_SECONDS = 0.0005
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
    ) -> None:
        self.config = config
        self.controller = controller
        self.cache = cache
        self.group = pools.group
        """All pools together. Their slots are taken through `cache` and `controller`."""
        self.device_pools = pools.device_pools
        self.host_pools = pools.host_pools
        self.transfers = pools.transfers
        """Copies between the pools, for another controller over them."""
        self.compute = pools.compute
        """The stream whose kernels read and write the device pools."""
        self._rank_group = controller.rank_group
        self._closing = ExitStack()

    @property
    def kv(self) -> DevicePool:
        """KV on the device, as `config.attention` describes it."""
        return self.device_pools[PoolName.KV]

    @property
    def states(self) -> DevicePool | None:
        """States on the device, of running requests and of cached prefixes.

        None for a model without them.
        """
        return self.device_pools.get(PoolName.MAMBA)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def own(self, closing: ExitStack) -> None:
        """Take over the resources that `close` releases."""
        self._closing = closing

    def attach(self, storage: HiCacheStorage | StorageConfig) -> None:
        """Use a storage from now on, on every rank or on none; the stack owns it.

        A collective.

        Raises:
            StorageAttachedError: there is one already; the new one is unchanged.
            ConfigError: it is for other bytes than the stack's; the message names the field. The
                storage is unchanged.
            OtherRankError: another rank could not make its storage.
            HiCacheError: as `create_storage` and `HybridCacheController.attach` raise them; the
                stack is as before.
        """
        if self.controller.attached:
            raise StorageAttachedError("a storage is attached; detach it first")
        made = make_on_all_ranks(
            self._rank_group, "storage", lambda: _make_storage(self.config, storage)
        )
        self.controller.attach(made)
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


def _make_storage(config: StackConfig, storage: HiCacheStorage | StorageConfig) -> HiCacheStorage:
    """Make a storage from its description, or check the identity of the caller's own.

    Raises:
        ConfigError: it has another page size or layout, or takes KV for replicated where it is not.
        DriverError: as `create_storage` raises it.
    """
    if isinstance(storage, HiCacheStorage):
        _check_identity(config, storage)
        return storage
    identity = config.identity(
        storage.model,
        kv_dtype=storage.kv_dtype,
        **{name: getattr(storage, name) for name in OPERATOR_FIELDS},
    )
    return create_storage(storage.driver, identity, storage.options, options=storage.layers)


def _check_identity(config: StackConfig, storage: HiCacheStorage) -> None:
    wanted = config.identity("any")
    # The other fields are the operator's; these describe the bytes of the pools.
    for name in ("page_size", "layout", "kv_replicated"):
        found, ours = getattr(storage.identity, name), getattr(wanted, name)
        if found != ours:
            raise ConfigError(
                f"the storage's identity has {name}={found!r}, the stack {ours!r}; create the "
                "storage with config.identity()"
            )
