"""Configuration of a stack: geometry, sizes, device, ranks and policies."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from hicache_storage.hybrid.policies import PrefetchRules, WritePolicy
from hicache_storage.hybrid.ranks import ParallelConfig
from hicache_storage.pools import AttentionGeometry, IndexerGeometry, MambaGeometry, MLAGeometry
from hicache_storage.spec import ConfigError, PoolName, StorageIdentity

if TYPE_CHECKING:
    from hicache_storage.pools import PoolGeometry

FALLBACK_LAYOUT = "page_first"
"""Layout of a side pool that does not support the layout of KV."""


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """A model's kinds of state, and the sizes and policies of its cache.

    Raises:
        ConfigError: a field is out of range, or contradicts another; the message names it and a
            fix.
    """

    attention: AttentionGeometry | MLAGeometry
    mamba: MambaGeometry | None = None
    """Layers with recurrent states; None for a model without them."""
    indexer: IndexerGeometry | None = None
    """Keys that sparse attention selects tokens by, in the slots of KV; None for none."""
    page_size: int
    """Tokens per page."""
    device_tokens: int
    """KV slots on the device, whole pages."""
    host_tokens: int
    """KV slots on the host, whole pages."""
    device_states: int = 0
    """State slots on the device: two for each request that runs, and those that are kept."""
    host_states: int = 0
    """State slots on the host."""
    checkpoint_interval: int = 256
    """Tokens between the states that are kept.

    The grid is the least common multiple with the page and the state chunk.
    """
    layout: str = "page_first"
    """Layout of KV on the host; side pools have the same, or `page_first` if they lack it."""
    device: str = "cuda"
    """A torch device; on "cpu" copies run on the stream simulator."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    """This rank."""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    prefetch: PrefetchRules = field(default_factory=PrefetchRules)
    storage_call_seconds: float = 30.0
    """Time after which a call of the storage is abandoned; more than the storage's own deadline."""
    stop_seconds: float = 2.0
    """Time that closing waits for each thread that calls the storage."""

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name} must be {kind}, got {getattr(self, name)!r:.80}")
        try:
            object.__setattr__(self, "write_policy", WritePolicy(self.write_policy))
        except ValueError as error:
            raise ConfigError(
                f"write_policy must be one of {', '.join(WritePolicy)}; got {self.write_policy!r}"
            ) from error
        for name in ("storage_call_seconds", "stop_seconds"):
            # Not `<= 0`, which is false for NaN.
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        self._check_choices()
        _check_count("page_size", self.page_size)
        _check_pages("device_tokens", self.device_tokens, self.page_size)
        _check_pages("host_tokens", self.host_tokens, self.page_size)
        self._check_states()
        self._check_indexer()

    @property
    def pools(self) -> dict[PoolName, PoolGeometry]:
        """Geometry of each pool."""
        found = {
            PoolName.KV: self.attention,
            PoolName.MAMBA: self.mamba,
            PoolName.INDEXER: self.indexer,
        }
        return {name: geometry for name, geometry in found.items() if geometry is not None}

    @property
    def checkpoint_grid(self) -> int | None:
        """Tokens between the places where states are kept.

        None for a model without states.
        """
        if self.mamba is None:
            return None
        return math.lcm(self.page_size, self.mamba.state_chunk, self.checkpoint_interval)

    def slots_of(self, pool: PoolName) -> tuple[int, int, int]:
        """Return a pool's slots on the device, on the host, and of a page."""
        if pool == PoolName.MAMBA:
            return self.device_states, self.host_states, 1
        # The indexer lies in the slots of KV.
        return self.device_tokens, self.host_tokens, self.page_size

    def layout_of(self, pool: PoolName) -> str:
        """Return a pool's layout on the host."""
        return self.layout if self.layout in self.pools[pool].layouts else FALLBACK_LAYOUT

    def identity(self, model: str, *, kv_dtype: str | None = None, **texts: str) -> StorageIdentity:
        """Return the identity of this rank's storage, for `create_storage`.

        Args:
            model: name chosen by the operator.
            kv_dtype: logical element type of KV where the pool's does not say it, as for fp8 kept
                in bytes.
            texts: `revision`, `tenant`, `adapter` and `salt`.
        """
        base = StorageIdentity(
            model=model,
            kv_dtype=kv_dtype or self.attention.element_type,
            page_size=self.page_size,
            layout=self.layout,
            kv_replicated=self.attention.replicated,
        )
        given: dict[str, Any] = dict(texts)
        return self.parallel.identity(replace(base, **given))

    def _check_choices(self) -> None:
        layouts = self.attention.layouts
        if self.layout not in layouts:
            raise ConfigError(f"layout must be one of {', '.join(layouts)}; got {self.layout!r}")
        try:
            kind = torch.device(self.device).type
        except RuntimeError as error:
            raise ConfigError(
                f"device must name a torch device such as 'cuda:0' or 'cpu', got {self.device!r}"
            ) from error
        if kind not in ("cuda", "cpu"):
            raise ConfigError(f"device must be of kind cuda or cpu, got {self.device!r}")

    def _check_states(self) -> None:
        if self.mamba is None:
            for name in ("device_states", "host_states"):
                if getattr(self, name):
                    raise ConfigError(f"{name} is given without mamba, whose slots it counts")
            return
        _check_count("device_states", self.device_states)
        _check_count("host_states", self.host_states)
        _check_count("checkpoint_interval", self.checkpoint_interval)
        both = sorted(set(self.attention.layers) & set(self.mamba.layers))
        if both:
            raise ConfigError(
                f"mamba.layers and attention.layers both have {both}; a layer is of one kind"
            )

    def _check_indexer(self) -> None:
        layers = () if self.indexer is None else self.indexer.layers
        others = sorted(set(layers) - set(self.attention.layers))
        if others:
            raise ConfigError(
                f"indexer.layers has {others}, which attention.layers has not; an indexer selects "
                "for attention"
            )


_KINDS: Final = {
    "attention": AttentionGeometry | MLAGeometry,
    "mamba": MambaGeometry | None,
    "indexer": IndexerGeometry | None,
    "parallel": ParallelConfig,
    "prefetch": PrefetchRules,
}
"""Types of the fields that are configurations themselves."""


def _check_count(name: str, count: int) -> None:
    """Check that a field is an integer of 1 at least."""
    # A bool is an `int`: `device_states=True` is a mistake.
    if type(count) is not int or count < 1:
        raise ConfigError(f"{name} must be a whole number from 1 on, got {count!r}")


def _check_pages(name: str, slots: int, page_size: int) -> None:
    """Check that a number of slots is whole pages."""
    _check_count(name, slots)
    if slots % page_size:
        fitting = -(-slots // page_size) * page_size
        raise ConfigError(
            f"{name} must be a multiple of page_size ({page_size}), got {slots}; pass {fitting}"
        )
