"""`TierStorage`: adapts a secondary tier of vLLM to the contract.

One storage is one replica of an engine: its scheduler, its CPU tier, and the tier under test. A row
of the CPU tier is a page, and holds the bytes of all workers; the pools of a case are KV cache
groups. What vLLM would load it looks up first, and it stores without asking.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from vllm.v1.kv_offload.base import make_offload_key

from hicache_conformance.interfaces.foreign_storage import load_class
from hicache_conformance.interfaces.mirror import Mirror
from hicache_conformance.interfaces.presence_storage import (
    PresenceStorage,
    element_type,
    pool_order,
)
from hicache_conformance.interfaces.vllm_tier.engine import (
    Rows,
    Scheduler,
    TierSpec,
    offloading_config,
)
from hicache_conformance.interfaces.vllm_tier.interface import HASHED
from hicache_storage.spec import PoolName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.kv_offload.base import OffloadKey

    from hicache_conformance.interfaces.presence_storage import Page
    from hicache_storage.spec import DriverConfig, StorageIdentity

LAYERS: Final = 4
"""Of a model whose identity names no range."""


class _GroupRows:
    """The rows that a pool's pages have."""

    def __init__(self, rows: Rows, first: int, page_bytes: int) -> None:
        self._rows = rows
        self.first = first
        self._page_bytes = page_bytes

    def content(self, page: int) -> bytes:
        """The bytes of a page."""
        return self._rows.content(self.first + page, self._page_bytes)

    def put(self, page: int, content: bytes) -> None:
        """Replace the bytes of a page."""
        self._rows.put(self.first + page, content)


class TierStorage(PresenceStorage):
    """A replica of vLLM with the tier attached."""

    def __init__(self, identity: StorageIdentity, config: DriverConfig) -> None:
        super().__init__(identity, config, HASHED)
        self._groups: dict[str, int] = {}
        self._memories: dict[str, _GroupRows] = {}
        self._rows: Rows | None = None
        # vLLM's own cache of lookups answers a request by what another that waits was told before;
        # with one at a time, an answer is about the store.
        self._asking = threading.Lock()

    def _attach(self) -> Scheduler:
        identity, names = self._identity, pool_order(self._pools)
        # KV is a group of every model.
        names = names if PoolName.KV in names else [PoolName.KV, *names]
        # With gaps, as where vLLM leaves out groups that are not prefix cacheable.
        self._groups = {name: 2 * place for place, name in enumerate(names)}
        geometry = self._pools[next(name for name in names if name in self._pools)].geometry
        workers = (
            1 if identity.kv_replicated else identity.tp_size * identity.pp_size * identity.cp_size
        )
        longest = max(pool.geometry.page_bytes for pool in self._pools.values())
        config = offloading_config(
            worker_bytes=-(-longest // workers),
            layers=[(self._groups[name], _layers(identity, name)) for name in names],
            model=identity.model,
            dtype=element_type(geometry, identity),
            tokens_per_block=identity.page_size,
            tp_size=identity.tp_size,
            pp_size=identity.pp_size,
            pcp_size=identity.cp_size,
            replicated=identity.kv_replicated,
            layout="LBHNC" if _is_usual(geometry.layout, identity) else "BLHNC",
        )
        pages = {
            name: pool.geometry.size // pool.geometry.page_size
            for name, pool in self._pools.items()
        }
        # One row length for all groups, as vLLM 0.32 has it.
        rows = self._rows = Rows(sum(pages.values()), config.worker_kv_bytes_per_block * workers)
        first = 0
        for name, pool in self._pools.items():
            memory = self._memories[name] = _GroupRows(rows, first, pool.geometry.page_bytes)
            self._mirrors[name] = Mirror(pool, memory)
            first += pages[name]
        return Scheduler(self._entry(), rows, TierSpec(config=config))

    def _entry(self) -> dict[str, Any]:
        if not self._setup.target:
            return {"type": self._setup.backend, **self._options}
        # Here, because vLLM reports what cannot be imported less clearly.
        load_class(self._setup.target)
        module, _, name = self._setup.target.partition(":")
        return {"type": name, "module_path": module, **self._options}

    def _detach(self, driver: Scheduler) -> None:
        try:
            driver.close()
        finally:
            if self._rows is not None:
                self._rows.release()

    # The data path
    # ----------------------------------------------------------------------------------------------

    def _look_up(self, pool: str, keys: Sequence[bytes], prefix: Sequence[bytes]) -> list[bool]:
        named = [make_offload_key(key, self._groups[pool]) for key in keys]
        scheduler: Scheduler = self._attached()
        request = scheduler.request(named, self._tokens(), len(prefix))
        with self._asking:
            return scheduler.look_up(named, request)

    def _load(self, pages: Sequence[Page], prefix: Sequence[bytes]) -> list[bool]:
        scheduler: Scheduler = self._attached()
        keys, chunks = self._placed(pages)
        request = scheduler.request(keys, self._tokens(), len(prefix))
        with self._asking:
            return scheduler.load(keys, chunks, request)

    def _store(self, pages: Sequence[Page], prefix: Sequence[bytes]) -> list[bool]:
        scheduler: Scheduler = self._attached()
        keys, chunks = self._placed(pages)
        request = scheduler.request(keys, self._tokens(), len(prefix))
        # vLLM is told of a job as a whole.
        return [scheduler.store(keys, chunks, request).success] * len(keys)

    def _placed(self, pages: Sequence[Page]) -> tuple[list[OffloadKey], list[int]]:
        return (
            [make_offload_key(page.key, self._groups[page.pool]) for page in pages],
            [self._memories[page.pool].first + page.number for page in pages],
        )

    def _tokens(self) -> int:
        return self._identity.page_size


def _layers(identity: StorageIdentity, pool: str) -> list[str]:
    start = identity.layer_start or 0
    end = identity.layer_end or start + LAYERS
    return [f"{pool}.layers.{layer}" for layer in range(start, end)]


def _is_usual(layout: str, identity: StorageIdentity) -> bool:
    """Return whether the case has left the layout at its default."""
    asked = identity.layout if layout == "page_first" else layout
    return asked == "page_first"
