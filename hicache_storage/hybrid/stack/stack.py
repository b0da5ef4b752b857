"""An assembled cache: its parts, the storage that comes and goes, and their common end."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self, cast

from hicache_storage.hybrid.alike import agreed
from hicache_storage.hybrid.attachment import StorageAttachedError
from hicache_storage.hybrid.stack.storage import storage_for
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from types import TracebackType

    from hicache_storage.hybrid.agreement import Agreement
    from hicache_storage.hybrid.controller import HybridCacheController
    from hicache_storage.hybrid.radix import HiMambaRadixCache
    from hicache_storage.hybrid.stack.config import StackConfig, StorageConfig
    from hicache_storage.hybrid.stack.parts import Parts
    from hicache_storage.pools import MambaDevicePool, MHADevicePool, MLADevicePool
    from hicache_storage.spec import HiCacheStorage

POLL_SECONDS = 0.0005


class HybridStack:
    """A cache on three tiers, made by `build_mamba_hybrid_stack` or `build_dsa_hybrid_stack`. To be closed.

    Called by one thread, the scheduler's; with several ranks in the same order on each.
    """

    def __init__(
        self,
        config: StackConfig,
        parts: Parts,
        controller: HybridCacheController,
        cache: HiMambaRadixCache,
        agreement: Agreement,
    ) -> None:
        self.config, self.controller, self.cache = config, controller, cache
        self.group = parts.group
        """The pools as one. Their slots are taken through `cache` and `controller`."""
        self.device_pools, self.host_pools = parts.device_pools, parts.host_pools
        self.compute = parts.compute
        """The stream whose kernels read and write the device pools."""
        self._agreement, self._closing = agreement, ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def own(self, closing: ExitStack) -> None:
        """Take over what `close` has to end."""
        self._closing = closing

    def attach(self, storage: HiCacheStorage | StorageConfig) -> None:
        """Use a storage from now on, on every rank or on none; the stack owns it. A collective.

        Raises:
            StorageAttachedError: there is one already; the new one is not touched.
            ConfigError: it keeps other bytes than the stack's; the message names the field. It is not touched.
            OtherRankError: another rank could not make its storage.
            HiCacheError: as `create_storage` and `HybridCacheController.attach` raise them; the stack is as before.
        """
        if self.controller.attached:
            raise StorageAttachedError("a storage is attached; detach it first")
        self.controller.attach(agreed(self._agreement, "storage", lambda: storage_for(self.config, storage)))
        self.cache.storage_changed()

    def detach(self) -> None:
        """Stop using the storage, and close it; what prefetches have brought is kept. Idempotent."""
        self.cache.end_prefetches()
        self.controller.detach()

    def drain(self, seconds: float) -> bool:
        """Poll until nothing is under way on any tier, for so long at most; whether that came. A collective."""
        end = time.monotonic() + seconds
        while not self.cache.idle():
            # The clocks of ranks differ, and the number of their collectives must not.
            if not self._agreement.minimum([int(time.monotonic() < end)])[0]:
                return False
            self.cache.poll()
            time.sleep(POLL_SECONDS)
        return True

    def close(self) -> None:
        """Drop what is queued, close the storage, and wait for copies that run; the pools are not used any more. Idempotent.

        Does not wait for backups: `drain` does.

        Raises:
            StreamFailedError: a copy has failed; everything is closed all the same.
        """
        self._closing.close()


class MambaHybridStack(HybridStack):
    """The cache of a model with attention and recurrent states."""

    @property
    def kv(self) -> MHADevicePool | MLADevicePool:
        """KV on the device, of the kind that `config.attention` describes."""
        return cast("MHADevicePool | MLADevicePool", self.device_pools[PoolName.KV])

    @property
    def states(self) -> MambaDevicePool:
        """States on the device: of requests that run, and of cached prefixes."""
        return cast("MambaDevicePool", self.device_pools[PoolName.MAMBA])


class DSAHybridStack(HybridStack):
    """The cache of a model with latent attention and an indexer."""

    @property
    def kv(self) -> MLADevicePool:
        """Latent rows on the device."""
        return cast("MLADevicePool", self.device_pools[PoolName.KV])
