"""The bridge for SGLang 0.5.23: a storage backend of its `dynamic` kind that serves every driver of this project.

```
--hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
  "backend_name": "hicache", "module_path": "hicache_storage.engines.sglang", "class_name": "SGLangBridge",
  "interface_v1": 1, "driver": "file", "driver_config": {"path": "/var/cache/hicache"}}'
```

The optional keys are those of `sglang_identity.BridgeConfig`.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, TypeVar

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as EngineStorage
from sglang.srt.mem_cache.hicache_storage import PoolName as EnginePoolName
from sglang.srt.mem_cache.hicache_storage import PoolTransferResult as EngineResult
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_model

from hicache_storage.engines.sglang_identity import bridge_config, check_engine, is_logical, storage_identity, why_unserved
from hicache_storage.layers.options import StorageOptions
from hicache_storage.plugins import create_storage
from hicache_storage.spec import (
    HiCacheError,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    InvalidPoolError,
    InvalidTransferError,
    PageGeometry,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageUnavailableError,
    UnknownPoolError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig as EngineConfig
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo as EngineExtraInfo
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer as EngineTransfer

    Moves = Callable[
        [Sequence[PoolTransfer], HiCacheStorageExtraInfo | None],
        dict[PoolName, list[bool]],
    ]

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")

MAX_REASONS = 64
"""Different reasons for refusing a call that are logged; what comes after them is only counted."""


class SGLangBridge(EngineStorage):
    """Serves SGLang's calls from a storage of this project.

    Attaching fails, cleanly and before SGLang has started its threads, where the configuration or the KV pool cannot be
    served. After that nothing is raised into the engine: a call that cannot be served is answered with `False` or 0,
    logged once for each reason, and counted in `refused_calls`.

    A side pool that cannot be served is not an error either, because SGLang does not undo an attach that fails at that
    point: the reason is logged, and the pool is answered with `False` and 0, which makes every hit that needs it 0.

    A KV pool without bytes of its own (the anchor of DeepSeek-V4) is stored as a mark for each page, written when SGLang
    backs the page up, after its side pools. Reading it is `True` at once, as there is nothing to deliver.

    SGLang's oldest interface (`get`, `set` and their batches, of copies) is refused.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`.
        kwargs: what SGLang passes to dynamic backends, nothing so far.

    Raises:
        ConfigError: the configuration cannot be served; the message says what to change.
    """

    def __init__(self, storage_config: EngineConfig, kwargs: dict[str, object] | None = None) -> None:
        self._engine = storage_config
        self._config = bridge_config(storage_config.extra_config)
        check_engine(storage_config)
        self._storage: HiCacheStorage | None = None
        self._logical = False
        self._unserved: dict[str, str] = {}
        self._meter = _Meter(enabled=storage_config.enable_storage_metrics)
        self._refusals = _Refusals()

    @property
    def storage(self) -> HiCacheStorage | None:
        """The storage behind the bridge; None before the KV pool is registered."""
        return self._storage

    @property
    def refused_calls(self) -> int:
        """Calls, or one pool's share of a call, that were answered `False` or 0 without asking the storage."""
        return self._refusals.count

    # Attaching ---------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        """Build the storage, now that the KV pool tells what the pages are.

        Raises:
            ConfigError: the driver refuses its configuration.
            InvalidPoolError: the KV pool cannot be served.
        """
        self.mem_pool_host = mem_pool_host
        _check_anchor(mem_pool_host)
        identity = storage_identity(self._engine, self._config, mem_pool_host, engine_kv_dtype=_engine_kv_dtype())
        seconds = self._config.deadline_seconds
        options = StorageOptions() if seconds is None else StorageOptions(deadline_seconds=seconds)
        storage = create_storage(self._config.driver, identity, self._config.driver_config, options=options)
        logical = is_logical(mem_pool_host)
        try:
            storage.register_mem_host_pool_v2(_Marks(mem_pool_host) if logical else mem_pool_host, PoolName.KV)
            _open(storage, self._config.driver)
        except BaseException:
            storage.close()
            raise
        previous, self._storage, self._logical = self._storage, storage, logical
        self._unserved = {}
        if previous is not None:
            previous.close()

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        """Make a side pool known. Never raises: a pool that cannot be served is logged and answered with `False`."""
        name = _text(host_pool_name)
        if name == PoolName.KV and host_pool is getattr(self, "mem_pool_host", None):
            return
        try:
            storage = self._attached()
            reason = why_unserved(self._engine, host_pool, name, storage.identity)
            if name == PoolName.KV:
                reason = "it is not the KV pool that the storage was attached with"
            if not reason:
                storage.register_mem_host_pool_v2(host_pool, name)
                self._unserved.pop(name, None)
                return
        except HiCacheError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("hicache bridge: registering pool %r failed", name)
            reason = repr(error)
        self._unserved[name] = reason
        logger.error(
            "hicache bridge: pool %r (%s) is not served, and nothing that needs it will be found: %s",
            name,
            type(host_pool).__name__,
            reason,
        )

    def on_host_pools_registered(self) -> None:
        """Pass it on. Never raises: SGLang does not undo an attach that fails here."""
        self._answer("on_host_pools_registered", lambda storage: storage.on_host_pools_registered(), None)

    # KV ----------------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: EngineExtraInfo | None = None) -> int:
        """Pages of the prefix of `keys` that are stored. 0 for an anchor without bytes: its side pools would decide."""
        if self._logical:
            return 0
        return self._exists("batch_exists", keys, (), extra_info).kv_hit_pages

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: EngineExtraInfo | None = None
    ) -> list[bool]:
        """Read KV pages; one answer for each key."""
        if self._logical:
            return [True] * len(keys)
        return self._move_kv("batch_get_v1", lambda storage: storage.batch_get_v2, keys, host_indices, extra_info)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: EngineExtraInfo | None = None
    ) -> list[bool]:
        """Store KV pages; one answer for each key."""
        return self._move_kv("batch_set_v1", lambda storage: storage.batch_set_v2, keys, host_indices, extra_info)

    # Several pools -----------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[EngineTransfer] | None = None,
        extra_info: EngineExtraInfo | None = None,
    ) -> EngineResult:
        """How long a prefix of `keys` all pools together can restore. Every pool asked about has a verdict, if only 0."""
        asked = pool_transfers or []
        result = self._exists("batch_exists_v2", keys, asked, extra_info)
        verdicts = {_engine_name(name): pages for name, pages in result.extra_pool_hit_pages.items()}
        for transfer in asked:
            verdicts.setdefault(_engine_name(transfer.name), 0)
        return EngineResult(result.kv_hit_pages, verdicts, result.restorable_prefix_pages)

    def batch_get_v2(
        self, transfers: list[EngineTransfer], extra_info: EngineExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of side pools; one answer for each key of each pool."""
        return self._move_pools("batch_get_v2", lambda storage: storage.batch_get_v2, transfers, extra_info)

    def batch_set_v2(
        self, transfers: list[EngineTransfer], extra_info: EngineExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of side pools; one answer for each key of each pool."""
        return self._move_pools("batch_set_v2", lambda storage: storage.batch_set_v2, transfers, extra_info)

    # Everything else ---------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove all pages of this identity's registered pools.

        Raises:
            UnsupportedOperationError: the driver cannot. SGLang then answers its caller that nothing was cleared; a
                return value it would ignore.
        """
        if self._storage is not None:
            self._storage.clear()

    def get_stats(self) -> StorageMetrics:
        """What KV moved since the last call: pages and GB/s of each batch."""
        return self._meter.drain()

    def close(self) -> None:
        """Close the storage. Idempotent; calls that come later are answered `False` and 0."""
        if self._storage is not None:
            self._storage.close()

    # The oldest interface ----------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Whether one KV page is stored."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> None:
        """Refused; always None."""
        self._refuse_v0("get")

    def batch_get(
        self, keys: list[str], target_locations: object = None, target_sizes: object = None
    ) -> list[torch.Tensor | None]:
        """Refused; None for each key."""
        self._refuse_v0("batch_get")
        return [None] * len(keys)

    def set(self, key: str, value: object = None, target_location: object = None, target_sizes: object = None) -> bool:
        """Refused; always `False`."""
        self._refuse_v0("set")
        return False

    def batch_set(
        self, keys: list[str], values: object = None, target_locations: object = None, target_sizes: object = None
    ) -> bool:
        """Refused; always `False`."""
        self._refuse_v0("batch_set")
        return False

    # How it is done ----------------------------------------------------------------------------------------------

    def _attached(self) -> HiCacheStorage:
        if self._storage is None:
            raise InvalidPoolError("the KV pool has not been registered")
        return self._storage

    def _answer(self, call: str, ask: Callable[[HiCacheStorage], AnswerT], otherwise: AnswerT, pool: str = "") -> AnswerT:
        """Ask the storage; whatever goes wrong, SystemExit included, must not end the engine's thread."""
        try:
            return ask(self._attached())
        except HiCacheError as error:
            self._refusals.note(call, pool, error)
        except (Exception, SystemExit) as error:
            self._refusals.note(call, pool, error, unexpected=True)
        return otherwise

    def _exists(
        self, call: str, keys: list[str], asked: Sequence[EngineTransfer], extra_info: EngineExtraInfo | None
    ) -> PoolTransferResult:
        def ask(storage: HiCacheStorage) -> PoolTransferResult:
            transfers = [_question(transfer) for transfer in asked]
            return storage.batch_exists_v2(keys, transfers, _extra(extra_info))

        result = self._answer(call, ask, PoolTransferResult(0))
        if result.kv_hit_pages <= len(keys):
            return result
        # SGLang would allocate memory for a hit that is longer than its question.
        self._refusals.note(call, "", InvalidTransferError(f"{result.kv_hit_pages} of {len(keys)} pages were reported"))
        return PoolTransferResult(0)

    def _move_kv(
        self,
        call: str,
        choose: Callable[[HiCacheStorage], Moves],
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: EngineExtraInfo | None,
    ) -> list[bool]:
        def ask(storage: HiCacheStorage) -> list[bool]:
            with self._meter.measured(call, storage):
                answers = choose(storage)([PoolTransfer(PoolName.KV, host_indices, keys=keys)], _extra(extra_info))
            return self._fitting(call, PoolName.KV, answers.get(PoolName.KV), len(keys))

        return self._answer(call, ask, [False] * len(keys), PoolName.KV)

    def _move_pools(
        self,
        call: str,
        choose: Callable[[HiCacheStorage], Moves],
        transfers: list[EngineTransfer],
        extra_info: EngineExtraInfo | None,
    ) -> dict[str, list[bool]]:
        results: dict[str, list[bool]] = {}
        shares: dict[str, list[PoolTransfer]] = {}
        for transfer in transfers:
            name = _engine_name(transfer.name)
            results.setdefault(name, []).extend([False] * len(transfer.keys or ()))
            converted = self._answer(call, lambda _, t=transfer: self._converted(t), None, name)  # type: ignore[misc]
            if converted is not None:
                shares.setdefault(name, []).append(converted)
            else:
                self._unserved_share(shares, name)

        def ask(storage: HiCacheStorage, names: Sequence[str]) -> dict[PoolName, list[bool]]:
            return choose(storage)([transfer for name in names for transfer in shares[name]], _extra(extra_info))

        raise NotImplementedError
