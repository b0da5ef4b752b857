"""The storage backend that SGLang loads."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, TypeVar

import torch
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage as EngineStorage
from sglang.srt.mem_cache.hicache_storage import PoolName as EnginePoolName
from sglang.srt.mem_cache.hicache_storage import PoolTransferResult as EngineResult
from sglang.srt.observability.metrics_collector import StorageMetrics
from sglang.srt.runtime_context import get_model, get_parallel, get_server_args, get_serving

from hicache_storage.engines.bridge_storage import RefusedCalls, open_storage
from hicache_storage.engines.engine_pool import EnginePool
from hicache_storage.engines.sglang.identity import (
    bridge_config,
    check_engine,
    is_logical,
    model_variant,
    rank_labels,
    rank_number,
    storage_identity,
    unserved_reason,
)
from hicache_storage.observability.exporter import Exporter
from hicache_storage.pools.adapter import page_access
from hicache_storage.spec import (
    HiCacheError,
    HiCacheStorage,
    HiCacheStorageExtraInfo,
    InvalidPoolError,
    InvalidTransferError,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
    StorageUnavailableError,
    UnknownPoolError,
    UnsupportedOperationError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig as EngineConfig
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo as EngineExtraInfo
    from sglang.srt.mem_cache.hicache_storage import PoolTransfer as EngineTransfer

logger = logging.getLogger(__name__)

AnswerT = TypeVar("AnswerT")


class SGLangBridge(EngineStorage):
    """Adapter: serves SGLang's calls from a storage of this project.

    Attaching fails, cleanly and before SGLang has started its threads, where the configuration or
    the KV pool cannot be served. After that nothing is raised into the engine: a call that cannot
    be served is answered with `False` or 0, logged once for each reason, and counted in
    `refused_calls`.

    A side pool that cannot be served is no error either, because SGLang does not undo an attach
    that fails at that point: the reason is logged, and the pool is answered with `False` and 0, so
    that a hit that needs it is 0.

    A KV pool without bytes of its own (the anchor of DeepSeek-V4) is stored as a placeholder for
    each page, written when SGLang backs the page up, after its side pools. Reading it is `True` at
    once, as there is nothing to deliver.

    SGLang's oldest interface (`get`, `set` and their batches, of copies) is refused.

    Args:
        storage_config: SGLang's `HiCacheStorageConfig`.
        kwargs: what SGLang passes to dynamic backends; nothing so far.

    Raises:
        ConfigError: the configuration cannot be served; the message says what to change.
    """

    def __init__(
        self, storage_config: EngineConfig, kwargs: dict[str, object] | None = None
    ) -> None:
        self._engine = storage_config
        self._config = bridge_config(storage_config.extra_config)
        check_engine(storage_config)
        self.storage: HiCacheStorage | None = None
        """The storage behind the bridge; None before the KV pool is registered."""
        self._exporter: Exporter | None = None
        self._anchor: object = None
        self._logical = False
        self._unserved: dict[str, str] = {}
        self._weights = ""
        self._uncleared = ""
        """Reason why the last clear failed; empty after one that succeeded."""
        self._refusals = RefusedCalls("SGLang")
        self._page_bytes = 0
        """Of KV."""
        self._moved = StorageMetrics() if storage_config.enable_storage_metrics else None
        """KV batches since SGLang asked last; None where it does not ask."""

    @property
    def refused_calls(self) -> int:
        """Number of calls that could not be served, and were answered with `False` or 0."""
        return self._refusals.count

    # Attaching and detaching
    # -------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: object) -> None:
        """Create the storage: the KV pool has the geometry of the pages.

        An unreachable store is no error: the storage retries, and answers misses until then. With
        an error, one rank would be attached and another not.

        Raises:
            ConfigError: the driver refuses its configuration.
            InvalidPoolError: the KV pool cannot be served.
        """
        weights = _weight_version()
        identity = storage_identity(
            self._engine,
            self._config,
            mem_pool_host,
            engine_kv_dtype=_engine_kv_dtype(),
            weight_version=weights,
            # Empty where the options are not known.
            variant=model_variant(_told(get_model, None)),
            kv_heads=_kv_heads() if self._engine.tp_lcm_size else 0,
        )
        logical = is_logical(mem_pool_host)
        pool = _placeholders(mem_pool_host) if logical else mem_pool_host
        metrics = self._engine.enable_storage_metrics or bool(self._config.metrics_port)
        storage = open_storage(
            self._config, identity, {PoolName.KV: pool}, complete=False, metrics=metrics
        )
        previous = self.storage
        self.storage = storage
        self._anchor = mem_pool_host
        self._logical = logical
        self._page_bytes = page_access(pool).geometry.page_bytes
        self._unserved = {}
        self._weights = weights
        self._uncleared = ""
        self._export(storage)
        if previous is not None:
            # Last: calls that begin meanwhile already use the new storage.
            previous.close()

    def _export(self, storage: HiCacheStorage) -> None:
        if self._exporter is not None:
            # First: the new exporter listens at the same port.
            self._exporter.close()
        if self._config.metrics_port:
            replica = _replica()
            port = self._config.metrics_port + rank_number(self._engine, replica)
            self._exporter = Exporter(
                storage, self._config.metrics_host, port, rank_labels(self._engine, replica)
            )

    def register_mem_host_pool_v2(self, host_pool: object, host_pool_name: str) -> None:
        """Register a side pool; never raises.

        A pool that cannot be served is logged, and answered with `False` and 0.
        """
        name = _text(host_pool_name)
        if name == PoolName.KV and host_pool is self._anchor:
            return
        try:
            storage = self._attached()
            reason = unserved_reason(self._engine, host_pool, name, storage.identity)
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
        kind = type(host_pool).__name__
        logger.error(
            "hicache bridge: pool %r (%s) is not served, and no hit that needs it is: %s",
            name,
            kind,
            reason,
        )

    def on_host_pools_registered(self) -> None:
        """Forward the call. Never raises: SGLang does not undo an attach that fails here."""
        self._answer(
            "on_host_pools_registered", lambda storage: storage.on_host_pools_registered(), None
        )

    def clear(self) -> None:
        """Remove all pages of this identity's registered pools.

        SGLang 0.5.23 logs what is raised here and answers its own caller with success all the same.
        So after a clear that may not have happened nothing is served until one has, or until the
        storage is attached anew: the pages that should be gone are no hits.

        Raises:
            UnsupportedOperationError: the driver does not implement it; stored pages are served as
                before.
            StorageUnavailableError: the clear failed, or its outcome is unknown.
            InvalidPoolError: the KV pool has not been registered.
        """
        if self.storage is None:
            raise InvalidPoolError("the KV pool has not been registered")
        try:
            self.storage.clear()
        except UnsupportedOperationError:
            raise
        except BaseException as error:
            self._uncleared = f"{type(error).__name__}: {error}"
            logger.error(
                "hicache bridge: not cleared; nothing is served until a clear has succeeded: %s",
                error,
            )
            raise
        self._uncleared = ""

    def close(self) -> None:
        """Close the storage. Idempotent; calls that come later are answered with `False` and 0."""
        if self._exporter is not None:
            self._exporter.close()
        if self.storage is not None:
            self.storage.close()

    def get_stats(self) -> StorageMetrics | None:
        """Return pages and GB/s of each KV batch since the last call.

        None without `enable_storage_metrics`.
        """
        moved = self._moved
        if moved is not None:
            self._moved = StorageMetrics()
        return moved

    # KV
    # ----------------------------------------------------------------------------------------------------------

    def batch_exists(self, keys: list[str], extra_info: EngineExtraInfo | None = None) -> int:
        """Count the pages of the stored prefix of `keys`.

        0 for an anchor without bytes, whose side pools would decide.
        """
        return self._exists("batch_exists", keys, (), extra_info).kv_hit_pages

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: EngineExtraInfo | None = None
    ) -> list[bool]:
        """Read KV pages; one answer for each key."""
        if self._logical:
            return [True] * len(keys)
        return self._move_kv("batch_get_v1", keys, host_indices, extra_info, writes=False)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: EngineExtraInfo | None = None
    ) -> list[bool]:
        """Store KV pages; one answer for each key."""
        return self._move_kv("batch_set_v1", keys, host_indices, extra_info, writes=True)

    # Several pools
    # -----------------------------------------------------------------------------------------------

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[EngineTransfer] | None = None,
        extra_info: EngineExtraInfo | None = None,
    ) -> EngineResult:
        """Count the pages of the prefix of `keys` that all pools can restore.

        Every pool in the call has a verdict, if only 0.
        """
        asked = pool_transfers or []
        result = self._exists("batch_exists_v2", keys, asked, extra_info)
        # SGLang takes a pool without a verdict for unknown.
        verdicts = {
            _engine_name(name): 0
            for name in (PoolName.KV, *(_text(transfer.name) for transfer in asked))
        }
        verdicts |= {
            _engine_name(name): pages for name, pages in result.extra_pool_hit_pages.items()
        }
        return EngineResult(result.kv_hit_pages, verdicts, result.restorable_prefix_pages)

    def batch_get_v2(
        self, transfers: list[EngineTransfer], extra_info: EngineExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Read pages of side pools; one answer for each key of each pool."""
        return self._move_pools("batch_get_v2", transfers, extra_info, writes=False)

    def batch_set_v2(
        self, transfers: list[EngineTransfer], extra_info: EngineExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        """Store pages of side pools; one answer for each key of each pool."""
        return self._move_pools("batch_set_v2", transfers, extra_info, writes=True)

    # The oldest interface
    # ----------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        """Return True if one KV page is stored."""
        return self.batch_exists([key]) == 1

    def get(self, *_: object, **__: object) -> None:
        """Refused; always None."""
        return self._refuse_oldest("get", None)

    def batch_get(self, keys: list[str], *_: object, **__: object) -> list[torch.Tensor | None]:
        """Refused; None for each key."""
        return self._refuse_oldest("batch_get", [None] * len(keys))

    def set(self, *_: object, **__: object) -> bool:
        """Refused; always `False`."""
        return self._refuse_oldest("set", False)

    def batch_set(self, *_: object, **__: object) -> bool:
        """Refused; always `False`."""
        return self._refuse_oldest("batch_set", False)

    # Implementation
    # ----------------------------------------------------------------------------------------------

    def _attached(self) -> HiCacheStorage:
        if self.storage is None:
            raise InvalidPoolError("the KV pool has not been registered")
        # SGLang flushes what it holds itself when its weights are updated, and leaves its storage
        # as it is.
        if (weights := _weight_version()) != self._weights:
            raise StorageUnavailableError(
                f"the pages are of weights {self._weights!r}, and the engine's are {weights!r} by "
                "now; detach and attach the storage"
            )
        if self._uncleared:
            raise StorageUnavailableError(
                f"the last clear did not happen ({self._uncleared}); clear again, or detach and "
                "attach the storage"
            )
        return self.storage

    def _answer(
        self,
        call: str,
        ask: Callable[[HiCacheStorage], AnswerT],
        otherwise: AnswerT,
        pool: str = "",
    ) -> AnswerT:
        """Call the storage.

        No failure may end the engine's thread, not even a driver's `sys.exit`.
        """
        try:
            return ask(self._attached())
        except HiCacheError as error:
            self._refusals.note(call, pool, error)
        except (Exception, SystemExit) as error:
            self._refusals.note(call, pool, error)
            logger.debug("hicache bridge: %s failed", call, exc_info=error)
        return otherwise

    def _refuse_oldest(self, call: str, answer: AnswerT) -> AnswerT:
        reason = 'the bridge does not serve copies; set "interface_v1": 1 in the storage backend\'s extra config'
        self._refusals.note(call, PoolName.KV, UnsupportedOperationError(reason))
        return answer

    def _exists(
        self,
        call: str,
        keys: list[str],
        asked: Sequence[EngineTransfer],
        extra_info: EngineExtraInfo | None,
    ) -> PoolTransferResult:
        def ask(storage: HiCacheStorage) -> PoolTransferResult:
            if self._logical and not asked:
                return PoolTransferResult(0)
            result = storage.batch_exists_v2(
                keys, [_converted(transfer) for transfer in asked], _extra(extra_info)
            )
            if result.kv_hit_pages > len(keys):
                # SGLang would allocate memory for a hit that is longer than its list of keys.
                raise InvalidTransferError(
                    f"{result.kv_hit_pages} pages were reported for {len(keys)} keys"
                )
            return result

        return self._answer(call, ask, PoolTransferResult(0))

    def _move_kv(
        self,
        call: str,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: EngineExtraInfo | None,
        *,
        writes: bool,
    ) -> list[bool]:
        def ask(storage: HiCacheStorage) -> list[bool]:
            transfers = [PoolTransfer(PoolName.KV, host_indices, keys=keys)]
            started = time.perf_counter()
            answers = _move(storage, transfers, extra_info, writes=writes)
            seconds = time.perf_counter() - started
            answer = _fitting(answers, PoolName.KV, len(keys))
            self._measure(answer.count(True), seconds, writes=writes)
            return answer

        return self._answer(call, ask, [False] * len(keys), PoolName.KV)

    def _measure(self, pages: int, seconds: float, *, writes: bool) -> None:
        """Keep a batch for `get_stats`, unless it moved nothing."""
        # Another thread may replace it meanwhile.
        moved = self._moved
        if moved is None or not pages or seconds <= 0:
            return
        counts, speeds = (
            (moved.backup_pgs, moved.backup_bandwidth)
            if writes
            else (moved.prefetch_pgs, moved.prefetch_bandwidth)
        )
        counts.append(pages)
        speeds.append(pages * self._page_bytes / 1e9 / seconds)

    def _move_pools(
        self,
        call: str,
        transfers: list[EngineTransfer],
        extra_info: EngineExtraInfo | None,
        *,
        writes: bool,
    ) -> dict[str, list[bool]]:
        shares: dict[str, list[EngineTransfer]] = {}
        for transfer in transfers:
            shares.setdefault(_text(transfer.name), []).append(transfer)
        pages = {
            name: sum(len(transfer.keys or ()) for transfer in share)
            for name, share in shares.items()
        }

        def ask(storage: HiCacheStorage) -> dict[str, list[bool]]:
            converted = [_converted(transfer) for name in served for transfer in shares[name]]
            answers = _move(storage, converted, extra_info, writes=writes)
            return {name: _fitting(answers, name, pages[name]) for name in served}

        answers = {name: [False] * pages[name] for name in shares}
        served = [name for name in shares if name not in self._unserved]
        for name in shares.keys() - served:
            self._refusals.note(call, name, UnknownPoolError(self._unserved[name]))
        if served:
            answers |= self._answer(call, ask, dict[str, list[bool]](), ", ".join(served))
        return {_engine_name(name): answer for name, answer in answers.items()}


def _move(
    storage: HiCacheStorage,
    transfers: Sequence[PoolTransfer],
    extra_info: EngineExtraInfo | None,
    *,
    writes: bool,
) -> dict[PoolName, list[bool]]:
    move = storage.batch_set_v2 if writes else storage.batch_get_v2
    return move(transfers, _extra(extra_info))


def _fitting(answers: dict[PoolName, list[bool]], name: str, pages: int) -> list[bool]:
    """Return a pool's answers, and check their number: SGLang reads one for each of its keys."""
    answer = list(answers[PoolName(name)])
    if len(answer) != pages:
        raise InvalidTransferError(f"{len(answer)} answers for {pages} keys of pool {name!r}")
    return answer


def _converted(transfer: EngineTransfer) -> PoolTransfer:
    source = transfer.indices_from_pool
    return PoolTransfer(
        PoolName(_text(transfer.name)),
        transfer.host_indices,
        keys=transfer.keys,
        hit_policy=PoolHitPolicy(_text(transfer.hit_policy)),
        indices_from_pool=None if source is None else PoolName(_text(source)),
        block_pages=transfer.block_pages,
        group_pages=transfer.group_pages,
    )


def _extra(extra_info: EngineExtraInfo | None) -> HiCacheStorageExtraInfo | None:
    if extra_info is None:
        return None
    session = (extra_info.extra_info or {}).get("session_id")
    return HiCacheStorageExtraInfo(
        extra_info.prefix_keys, request_id=session if isinstance(session, str) else None
    )


def _text(name: str) -> str:
    """Return the value of SGLang's enum members, whose `str()` is another text."""
    return str.__str__(name)


def _engine_name(name: str) -> str:
    try:
        return EnginePoolName(_text(name))
    except ValueError:
        return name


def _placeholders(anchor: object) -> EnginePool:
    """Return a pool of one byte a page, with the slots of an anchor that has no bytes.

    The contract counts hits in KV pages, and an anchor that only allocates slots has none to store.
    The byte records that the page has been backed up; its side pools decide whether it is
    restorable.
    """
    page_size = int(getattr(anchor, "page_size", 0))
    return EnginePool(
        memoryview(bytearray(b"\x01" * (int(getattr(anchor, "size", 0)) // page_size))),
        stride=1,
        page_bytes=1,
        layout=str(getattr(anchor, "layout", "")),
        page_size=page_size,
    )


def _told(read: Callable[[], AnswerT], otherwise: AnswerT) -> AnswerT:
    """Return what SGLang's runtime context has; `otherwise` where it is not set up, as in tests."""
    try:
        return read()
    except (ValueError, RuntimeError):
        return otherwise


def _weight_version() -> str:
    """Return the engine's `--weight-version`, or that of the last update; empty if unknown."""
    return _told(lambda: get_serving().weight_version, "")


def _engine_kv_dtype() -> str:
    """Return the engine's `--kv-cache-dtype`; empty if unknown or ambiguous."""
    # On ROCm the same name stands for two encodings, depending on the card.
    return "" if torch.version.hip else _told(lambda: get_model().kv_cache_dtype, "")


def _kv_heads() -> int:
    """Return the number of KV heads of the model; 0 if unknown."""
    try:
        return ModelConfig.from_server_args(get_server_args()).get_total_num_kv_heads()
    except Exception as error:  # noqa: BLE001 - of the engine's own configuration, whatever fails in it
        logger.debug("hicache bridge: the number of KV heads is not known: %s", error)
        return 0


def _replica() -> int:
    """Return the number of this replica of plain DP.

    SGLang's storage configuration has 0 for all of them.
    """
    return int(_told(lambda: get_parallel().dp_rank or 0, 0))
