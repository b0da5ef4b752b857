"""What a stack is built from: the model's geometry, sizes of the tiers, place, ranks, policies and storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from types import NoneType
from typing import TYPE_CHECKING

import torch

from hicache_storage.hybrid.parallel import ParallelConfig
from hicache_storage.hybrid.policies import PrefetchRules, WritePolicy
from hicache_storage.hybrid.radix import checkpoint_grid
from hicache_storage.hybrid.stack.checks import check_count, check_pages, choice, named, slots_in
from hicache_storage.hybrid.stack.geometry import AttentionGeometry, IndexerGeometry, MambaGeometry, MLAGeometry
from hicache_storage.layers.options import StorageOptions
from hicache_storage.spec import ConfigError, PoolName, StorageIdentity
from hicache_storage.transfer import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hicache_storage.hybrid.stack.geometry import PoolGeometry
    from hicache_storage.transfer import Backend

FALLBACK_LAYOUT = "page_first"
"""What a pool beside KV gets where it does not have KV's layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """A storage by the name of its driver, and whose bytes it keeps.

    Raises:
        ConfigError: a name is missing.
    """

    driver: str
    """As `hicache drivers` lists it."""
    model: str
    """What the operator tells it apart by; with the fields below, part of the `StorageIdentity`."""
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """The driver's."""
    layers: StorageOptions = field(default_factory=StorageOptions)
    """What the SDK puts around the driver."""
    kv_dtype: str | None = None
    """Logical element type of KV where the pool's does not say it, as for fp8 kept in bytes."""
    revision: str = ""
    tenant: str = ""
    adapter: str = ""
    salt: str = ""

    def __post_init__(self) -> None:
        for name in ("driver", "model"):
            if not getattr(self, name):
                raise ConfigError(f"storage.{name} must not be empty")


@dataclass(frozen=True, kw_only=True)
class StackConfig(ABC):
    """What all stacks have; to be used through `MambaStackConfig` or `DSAStackConfig`.

    Raises:
        ConfigError: a field is out of range, or contradicts another; the message names it and the fix.
    """

    page_size: int
    """Tokens per page."""
    device_tokens: int
    """KV slots on the device, whole pages."""
    host_tokens: int | str
    """KV slots on the host, whole pages; or the memory for KV and what lies in its slots, such as "64GiB"."""
    layout: str = "page_first"
    """Of KV on the host; pools beside it have the same, or `page_first` where they do not know it."""
    device: str = "cuda"
    """A torch device; on "cpu" copies run on the stream simulator."""
    backend: Backend = "direct"
    """How copies are made, see `PageTransfers`."""
    pin_memory: bool = True
    """Lock host memory for CUDA copies, where CUDA is available."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """This rank."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch: PrefetchRules = field(default_factory=PrefetchRules)
    bigram: bool = False
    """Whether page keys are of pairs of tokens, as for EAGLE; see `RadixCacheConfig`."""
    storage: StorageConfig | None = None
    """Attached when the stack is built; None for none yet."""
    storage_call_seconds: float = 30.0
    """After which a call of the storage is left behind; more than the storage's own deadline."""
    attach_seconds: float = 300.0
    """How long opening a storage and registering the pools may take."""
    stop_seconds: float = 2.0
    """How long closing waits for each thread that calls the storage."""

    def __post_init__(self) -> None:
        for name, kind in self._kinds().items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be {named(kind)}, got {getattr(self, name)!r:.80}")
        object.__setattr__(self, "write_policy", choice("write_policy", WritePolicy, self.write_policy))
        for name in ("storage_call_seconds", "attach_seconds", "stop_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        self._check_choices()
        check_count("page_size", self.page_size)
        check_pages("device_tokens", self.device_tokens, self.page_size)
        slots_in("host_tokens", self.host_tokens, self.page_size, self._kv_page_bytes())
        self._check_model()

    @property
    @abstractmethod
    def pools(self) -> dict[PoolName, PoolGeometry]:
        """What each pool holds."""

    @property
    def checkpoint_grid(self) -> int | None:
        """Tokens between the places where states are kept; None for a model without states."""
        return None

    def slots_of(self, pool: PoolName) -> tuple[int, int, int]:
        """A pool's slots on the device and on the host, and how many are a page."""
        on_host = slots_in("host_tokens", self.host_tokens, self.page_size, self._kv_page_bytes())
        return self.device_tokens, on_host, self.page_size

    def is_sized_by_memory(self, pool: PoolName) -> bool:
        """Whether the size of a host pool was given as memory, so that its slots depend on this rank's layers."""
        return isinstance(self.host_tokens, str)

    def layout_of(self, pool: PoolName) -> str:
        """A pool's layout on the host."""
        return self.layout if self.layout in self.pools[pool].layouts else FALLBACK_LAYOUT

    def identity(
        self, model: str, *, kv_dtype: str | None = None, revision: str = "", tenant: str = "", adapter: str = "", salt: str = ""
    ) -> StorageIdentity:
        """Whose bytes a storage of this stack has to keep: for a storage that is not made from a `StorageConfig`."""
        attention = self._attention()
        base = StorageIdentity(
            model=model, kv_dtype=kv_dtype or str(attention.dtype).removeprefix("torch."), page_size=self.page_size,
            layout=self.layout, revision=revision, tenant=tenant, adapter=adapter, salt=salt, kv_replicated=attention.replicated,
        )  # fmt: skip
        return self.parallel.identity(base)

    @abstractmethod
    def _attention(self) -> AttentionGeometry | MLAGeometry:
        """What KV is like."""

    @abstractmethod
    def _check_model(self) -> None:
        """Refuse what does not fit together."""

    def _kinds(self) -> dict[str, tuple[type, ...]]:
        """Fields that are descriptions themselves, and of which kinds."""
        return {"parallel": (ParallelConfig,), "prefetch": (PrefetchRules,), "storage": (StorageConfig, NoneType)}

    def _kv_page_bytes(self) -> int:
        """Bytes of a page of KV and of what lies in its slots."""
        return self._attention().page_bytes(self.page_size)

    def _check_choices(self) -> None:
        layouts = self._attention().layouts
        for name, value, allowed in (("layout", self.layout, layouts), ("backend", self.backend, BACKENDS)):
            if value not in allowed:
                raise ConfigError(f"{name} must be one of {', '.join(allowed)}; got {value!r}")
        try:
            kind = torch.device(self.device).type
        except RuntimeError as error:
            raise ConfigError(f"device must name a torch device such as 'cuda:0' or 'cpu', got {self.device!r}") from error
        if kind not in ("cuda", "cpu"):
            raise ConfigError(f"device must be of kind cuda or cpu, got {self.device!r}")


@dataclass(frozen=True, kw_only=True)
class MambaStackConfig(StackConfig):
    """A model with attention layers and layers with recurrent states.

    Raises:
        ConfigError: a field is out of range, or contradicts another; the message names it and the fix.
    """

    attention: AttentionGeometry | MLAGeometry
    mamba: MambaGeometry
    device_states: int
    """State slots on the device: two for each request that runs, and those that are kept."""
    host_states: int | str
    """State slots on the host, or the memory for them, such as "16GiB"."""
    checkpoint_interval: int = 256
    """Tokens between the states that are kept. The grid is the least common multiple with the page and the state chunk."""

    @property
    def pools(self) -> dict[PoolName, PoolGeometry]:
        return {PoolName.KV: self.attention, PoolName.MAMBA: self.mamba}

    @property
    def checkpoint_grid(self) -> int:
        return checkpoint_grid(self.page_size, self.mamba.state_chunk, self.checkpoint_interval)

    def slots_of(self, pool: PoolName) -> tuple[int, int, int]:
        if pool != PoolName.MAMBA:
            return super().slots_of(pool)
        return self.device_states, slots_in("host_states", self.host_states, 1, self.mamba.page_bytes(1)), 1

    def is_sized_by_memory(self, pool: PoolName) -> bool:
        return isinstance(self.host_states if pool == PoolName.MAMBA else self.host_tokens, str)

    def _attention(self) -> AttentionGeometry | MLAGeometry:
        return self.attention

    def _kinds(self) -> dict[str, tuple[type, ...]]:
        return {**super()._kinds(), "attention": (AttentionGeometry, MLAGeometry), "mamba": (MambaGeometry,)}

    def _check_model(self) -> None:
        check_count("device_states", self.device_states)
        check_count("checkpoint_interval", self.checkpoint_interval)
        slots_in("host_states", self.host_states, 1, self.mamba.page_bytes(1))
        both = sorted(set(self.attention.layers) & set(self.mamba.layers))
        if both:
            raise ConfigError(f"mamba.layers and attention.layers both have {both}; a layer is of one kind")


@dataclass(frozen=True, kw_only=True)
class DSAStackConfig(StackConfig):
    """A model with sparse attention: latent attention, and an indexer that selects the tokens. It has no states.

    Raises:
        ConfigError: a field is out of range, or contradicts another; the message names it and the fix.
    """

    attention: MLAGeometry
    indexer: IndexerGeometry

    @property
    def pools(self) -> dict[PoolName, PoolGeometry]:
        return {PoolName.KV: self.attention, PoolName.INDEXER: self.indexer}

    def _attention(self) -> MLAGeometry:
        return self.attention

    def _kv_page_bytes(self) -> int:
        return self.attention.page_bytes(self.page_size) + self.indexer.page_bytes(self.page_size)

    def _kinds(self) -> dict[str, tuple[type, ...]]:
        return {**super()._kinds(), "attention": (MLAGeometry,), "indexer": (IndexerGeometry,)}

    def _check_model(self) -> None:
        others = sorted(set(self.indexer.layers) - set(self.attention.layers))
        if others:
            raise ConfigError(f"indexer.layers has {others}, which attention.layers has not; an indexer selects for attention")
